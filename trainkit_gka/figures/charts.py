"""Charts of a number for every layer and head: heat maps, and lines over depth."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import Normalize

from trainkit_gka.plots import shades


def heat_map(axis, values: np.ndarray, title: str, norm: Normalize | None = None, names: Sequence[str] = ()) -> None:
    """Heads down, layers across, with the values as text. values: (L, H); NaN is grey.

    norm: a scale for several maps. names: of the rows, instead of their numbers.
    """
    norm = Normalize(np.nanmin(values), np.nanmax(values)) if norm is None else norm
    picture = axis.imshow(values.T, norm=norm, cmap="YlOrRd", aspect="auto")
    axis.set_facecolor("lightgrey")
    depth, heads = values.shape
    axis.set(xticks=range(depth), yticks=range(heads), xticklabels=range(1, depth + 1))
    axis.set(yticklabels=names or range(1, heads + 1), xlabel="layer", ylabel="head")
    axis.set_title(title, fontsize=10)
    middle = (norm.vmin + norm.vmax) / 2
    for layer, head in np.ndindex(depth, heads):
        value = values[layer, head]
        colour = "white" if value > middle else "black"
        words = "–" if np.isnan(value) else in_cell(value)
        axis.text(layer, head, words, ha="center", va="center", fontsize=7, color=colour)
    box = axis.get_position()
    bar = axis.figure.colorbar(picture, cax=axis.figure.add_axes((box.x1 + 0.01, box.y0, 0.008, box.height)))
    bar.ax.tick_params(labelsize=7)


def in_cell(value: float) -> str:
    """A number of at least 0 with three significant digits, at most three of them after the point."""
    decimals = 2 - int(np.floor(np.log10(max(value, 0.1))))
    return f"{value:.{max(0, decimals)}f}"


def lines(axis, values: np.ndarray, title: str, label: str, spread: tuple | None = None, names: str = "head") -> None:
    """A line per head over depth. values: (L, H). spread: the lower and upper edge of a band, (L, H) each."""
    layers = range(1, len(values) + 1)
    for head, (line, colour) in enumerate(zip(values.T, shades(values.shape[1]))):
        axis.plot(layers, line, marker="o", markersize=4, color=colour, label=f"{names} {head + 1}")
        if spread is not None:
            edges = (edge[:, head] for edge in spread)
            axis.fill_between(layers, *edges, color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="layer", ylabel=label, xticks=layers)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
