"""The page: a tab of images and one of text, the controls that both have, and what every model does with them."""

import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path

import gradio as gr

from deit_gka.figures.subjects import SEES_PHOTOGRAPHS
from runs.explore import markup
from runs.explore.language import MAX_CHARACTERS, LanguageModel
from runs.explore.models import Models
from runs.explore.photos import MAX_BYTES, SUFFIXES, Photo, bundled, read_upload
from runs.explore.scaling import EVERYWHERE, MEAN, WHERE, Scaling, read_controls
from runs.explore.vision import PATCH, VIEWS, VisionModel
from trainkit_gka.cli import UserError

TITLE = "Gaussian kernel attention"
INTRODUCTION = """# Gaussian kernel attention
What a trained model attends to, and what becomes of its predictions when the bandwidths σ of its kernels are scaled."""
NO_LANGUAGE = "A language model is missing here. `make demo` trains one; `make explore RUN=folder` shows another."
START = "Return the number of items in the list. If the list is empty, return"
POWERS = 4  # σ is scaled by 2^-4 to 2^4
QUEUE = 32
CACHE_SECONDS, SESSION_SECONDS = 60, 3600  # after which a picture or an upload is deleted, and an image forgotten
# Gradio's button says nothing when the server refuses a file for its size, so that the page refuses it first.
REFUSE = f"""document.addEventListener('change', event => {{
  const file = event.target.files?.[0];
  const refused = file && file.size > {MAX_BYTES};
  element.innerHTML = '<p class="note" role="alert"></p>';
  const words = `${{file?.name}} is larger than {MAX_BYTES >> 20} MiB; give a smaller one.`;
  if (refused) element.firstChild.textContent = words;
  if (refused) event.stopImmediatePropagation();
}}, true);"""
ON_CLICK = """element.addEventListener('click', event => {
  const token = event.target.closest('[data-token]');
  if (token) trigger('select', {index: Number(token.dataset.token), value: ''});
});"""
PICTURE = dict(
    interactive=False, buttons=[], show_label=False, container=False,
    alt_text="The image and the chosen map beside it; click on a patch to see what it looks at.",
)  # fmt: skip


class Page(gr.Blocks):
    """Blocks that accept what somebody types into a slider's box, and report other values that do not fit in a line."""

    async def preprocess_data(self, block_fn, inputs, state, explicit_call=False):
        """Values for an event's function from what a browser sent. Raises gr.Error for values that do not fit."""
        try:
            parts = [state[part._id] for part in block_fn.inputs]  # as they are by now: a slider may have other ends
            inputs = [_inside(part, value) for part, value in zip(parts, inputs, strict=True)]
            return await super().preprocess_data(block_fn, inputs, state, explicit_call)
        except Exception as error:  # Gradio prints a traceback for each, and only hand-made requests get here
            print(f"refused a request with a value that does not fit: {type(error).__name__}", file=sys.stderr)
            raise gr.Error("A value does not fit the page; reload it.", print_exception=False) from None


def _inside(part, value):
    """Of a slider the nearest number that it has; its start while its box is empty or holds a minus sign alone."""
    if not isinstance(part, gr.Slider):
        return value
    number = value if isinstance(value, (int, float)) else part.value
    return min(part.maximum, max(part.minimum, number))


def build(models: Models) -> Page:
    """The page of these models."""
    with Page(title=TITLE, analytics_enabled=False, delete_cache=(CACHE_SECONDS, CACHE_SECONDS)) as page:
        gr.Markdown(INTRODUCTION)
        with gr.Tab("Images"):
            _images(models.vision, page)
        with gr.Tab("Text"):
            if models.language:
                _text(models.language, page)
            else:
                gr.Markdown(NO_LANGUAGE)
    return page.queue(max_size=QUEUE, default_concurrency_limit=1, api_open=False)


# What both tabs have


html = partial(gr.HTML, apply_default_css=False)  # a piece of the page that is styled by `markup.CSS` alone


def controls_of(model: VisionModel | LanguageModel) -> list:
    """The controls, in the order in which `read_controls` takes their values. Models without σ get none for it."""
    layers, heads, _ = model.shape
    return [
        gr.Slider(1, max(2, layers), value=layers, step=1, label="Layer", visible=layers > 1),
        gr.Dropdown([MEAN, *(f"head {head}" for head in range(1, heads + 1))], value=MEAN, label="Head"),
        gr.Slider(
            -POWERS, POWERS, value=0, step=0.25, label="σ × 2 to the power of", visible=model.has_sigma,
            info="0 leaves σ as it is. The model runs again with every change.",
        ),
        gr.Radio(WHERE, value=EVERYWHERE, label="Scale σ of", visible=model.has_sigma),
    ]  # fmt: skip


def columns_of(models: list) -> Iterator[int]:
    """The number of every model, inside a column of the page for it."""
    with gr.Column(scale=3, min_width=300, elem_classes="panels"), gr.Row():
        for number, model in enumerate(models):
            with gr.Column(min_width=150):
                html(markup.title(model.about))
                yield number


def draw(models: list, *values) -> list:
    """What the panels of the models show. values: of the inputs of `show`, then of the controls."""
    layer, head, scaling = read_controls(*values[-4:])
    pairs = zip(models, (scaling, Scaling()))  # a twin stays as it is
    return [part for model, own in pairs for part in model.show(*values[:-4], layer, head, own)]


def listen(triggers: list, function: Callable, inputs: list, outputs: list, waits: bool = False) -> None:
    """Call the function after each of the events; of those that happen while it runs, the last one counts.

    All functions of the page wait in one queue for one worker, and none of them is offered to programs. A UserError is
    shown on the page, and everything else there stays as it is. waits: whether the page shows that it is being called,
    and takes no further event until then.
    """

    @wraps(function)
    def call(*args):
        try:
            return function(*args)
        except UserError as error:
            words = str(error)
            gr.Warning(f"{words[0].upper()}{words[1:]}.", title="")
            return gr.skip()

    mode = dict(trigger_mode="once") if waits else dict(trigger_mode="always_last", show_progress="hidden")
    alone = dict(concurrency_id="models", concurrency_limit=1, api_visibility="private")
    gr.on(triggers, call, inputs, outputs, **mode, **alone)


# The tabs


def _images(models: list[VisionModel], page: Page) -> None:
    """Choose or upload an image, click on a patch, scale σ."""
    photos, patches = bundled(), models[0].tokens.grid[0] * models[0].tokens.grid[1]
    is_small = min(models[0].drawn.model.patch_embed.img_size) < SEES_PHOTOGRAPHS
    start = list(photos.values())[0 if is_small else -1]
    photo = gr.State(start, time_to_live=SESSION_SECONDS)
    with gr.Row():
        name = gr.Dropdown(list(photos), value=start.name, label="Image", scale=2)
        with gr.Column(scale=1, min_width=200):
            upload = gr.UploadButton("Upload an image", type="filepath", file_types=list(SUFFIXES))
            html(elem_id="too-large", js_on_load=REFUSE)
    with gr.Row():
        with gr.Column(scale=1, min_width=260):
            view = gr.Radio(VIEWS, value=VIEWS[0], label="Map", info="Click on the image to choose a patch.")
            patch = gr.Slider(1, patches, value=patches // 2, step=1, label="Patch, row by row from the upper left")
            controls = controls_of(models[0])
        panels = [
            [gr.Image(**PICTURE, elem_id=f"map-{n}"), html(elem_id=f"note-{n}"), html(elem_id=f"chances-{n}")]
            for n in columns_of(models)
        ]
    inputs, shown = [photo, view, patch, *controls], [part for panel in panels for part in panel]
    pictures = [panel[0] for panel in panels]

    def click(place: gr.SelectData, photo: Photo, view: str, patch: float, *values) -> list:
        patch = models[pictures.index(place.target)].patch_at(*place.index) + 1
        return [PATCH, patch, *draw(models, photo, PATCH, patch, *values)]

    def choose(name: str, *values) -> list:
        return [photos[name], gr.Dropdown(label="Image"), *draw(models, photos[name], *values)]

    def take(path: str, *values) -> list:
        mine = read_upload(Path(path).read_bytes(), Path(path).name)
        return [mine, gr.Dropdown(value=None, label=f"Image: {mine.name}"), *draw(models, mine, *values)]

    listen([page.load, *(part.input for part in inputs[1:])], partial(draw, models), inputs, shown)
    listen([picture.select for picture in pictures], click, inputs, [view, patch, *shown])
    listen([name.input], choose, [name, *inputs[1:]], [photo, name, *shown])
    listen([upload.upload], take, [upload, *inputs[1:]], [photo, name, *shown], waits=True)


def _text(models: list[LanguageModel], page: Page) -> None:
    """Type a text, choose a token, scale σ."""
    text = gr.Textbox(START, label="Text", lines=2, max_length=MAX_CHARACTERS)
    with gr.Row():
        with gr.Column(scale=1, min_width=260):
            token = gr.Slider(1, 2, value=1, step=1, label="Token", info="Or click on one.")
            controls = controls_of(models[0])
            more = gr.Button("Continue the text")
        panels = [
            [html(elem_id=f"tokens-{n}", js_on_load=ON_CLICK)]
            + [html(elem_id=f"{name}-{n}") for name in ("row", "next", "continuation")]
            for n in columns_of(models)
        ]
    inputs, shown = [text, token, *controls], [part for panel in panels for part in panel[:-1]]

    def retype(text: str, token: float, *values) -> list:
        last = len(models[0].ids(text))
        return [gr.Slider(maximum=max(2, last), value=last), *draw(models, text, last, *values)]

    def click(place: gr.SelectData, text: str, token: float, *values) -> list:
        return [place.index + 1, *draw(models, text, place.index + 1, *values)]

    def proceed(text: str, *values) -> list[str]:
        pairs = zip(models, (read_controls(*values)[-1], Scaling()))
        return [model.continuation(text, scaling) for model, scaling in pairs]

    listen([page.load, text.change], retype, inputs, [token, *shown])
    listen([part.input for part in inputs[1:]], partial(draw, models), inputs, shown)
    listen([panel[0].select for panel in panels], click, inputs, [token, *shown])
    listen([more.click], proceed, [text, *controls], [panel[-1] for panel in panels], waits=True)
