"""A sheet with a panel for every layer, several beside each other."""

from collections.abc import Sequence
from typing import TypeVar

from trainkit_gka.figures.sheet import legend_beside, sheet

ACROSS = 5  # layers beside each other
T = TypeVar("T")


def layer_panels(owners: Sequence[tuple[T, list[int]]], title: str, caption: str):
    """The figure, and its rows as (owner, [(axis, layer), ...]). owners: each with its layers, from 0."""
    columns = min(ACROSS, max(len(layers) for _, layers in owners))
    rows = [(o, layers[i : i + columns]) for o, layers in owners for i in range(0, len(layers), columns)]
    figure, axes = sheet(len(rows), columns, (2.3, 1.9), title, caption, (0.7, 1.0, 0.85, 0.55), (0.42, 1.05))
    panels = []
    for row, (owner, layers) in zip(axes, rows):
        for axis in row[len(layers) :]:
            axis.set_visible(False)
        for axis, layer in zip(row, layers):
            axis.set_title(f"layer {layer + 1}", fontsize=9)
            axis.tick_params(which="both", labelsize=7)
            axis.grid(alpha=0.3)
        panels.append((owner, list(zip(row, layers))))
    return figure, panels


def label_row(panels: Sequence[tuple], x: str, y: str) -> None:
    """Label the axes of one row, and explain its lines at the right."""
    for axis, _ in panels:
        axis.set_xlabel(x, fontsize=8)
    panels[0][0].set_ylabel(y, fontsize=9)
    legend_beside(panels[-1][0])
