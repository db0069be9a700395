"""Who may use the page: whoever opened it, and no page of another site in the same browser."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class SameOrigin:
    """Refuses what pages of other sites send or embed; a link to the page works. Browsers tell where a request is from.

    Without this, any site could upload files and run the models: only what it gets back is hidden from it.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] in ("http", "websocket") and _is_foreign(Headers(scope=scope)):
            app = PlainTextResponse("this request is from a page of another site", status_code=403)
        await app(scope, receive, send)


def _is_foreign(headers: Headers) -> bool:
    if "origin" in headers:  # of everything that a browser sends with a body; "null" of a file or a sandbox
        return urlsplit(headers["origin"]).netloc != headers.get("host")
    opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not opened


def guards(host: str, own: bool) -> list[Middleware]:
    """The middleware of a page at `host`; own: which is this machine alone."""
    # A page elsewhere whose name was made to point here sends its own name.
    known = [host, "localhost", "127.0.0.1"] if own else ["*"]
    return [Middleware(TrustedHostMiddleware, allowed_hosts=known), Middleware(SameOrigin)]
