"""Figures drawn without a display. Matplotlib is imported when the first one is made."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which colour-blind people can tell apart, for things that are compared, such as models;
# without their yellow, which is too pale on white. Heads and layers have `shades`.
BLACK, GREY, SKY, BLUE = "#000000", "#8c8c8c", "#56b4e9", "#0072b2"
GREEN, ORANGE, VERMILION, PURPLE = "#009e73", "#e69f00", "#d55e00", "#cc79a7"


@dataclass(frozen=True)
class Figure:
    """A picture in a file, with its title, caption and numbers for a page."""

    path: Path  # the PNG; a PDF may be beside it
    title: str
    caption: str  # model, weights, image, and how to read the picture
    rows: Sequence[dict[str, Any]] = field(default_factory=list)  # the numbers drawn; all rows have the same columns

    @property
    def alt(self) -> str:
        """The text for readers who cannot see the picture: its title and the columns of its numbers, in one line."""
        columns = f"; a table gives {', '.join(self.rows[0])}" if self.rows else ""
        return f"{self.title}. {self.caption.split('. ')[0].rstrip('.')}{columns}."


def subplots(rows: int = 1, columns: int = 1, figsize: tuple[float, float] | None = None, **options):
    """A figure of `figsize` inches and its axes, like pyplot's function of this name."""
    from matplotlib.figure import Figure  # pyplot would need a backend chosen and every figure closed

    figure = Figure(figsize=figsize)
    return figure, figure.subplots(rows, columns, **options)


def shades(count: int) -> list[str]:
    """Colours of heads or layers in order, from dark to light."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.2 + 0.65 * place / max(1, count - 1))) for place in range(count)]
