"""Sheets of pictures of matrices: a grid with title and caption, colour scales, PNG and PDF files."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize

from trainkit_gka.plots import Figure, subplots

CMAP = "inferno"
GREY = (0.72, 0.72, 0.72)
DPI = 150
CHARACTERS_PER_INCH, LINE_INCHES = 16, 0.16  # of the caption, 8 points
EDGE = 0.12  # inches between the caption and the edge


def sheet(
    rows: int,
    columns: int,
    cell: tuple[float, float],
    title: str,
    caption: str,
    margins: tuple[float, float, float, float] = (0.6, 0.2, 0.7, 0.2),
    gaps: tuple[float, float] = (0.06, 0.06),
):
    """Returns save(path, numbers), which writes a sheet and returns its `Figure`, and the axes of its pictures.

    save writes PNG to `path` and PDF beside it. numbers: the figure's rows. The axes are (rows, columns). All sizes are
    inches. cell: width, height. margins: left, right, top, bottom. gaps: between cells, across and down. The caption is
    below, in as many lines as it needs.
    """
    left, right, top, bottom = margins
    width = left + columns * cell[0] + (columns - 1) * gaps[0] + right
    lines = textwrap.wrap(caption, int((width - 2 * EDGE) * CHARACTERS_PER_INCH))
    bottom += EDGE + LINE_INCHES * len(lines)
    height = top + rows * cell[1] + (rows - 1) * gaps[1] + bottom
    figure, axes = subplots(rows, columns, figsize=(width, height), squeeze=False)
    figure.subplots_adjust(
        left / width, bottom / height, 1 - right / width, 1 - top / height, gaps[0] / cell[0], gaps[1] / cell[1]
    )
    words = dict(parse_math=False)  # two dollar signs in a text are not mathematics
    figure.text(EDGE / width, 1 - EDGE / height, title, va="top", fontsize=11, fontweight="bold", **words)
    figure.text(EDGE / width, EDGE / height, "\n".join(lines), va="bottom", fontsize=8, linespacing=1.3, **words)

    def save(path: Path, numbers: Sequence[dict[str, Any]]) -> Figure:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
        figure.savefig(path.with_suffix(".pdf"), dpi=DPI, metadata={"CreationDate": None})
        return Figure(path, title, caption, numbers)

    return save, axes


def plain(name: str) -> str:
    """A name with its dollar signs escaped, between which Matplotlib would typeset mathematics."""
    return name.replace("$", r"\$")


def name_above(axis, name: str) -> None:
    """Write a name above the title of an axis, at its left."""
    place = dict(xytext=(0, 22), xycoords="axes fraction", textcoords="offset points")
    axis.annotate(name, (0, 1), fontsize=9, fontweight="bold", parse_math=False, **place)


def legend_beside(axis, like=None) -> None:
    """A legend right of an axis, of its own lines or of those of the axis `like`."""
    handles, labels = (like or axis).get_legend_handles_labels()
    place = dict(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axis.legend(handles, labels, fontsize=7, **place)


def bare(axes, fontsize: int = 8) -> None:
    """Remove ticks and frames from axes that hold pictures."""
    for axis in np.asarray(axes).flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        axis.xaxis.label.set_size(fontsize)


def label_layers(axes, subject) -> None:
    """Write the numbers of `subject.layers` above the columns of axes, and their kinds where they differ."""
    differ = len({layer.kind for layer in subject.layers}) > 1
    for number, (axis, layer) in enumerate(zip(axes[0], subject.layers), start=1):
        axis.set_title(f"layer {number}" + (f" ({layer.kind})" if differ else ""), fontsize=9)


def scale(
    norm, beside, place: tuple[float, float, float, float], label: str = "", across: bool = False, cmap: str = CMAP
):
    """Add a colour bar at `place` (left, bottom, width, height), as fractions of the axis `beside`. Returns it."""
    figure, box = beside.figure, beside.get_position()
    left, bottom = box.x0 + place[0] * box.width, box.y0 + place[1] * box.height
    axis = figure.add_axes((left, bottom, place[2] * box.width, place[3] * box.height))
    orientation = "horizontal" if across else "vertical"
    bar = figure.colorbar(ScalarMappable(norm, cmap), cax=axis, orientation=orientation)
    bar.ax.tick_params(which="both", labelsize=7, length=2, pad=1)
    bar.outline.set_linewidth(0.4)
    bar.set_label(label, fontsize=8)
    return bar


def scale_below(norm, axis, gap: float) -> None:
    """Add a colour bar `gap` inches below `axis`, labelled with its smallest and largest value."""
    inches = axis.get_position().height * axis.figure.get_figheight()
    bar = scale(norm, axis, (0.04, -(gap + 0.05) / inches, 0.92, 0.05 / inches), across=True)
    bar.minorticks_off()
    bar.set_ticks([norm.vmin, norm.vmax], labels=[f"{norm.vmin:.2g}", f"{norm.vmax:.2g}"], fontsize=6.5)
    for label, side in zip(bar.ax.get_xticklabels(), ("left", "right")):
        label.set_horizontalalignment(side)


def linear(values: torch.Tensor) -> Normalize:
    """A scale over the range of `values`, widened if they are all equal."""
    least, most = float(values.min()), float(values.max())
    return Normalize(least, most if most > least else least + 1e-12, clip=True)


def from_zero(values: torch.Tensor) -> Normalize:
    """A scale from 0 to the largest of `values`, so that a nearly constant map looks constant."""
    return Normalize(0, max(float(values.max()), 1e-12), clip=True)


def logarithmic(values: torch.Tensor, decades: float = 4) -> LogNorm:
    """A logarithmic scale up to the largest of `values`, over at most `decades` powers of ten."""
    most = max(float(values.max()), 1e-30)
    least = max(float(values.min()), most * 10**-decades)
    return LogNorm(min(least, most * 0.999), most, clip=True)


def coloured(values: torch.Tensor, norm, cmap: str = CMAP) -> np.ndarray:
    """A map as bytes of red, green and blue, (..., 3)."""
    return np.uint8(np.rint(255 * colormaps[cmap](norm(values.numpy()))[..., :3]))
