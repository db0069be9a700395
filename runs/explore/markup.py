"""Pieces of the page in HTML: a colour scale, a table of probabilities, the tokens of a text."""

from collections.abc import Callable, Sequence
from html import escape

import torch
from matplotlib import colormaps
from matplotlib.colors import to_hex

from deit_gka.figures.sheet import CMAP

STOPS = 9  # of the gradient
CSS = """
.gradio-container {max-width: 1180px !important; margin: auto}
.scale {display: flex; gap: .6em; align-items: center; font-size: .85em; font-variant-numeric: tabular-nums}
.scale span[role=img] {flex: 1; height: .7em; border-radius: 3px}
.note {font-size: .9em; margin: .4em 0; overflow-wrap: anywhere}
.chances {border-collapse: collapse; width: 100%; font-size: .92em; font-variant-numeric: tabular-nums}
.chances caption {text-align: left; font-weight: 600; padding: .3em 0}
.chances th, .chances td {text-align: left; font-weight: 400; padding: .2em .4em;
  border-bottom: 1px solid var(--border-color-primary)}
.chances thead th {font-size: .85em; opacity: .8}
.chances td {width: 30%; white-space: nowrap; background: linear-gradient(to right,
  color-mix(in srgb, var(--color-accent) 35%, transparent) var(--part), transparent 0)}
.tokens {line-height: 2}
.tokens button {white-space: pre; border: 1px solid transparent; border-radius: 4px; padding: 0 .1em; cursor: pointer;
  font: .92em ui-monospace, monospace; color: inherit; outline-offset: 1px; line-height: 1.7;
  background: color-mix(in srgb, var(--color-accent) var(--part), transparent)}
.tokens button[aria-pressed=true] {border-color: currentColor}
.text {white-space: pre-wrap; overflow-wrap: anywhere; font: .9em ui-monospace, monospace}
[role=tab][aria-selected=true] {color: inherit !important}
input:focus-visible, label:has(input[type=radio]:focus-visible) {
  outline: 2px solid var(--color-accent) !important; outline-offset: 2px}
@media (max-width: 640px) {.panels {order: -1}}
"""


def title(about: str) -> str:
    """What a model is, above what it does."""
    return f'<p class="note"><b>{escape(about)}</b></p>'


def note(words: str) -> str:
    """A sentence or two."""
    return f'<p class="note">{escape(words)}</p>'


def scale(norm, caption: str) -> str:
    """The colours of a map between the numbers at their ends, and a caption."""
    colours = ", ".join(to_hex(colormaps[CMAP](stop / (STOPS - 1))) for stop in range(STOPS))
    bar = f'<span role="img" aria-label="colour scale" style="background: linear-gradient(to right, {colours})"></span>'
    return f'<div class="scale">{norm.vmin:.2g}{bar}{norm.vmax:.2g}</div>{note(caption)}'


def chances(caption: str, columns: dict[str, torch.Tensor], name: Callable[[int], str], count: int) -> str:
    """A table of the likeliest outcomes: a column of probabilities, (outcomes,), for every heading.

    The rows are the first `count` of each column, ordered by the last one. name: of an outcome.
    """
    last = list(columns.values())[-1]
    chosen = {int(index) for values in columns.values() for index in values.topk(min(count, len(values))).indices}
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in ("", *columns))
    rows = "".join(
        f'<tr><th scope="row">{escape(name(index))}</th>'
        + "".join(f'<td style="--part: {values[index]:.1%}">{values[index]:.1%}</td>' for values in columns.values())
        + "</tr>"
        for index in sorted(chosen, key=lambda index: -last[index])
    )
    return f'<table class="chances"><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>{rows}</table>'


def tokens(texts: Sequence[str], row: torch.Tensor, chosen: int) -> str:
    """The tokens of a text as buttons, coloured by their weight in a row of W, (T,): 0 to 1, whatever σ is."""
    buttons = "".join(
        f'<button type="button" data-token="{place}" aria-pressed="{str(place == chosen).lower()}" '
        f'style="--part: {70 * weight**0.5:.0f}%" title="{weight:.4f}">{escape(text)}</button>'
        for place, (text, weight) in enumerate(zip(texts, row.tolist()))
    )
    return f'<div class="tokens">{buttons}</div>'


def text(heading: str, written: str) -> str:
    """A text of a model's, as it is."""
    return f'{title(heading)}<div class="text">{escape(written)}</div>'
