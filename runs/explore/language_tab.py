"""The tab of text: type one, choose a token, scale σ."""

from dataclasses import dataclass

import gradio as gr

from runs.explore import controls, markup
from runs.explore.controls import Choice, before_and_after, html
from runs.explore.events import ONE_AT_A_TIME, WHILE_CHANGING, plain
from runs.explore.language import MAX_CHARACTERS, LanguageModel
from runs.explore.scaling import Scaling

TOP, NAMED = 8, 4
START = "Return the number of items in the list. If the list is empty, return"
ON_CLICK = """element.addEventListener('click', event => {
  const token = event.target.closest('[data-token]');
  if (token) trigger('select', {index: Number(token.dataset.token), value: ''});
});"""


@dataclass(frozen=True)
class Panel:
    """Where one model is shown."""

    model: LanguageModel
    tokens: gr.HTML
    note: gr.HTML
    chances: gr.HTML
    written: gr.HTML

    @property
    def all(self) -> list:
        return [self.tokens, self.note, self.chances]

    def show(self, text: str, choice: Choice, token: int, scaling: Scaling) -> list:
        """Values of the components."""
        model = self.model
        read = model.read(text, scaling)
        token = min(token, len(read.tokens) - 1)
        row = model.row(read, choice.layer, choice.head, token)
        columns = before_and_after(scaling, lambda scaling: model.read(text, scaling).probabilities)
        table = markup.chances("Next token", columns, lambda index: markup.visible(model.name(index)), TOP)
        return [markup.tokens(read.tokens, row, token), _note(read, row, choice, token), table]


def build(models: list[LanguageModel], page: gr.Blocks) -> None:
    """Put the tab on the page. models: one, or one and its twin."""
    first = models[0]
    text = gr.Textbox(START, label="Text", lines=2, max_length=MAX_CHARACTERS)
    with gr.Row():
        with gr.Column(scale=1, min_width=260):
            token = gr.Slider(0, 1, value=0, step=1, label="Token", info="Or click on one.")
            panel = controls.build(first.shape[0], first.shape[1], first.has_sigma)
            more = gr.Button("Continue the text")
        with gr.Column(scale=3, min_width=300, elem_classes="panels"), gr.Row():
            panels = [_panel(model, number) for number, model in enumerate(models)]
    inputs, outputs = [text, token, *panel.all], [part for panel in panels for part in panel.all]

    def draw(text: str, token: float, *values) -> list:
        choice = Choice.of(*values)
        scalings = [choice.scaling, Scaling()]
        return [
            value for panel, scaling in zip(panels, scalings) for value in panel.show(text, choice, int(token), scaling)
        ]

    @plain
    def retype(text: str, token: float, *values) -> list:
        last = first.count(text) - 1
        return [gr.Slider(maximum=max(1, last), value=last), *draw(text, last, *values)]

    def click(place: gr.SelectData, text: str, token: float, *values) -> list:
        return [place.index, *draw(text, place.index, *values)]

    @plain
    def proceed(text: str, *values) -> list[str]:
        choice = Choice.of(*values)
        return [
            _continuations(panel.model, text, scaling) for panel, scaling in zip(panels, [choice.scaling, Scaling()])
        ]

    gr.on([page.load, text.change], retype, inputs, [token, *outputs], **WHILE_CHANGING)
    gr.on([component.input for component in (token, *panel.all)], plain(draw), inputs, outputs, **WHILE_CHANGING)
    for shown in panels:
        shown.tokens.select(plain(click), inputs, [token, *outputs], **WHILE_CHANGING)
    more.click(proceed, [text, *panel.all], [panel.written for panel in panels], **ONE_AT_A_TIME)


def _panel(model: LanguageModel, number: int) -> Panel:
    with gr.Column(min_width=150):
        html(markup.title(model.about))
        names = ("tokens", "row", "next", "continuation")
        parts = [html(elem_id=f"{name}-{number}", js_on_load=ON_CLICK if name == "tokens" else None) for name in names]
        return Panel(model, *parts)


def _note(read, row, choice: Choice, token: int) -> str:
    layer = read.layers[choice.layer]
    most = row.topk(min(NAMED, token + 1))
    shares = ", ".join(f"{markup.visible(read.tokens[i])} {v:.3f}" for v, i in zip(most.values, most.indices.tolist()))
    if layer.sigma is None:
        sigma = "This layer has no σ."
    elif choice.head is None:
        sigma = f"σ = {layer.sigma.mean():.3g} (mean over heads)."
    else:
        sigma = f"σ = {layer.sigma[choice.head]:.3g}."
    return markup.note(f"Token {token}, {markup.visible(read.tokens[token])}, takes most from: {shares}. {sigma}")


def _continuations(model: LanguageModel, text: str, scaling: Scaling) -> str:
    """The continuation as the model is, and with scaled bandwidths if they are."""
    written = before_and_after(scaling, lambda scaling: model.continuation(text, scaling))
    return "".join(markup.text(f"Continuation, {heading}", words) for heading, words in written.items())
