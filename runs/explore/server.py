"""How the page is served: to whoever opened it, with nothing from elsewhere and no access to files of the machine."""

from urllib.parse import urlsplit

import gradio as gr
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from runs.explore.markup import CSS
from runs.explore.photos import MAX_BYTES

SESSIONS = 64
FONTS = dict(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
REFUSAL = PlainTextResponse("this request is from a page of another site", status_code=403)


def serve(page: gr.Blocks, host: str, port: int, own: bool) -> str:
    """Serve the page in threads of this process. own: whether `host` is this machine alone. Returns its address.

    Raises OSError if the port is taken.
    """
    # A page elsewhere whose name was made to point here sends its own name.
    known = [host, "localhost", "127.0.0.1"] if own else ["*"]
    return page.launch(
        server_name=host,
        server_port=port or None,
        theme=gr.themes.Default(**FONTS).set(body_text_color_subdued="*neutral_500"),
        css=CSS,
        app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=known), Middleware(same_origin)]},
        share=False,
        max_file_size=MAX_BYTES,
        state_session_capacity=SESSIONS,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        prevent_thread_lock=True,
        quiet=True,
    )[1]


def same_origin(app: ASGIApp) -> ASGIApp:
    """Refuses what pages of other sites send or embed; a link to the page works. Browsers tell where a request is from.

    Without this, any site could upload files and run the models: only what it gets back is hidden from it.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        foreign = scope["type"] in ("http", "websocket") and _is_foreign(Headers(scope=scope))
        await (REFUSAL if foreign else app)(scope, receive, send)

    return guarded


def _is_foreign(headers: Headers) -> bool:
    if "origin" in headers:  # of everything that a browser sends with a body; "null" of a file or a sandbox
        return urlsplit(headers["origin"]).netloc != headers.get("host")
    opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not opened
