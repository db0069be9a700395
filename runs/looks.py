"""How the pictures of runs/ look: a colour, marker and line for each form of attention, and axes and legends.

Heads and layers have another palette, `trainkit_gka.plots.shades`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gka.kinds import KINDS
from trainkit_gka.plots import BLUE, ORANGE, PURPLE, SKY, subplots

WIDTH = 8.5  # inches: a page shows them at nearly their own size
DPI = 240  # sharp when a page's picture is enlarged
LARGE, HEADING = 13, 15  # points, of a slide


@dataclass(frozen=True)
class Look:
    """How a form is drawn. Relatives share a colour and differ in marker and line."""

    colour: str
    marker: str = "o"
    line: str = "-"

    def __call__(self, label: str, **changed: Any) -> dict[str, Any]:
        """The arguments of matplotlib's plot and errorbar."""
        form = {"color": self.colour, "marker": self.marker, "linestyle": self.line, "label": label}
        return form | {"markersize": 5, "linewidth": 1.3} | changed


LOOKS = {
    **{kind.label: Look(kind.colour) for kind in KINDS.values()},
    "softmax + offsets": Look(SKY, "s"),
    "VLT + offsets": Look(PURPLE, "s"),
    "GKA + offsets": Look(ORANGE, "s"),
    "GGGA": Look(BLUE),
    "GGGA + offsets": Look(BLUE, "s"),
}


def panels(rows: int, columns: int, height: float, **shared: Any) -> tuple[Any, np.ndarray]:
    """A figure as wide as a page, and its axes in a row; nothing in it overlaps when it is saved."""
    figure, axes = subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, **shared)
    figure.set_layout_engine("constrained")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=9)
    return figure, axes.ravel()


def legend(figure, axes: Iterable[Any], columns: int) -> None:
    """One legend of all axes, below them, where it hides no point."""
    entries = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def slide(headings: Sequence[str]) -> tuple[Any, Any, Any]:
    """A figure of 16:9 with large letters, for a page and a talk, an axis for points, and one for words beside them: a
    column at 0, 1, ... under each heading.
    """
    figure, (points, words) = panels(1, 2, WIDTH * 9 / 16, sharey=True, width_ratios=(6, len(headings)))
    points.grid(visible=False, axis="y")
    points.xaxis.label.set_size(LARGE)
    words.grid(visible=False)
    words.spines[:].set_visible(False)
    words.xaxis.tick_top()
    words.set_xticks(range(len(headings)), headings)
    words.set_xlim(-0.5, len(headings) - 0.5)
    for axis in (points, words):
        axis.tick_params(labelsize=LARGE, left=False, top=False)
    return figure, points, words


def save(figure, title: str, path: Path, size: int = 11) -> Path:
    """Write the figure under its title, of `size` points. Returns the path."""
    figure.suptitle(title, fontsize=size)
    figure.savefig(path, dpi=DPI)
    return path
