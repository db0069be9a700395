"""The page, and how it is served: on this machine, with nothing from elsewhere and no access to its files."""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported
# Gradio asks its own page whether it is there: not through a proxy, of a kind that may need a package more.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"

import gradio as gr

from runs.explore import tabs
from runs.explore.events import Page
from runs.explore.guard import guards
from runs.explore.markup import CSS
from runs.explore.models import Models
from runs.explore.photos import MAX_BYTES, bundled

TITLE = "Gaussian kernel attention"
INTRODUCTION = """# Gaussian kernel attention
What a trained model attends to, and what becomes of its predictions when the bandwidths σ of its kernels are scaled."""
NO_LANGUAGE = "A language model is missing here. `make demo` trains one; `make explore RUN=folder` shows another."
QUEUE, SESSIONS = 32, 64
CACHE_SECONDS = 60  # after which a picture or an upload is deleted
FONTS = dict(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])


def build(models: Models) -> gr.Blocks:
    """The page of these models."""
    with Page(title=TITLE, analytics_enabled=False, delete_cache=(CACHE_SECONDS, CACHE_SECONDS)) as page:
        gr.Markdown(INTRODUCTION)
        with gr.Tab("Images"):
            tabs.images(models.vision, bundled(), page)
        with gr.Tab("Text"):
            if models.language:
                tabs.texts(models.language, page)
            else:
                gr.Markdown(NO_LANGUAGE)
    return page.queue(max_size=QUEUE, default_concurrency_limit=1, api_open=False)


def serve(page: gr.Blocks, host: str, port: int, own: bool) -> str:
    """Serve the page in threads of this process. own: whether `host` is this machine alone. Returns its address.

    Raises OSError if the port is taken.
    """
    address = page.launch(
        server_name=host,
        server_port=port or None,
        theme=gr.themes.Default(**FONTS).set(body_text_color_subdued="*neutral_500"),
        css=CSS,
        app_kwargs={"middleware": guards(host, own)},
        share=False,
        allowed_paths=[],
        max_file_size=MAX_BYTES,
        state_session_capacity=SESSIONS,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        inbrowser=False,
        prevent_thread_lock=True,
        quiet=True,
    )[1]
    return address
