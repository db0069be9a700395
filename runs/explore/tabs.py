"""The two tabs: an image or a text, the controls that both have, and what every model does with them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import torch

from runs.explore import markup
from runs.explore.events import ONE_AT_A_TIME, WHILE_CHANGING, plain
from runs.explore.language import MAX_CHARACTERS, LanguageModel
from runs.explore.photos import MAX_BYTES, SUFFIXES, Photo, read_upload
from runs.explore.scaling import Scaling
from runs.explore.vision import PATCH, VIEWS, View, VisionModel

EVERYWHERE, LAYER, HEAD = WHERE = ("all layers and heads", "this layer", "this layer and head")
MEAN = "mean of the heads"
POWERS = 4  # σ is scaled by 2^-4 to 2^4
CLASSES, TOKENS, NAMED = 5, 8, 4  # how many are listed
LARGE = 64  # pixels; models of larger images begin with a photograph, others with a digit
SESSION_SECONDS = 3600
START = "Return the number of items in the list. If the list is empty, return"
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


@dataclass(frozen=True)
class Choice:
    """What the controls say. layer, head: from 0; the head is None for all of them."""

    layer: int
    head: int | None
    scaling: Scaling

    @classmethod
    def of(cls, layer: float, head: str, power: float, where: str) -> "Choice":
        number, one = int(layer) - 1, None if head == MEAN else int(head.split()[-1]) - 1
        if not power:
            return cls(number, one, Scaling())
        of_layer = None if where == EVERYWHERE else number
        return cls(number, one, Scaling(2.0**power, of_layer, one if where == HEAD else None))


def controls_of(model: VisionModel | LanguageModel) -> list:
    """The controls, in the order in which `Choice.of` takes their values. Models without σ get none for it."""
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


@dataclass(frozen=True)
class Tab:
    """What is shown of one model, or of one and its twin, whose σ stays as it is.

    inputs: components of what the models look at, then the controls. panels: the components of each model. show: of a
    model, the values of the first inputs, the choice, and a scaling, the values of a panel's components.
    """

    models: list
    inputs: list
    panels: list[list]
    show: Callable[..., list]

    @property
    def outputs(self) -> list:
        return [component for panel in self.panels for component in panel]

    def draw(self, *values) -> list:
        """The values of all outputs."""
        subject, choice = values[:-4], Choice.of(*values[-4:])
        pairs = zip(self.models, (choice.scaling, Scaling()))
        return [value for model, scaling in pairs for value in self.show(model, *subject, choice, scaling)]

    def draw_on(self, *triggers) -> None:
        gr.on([*triggers], plain(self.draw), self.inputs, self.outputs, **WHILE_CHANGING)


def before_and_after(scaling: Scaling, compute: Callable[[Scaling], Any]) -> dict[str, Any]:
    """What is computed with the bandwidths as they are and, if they are scaled, with those; by a heading."""
    results = {"as it is": compute(Scaling())}
    if scaling.factor != 1:
        results[f"σ × {scaling.factor:.3g}"] = compute(scaling)
    return results


def html(value: str = "", **settings) -> gr.HTML:
    """A piece of the page that is styled by `markup.CSS` alone."""
    return gr.HTML(value, apply_default_css=False, **settings)


# Images


def show_image(model: VisionModel, photo: Photo, view: str, patch: float, choice: Choice, scaling: Scaling) -> list:
    """The image and its map, what it is, and the likeliest classes."""
    picture = model.picture(photo, View(view, choice.layer, choice.head, int(patch) - 1), scaling)
    columns = before_and_after(scaling, lambda scaling: model.look(photo, scaling).probabilities)
    caption = "Prediction" + (" of a random initialisation: it means nothing" if model.untrained else "")
    table = markup.chances(caption, columns, model.classes.__getitem__, CLASSES)
    return [picture.pixels, markup.scale(picture.norm, picture.caption), table]


def images(models: list[VisionModel], photos: dict[str, Photo], page: gr.Blocks) -> None:
    """The tab of images: choose or upload one, click on a patch, scale σ."""
    first = models[0]
    start = list(photos.values())[-1 if max(first.model.patch_embed.img_size) > LARGE else 0]
    photo = gr.State(start, time_to_live=SESSION_SECONDS)
    with gr.Row():
        name = gr.Dropdown(list(photos), value=start.name, label="Image", scale=2)
        with gr.Column(scale=1, min_width=200):
            upload = gr.UploadButton("Upload an image", type="filepath", file_types=list(SUFFIXES))
            html(elem_id="too-large", js_on_load=REFUSE)
    with gr.Row():
        with gr.Column(scale=1, min_width=260):
            view = gr.Radio(VIEWS, value=VIEWS[0], label="Map", info="Click on the image to choose a patch.")
            last = first.tokens.grid[0] * first.tokens.grid[1]
            patch = gr.Slider(1, last, value=last // 2, step=1, label="Patch, row by row from the upper left")
            controls = controls_of(first)
        with gr.Column(scale=3, min_width=300, elem_classes="panels"), gr.Row():
            panels = [_image_panel(model, number) for number, model in enumerate(models)]
    tab = Tab(models, [photo, view, patch, *controls], panels, show_image)

    def click_on(model: VisionModel) -> Callable:
        def click(place: gr.SelectData, photo: Photo, view: str, patch: float, *values) -> list:
            patch = model.patch_at(*place.index) + 1
            return [PATCH, patch, *tab.draw(photo, PATCH, patch, *values)]

        return click

    def choose(name: str, *rest) -> list:
        return [photos[name], gr.Dropdown(label="Image"), *tab.draw(photos[name], *rest)]

    @plain
    def take(path: str, *rest) -> list:
        mine = read_upload(Path(path).read_bytes(), Path(path).name)
        return [mine, gr.Dropdown(value=None, label=f"Image: {mine.name}"), *tab.draw(mine, *rest)]

    tab.draw_on(page.load, *(component.input for component in (view, patch, *controls)))
    for model, (image, *_) in zip(models, panels):
        image.select(click_on(model), tab.inputs, [view, patch, *tab.outputs], **WHILE_CHANGING)
    name.input(choose, [name, *tab.inputs[1:]], [photo, name, *tab.outputs], **WHILE_CHANGING)
    upload.upload(take, [upload, *tab.inputs[1:]], [photo, name, *tab.outputs], **ONE_AT_A_TIME)


def _image_panel(model: VisionModel, number: int) -> list:
    with gr.Column(min_width=150):
        html(markup.title(model.about))
        image = gr.Image(
            interactive=False, buttons=[], show_label=False, elem_id=f"map-{number}", container=False,
            alt_text="The image and the chosen map beside it; click on a patch to see what it looks at.",
        )  # fmt: skip
        return [image, html(elem_id=f"note-{number}"), html(elem_id=f"chances-{number}")]


# Text


def show_text(model: LanguageModel, text: str, token: float, choice: Choice, scaling: Scaling) -> list:
    """The tokens in the colours of a row of W, what the row says, and the likeliest next tokens."""
    read = model.read(text, scaling)
    token = min(int(token), len(read.tokens)) - 1
    row = model.row(read, choice.layer, choice.head, token)
    columns = before_and_after(scaling, lambda scaling: model.read(text, scaling).probabilities)
    table = markup.chances("Next token", columns, lambda index: markup.visible(model.name(index)), TOKENS)
    return [markup.tokens(read.tokens, row, token), _note(read, row, choice, token), table]


def texts(models: list[LanguageModel], page: gr.Blocks) -> None:
    """The tab of text: type one, choose a token, scale σ."""
    text = gr.Textbox(START, label="Text", lines=2, max_length=MAX_CHARACTERS)
    with gr.Row():
        with gr.Column(scale=1, min_width=260):
            token = gr.Slider(1, 2, value=1, step=1, label="Token", info="Or click on one.")
            controls = controls_of(models[0])
            more = gr.Button("Continue the text")
        with gr.Column(scale=3, min_width=300, elem_classes="panels"), gr.Row():
            panels, written = zip(*(_text_panel(model, number) for number, model in enumerate(models)))
    tab = Tab(models, [text, token, *controls], list(panels), show_text)

    @plain
    def retype(text: str, token: float, *values) -> list:
        last = models[0].count(text)
        return [gr.Slider(maximum=max(2, last), value=last), *tab.draw(text, last, *values)]

    def click(place: gr.SelectData, text: str, token: float, *values) -> list:
        return [place.index + 1, *tab.draw(text, place.index + 1, *values)]

    @plain
    def proceed(text: str, *values) -> list[str]:
        pairs = zip(models, (Choice.of(*values).scaling, Scaling()))
        return [_continuations(model, text, scaling) for model, scaling in pairs]

    gr.on([page.load, text.change], retype, tab.inputs, [token, *tab.outputs], **WHILE_CHANGING)
    tab.draw_on(*(component.input for component in (token, *controls)))
    for tokens, *_ in panels:
        tokens.select(plain(click), tab.inputs, [token, *tab.outputs], **WHILE_CHANGING)
    more.click(proceed, [text, *controls], list(written), **ONE_AT_A_TIME)


def _text_panel(model: LanguageModel, number: int) -> tuple[list, gr.HTML]:
    """The components that are drawn with every change, and the one for the text that the model writes."""
    with gr.Column(min_width=150):
        html(markup.title(model.about))
        drawn = [html(elem_id=f"tokens-{number}", js_on_load=ON_CLICK)]
        drawn += [html(elem_id=f"{name}-{number}") for name in ("row", "next")]
        return drawn, html(elem_id=f"continuation-{number}")


def _note(read, row: torch.Tensor, choice: Choice, token: int) -> str:
    layer, most = read.layers[choice.layer], row.topk(min(NAMED, token + 1))
    named = [markup.visible(text) for text in read.tokens]
    shares = ", ".join(f"“{named[place]}” {share:.3f}" for share, place in zip(*map(torch.Tensor.tolist, most)))
    if layer.sigma is None:
        sigma = "This layer has no σ."
    elif choice.head is None:
        sigma = f"σ = {layer.sigma.mean():.3g} (mean over heads)."
    else:
        sigma = f"σ = {layer.sigma[choice.head]:.3g}."
    return markup.note(f"Token {token + 1}, “{named[token]}”, takes most from: {shares}. {sigma}")


def _continuations(model: LanguageModel, text: str, scaling: Scaling) -> str:
    """The continuation as the model is, and with scaled bandwidths if they are."""
    written = before_and_after(scaling, lambda scaling: model.continuation(text, scaling))
    return "".join(markup.text(f"Continuation, {heading}", words) for heading, words in written.items())
