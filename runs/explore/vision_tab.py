"""The tab of images: choose or upload one, click on a patch, scale σ."""

from collections.abc import Callable
from dataclasses import dataclass

import gradio as gr

from runs.explore import controls, markup
from runs.explore.controls import Choice, before_and_after, html
from runs.explore.events import ONE_AT_A_TIME, WHILE_CHANGING, plain
from runs.explore.photos import MAX_BYTES, SUFFIXES, Photo, read_upload
from runs.explore.scaling import Scaling
from runs.explore.vision import PATCH, VIEWS, View, VisionModel

TOP = 5
LARGE = 64  # pixels; models of larger images begin with a photograph, others with a digit
SESSION_SECONDS = 3600
# Gradio's button says nothing when the server refuses a file for its size, so that the page refuses it first.
REFUSE = f"""document.addEventListener('change', event => {{
  const file = event.target.files?.[0];
  const refused = file && file.size > {MAX_BYTES};
  element.innerHTML = '<p class="note" role="alert"></p>';
  const words = `${{file?.name}} is larger than {MAX_BYTES >> 20} MiB; give a smaller one.`;
  if (refused) element.firstChild.textContent = words;
  if (refused) event.stopImmediatePropagation();
}}, true);"""


@dataclass(frozen=True)
class Panel:
    """Where one model is shown."""

    model: VisionModel
    image: gr.Image
    note: gr.HTML
    chances: gr.HTML

    @property
    def all(self) -> list:
        return [self.image, self.note, self.chances]

    def show(self, photo: Photo, view: View, scaling: Scaling) -> list:
        """Values of the components."""
        model = self.model
        seen = model.look(photo, scaling)
        picture = model.picture(seen, view)
        columns = before_and_after(scaling, lambda scaling: model.look(photo, scaling).probabilities)
        caption = "Prediction" + (" of a random initialisation: it means nothing" if model.untrained else "")
        table = markup.chances(caption, columns, model.classes.__getitem__, TOP)
        return [picture.pixels, markup.scale(picture.norm, picture.caption), table]


def build(models: list[VisionModel], photos: dict[str, Photo], page: gr.Blocks) -> None:
    """Put the tab on the page. models: one, or one and its twin."""
    first = models[0]
    large = max(first.model.patch_embed.img_size) > LARGE
    start = list(photos.values())[-1 if large else 0]
    photo = gr.State(start, time_to_live=SESSION_SECONDS)
    with gr.Row():
        name = gr.Dropdown(list(photos), value=start.name, label="Image", scale=2)
        with gr.Column(scale=1, min_width=200):
            upload = gr.UploadButton("Upload an image", type="binary", file_types=list(SUFFIXES))
            html(elem_id="too-large", js_on_load=REFUSE)
    with gr.Row():
        with gr.Column(scale=1, min_width=260):
            view = gr.Radio(VIEWS, value=VIEWS[0], label="Map", info="Click on the image to choose a patch.")
            last = first.tokens.grid[0] * first.tokens.grid[1] - 1
            patch = gr.Slider(0, max(1, last), value=last // 2, step=1, label="Patch, row by row from the upper left")
            panel = controls.build(first.shape[0], first.shape[1], first.has_sigma)
        with gr.Column(scale=3, min_width=300, elem_classes="panels"), gr.Row():
            panels = [_panel(model, number) for number, model in enumerate(models)]
    inputs, outputs = [photo, view, patch, *panel.all], [part for panel in panels for part in panel.all]

    def draw(photo: Photo, view: str, patch: float, *values) -> list:
        choice = Choice.of(*values)
        shown = View(view, choice.layer, choice.head, int(patch))
        scalings = [choice.scaling, Scaling()]
        return [value for panel, scaling in zip(panels, scalings) for value in panel.show(photo, shown, scaling)]

    def click_on(model: VisionModel) -> Callable:
        def click(place: gr.SelectData, photo: Photo, view: str, patch: float, *values) -> list:
            patch = model.patch_at(*place.index)
            return [PATCH, patch, *draw(photo, PATCH, patch, *values)]

        return click

    def choose(name: str, *rest) -> list:
        return [photos[name], *draw(photos[name], *rest)]

    @plain
    def take(content: bytes, *rest) -> list:
        mine = read_upload(content)
        return [mine, None, *draw(mine, *rest)]

    changes = [component.input for component in (view, patch, *panel.all)]
    gr.on([page.load, *changes], plain(draw), inputs, outputs, **WHILE_CHANGING)
    for shown in panels:
        shown.image.select(click_on(shown.model), inputs, [view, patch, *outputs], **WHILE_CHANGING)
    name.input(choose, [name, *inputs[1:]], [photo, *outputs], **WHILE_CHANGING)
    upload.upload(take, [upload, *inputs[1:]], [photo, name, *outputs], **ONE_AT_A_TIME)


def _panel(model: VisionModel, number: int) -> Panel:
    with gr.Column(min_width=150):
        html(markup.title(model.about))
        image = gr.Image(
            interactive=False, buttons=[], show_label=False, elem_id=f"map-{number}", container=False,
            alt_text="The image with the chosen map over it; click on a patch to see what it looks at.",
        )  # fmt: skip
        return Panel(model, image, html(elem_id=f"note-{number}"), html(elem_id=f"chances-{number}"))
