"""What the figures share: their subject, contact sheets with a caption, colours, PNG and PDF files."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.colors import LogNorm, Normalize
from torch import nn

from deit_gka.figures.maps import LayerMaps
from deit_gka.figures.measures import Tokens
from trainkit.plots import subplots

ALPHA = 0.6  # of a map over the image, as the paper's
CMAP = "inferno"
GREY = (0.72, 0.72, 0.72)
DPI = 150
CHARACTERS_PER_INCH, LINE_INCHES = 16, 0.16  # of the caption, 8 points
EDGE = 0.12  # inches between the caption and the edge


@dataclass(frozen=True)
class Subject:
    """One model's attention on one image."""

    model: str  # the name of its folder of figures
    about: str  # model and weights, in words
    image: str
    pixels: np.ndarray  # (height, width, 3), 0 to 1
    tokens: Tokens
    layers: list[LayerMaps]  # without their B
    probabilities: Callable[[torch.Tensor], torch.Tensor] | None = None  # pixels (B, height, width, 3) -> (B, classes)
    repeats: str = ""  # `about` of the model of the same recipe and another seed

    @property
    def num_heads(self) -> int:
        return max(len(layer.weights) for layer in self.layers)

    @property
    def has_sigma(self) -> bool:
        return any(layer.sigma is not None for layer in self.layers)

    @property
    def sigmas(self) -> np.ndarray:
        """The bandwidths, (L, H); NaN in layers without."""
        return np.stack([np.full(self.num_heads, np.nan) if s.sigma is None else s.sigma.numpy() for s in self.layers])

    def file(self, folder: Path, family: str) -> Path:
        """Where a figure of this image goes."""
        return folder / f"{family}-{self.image}.png"

    def caption(self, *sentences: str) -> str:
        """Model, weights, image and tokens, then the sentences."""
        height, width = self.pixels.shape[:2]
        (rows, columns), prefix = self.tokens.grid, self.tokens.prefix
        tokens = f"{self.tokens.count} tokens: {rows} × {columns} patches and {prefix} before them"
        return " ".join([f"{self.about}. Image {self.image}, {height} × {width} pixels; {tokens}.", *sentences])


def sheet(
    rows: int,
    columns: int,
    cell: tuple[float, float],
    title: str,
    caption: str,
    margins: tuple[float, float, float, float] = (0.6, 0.2, 0.7, 0.2),
    gaps: tuple[float, float] = (0.06, 0.06),
):
    """A figure and its axes, (rows, columns), in inches: cells of (width, height) with `gaps` (across, down) between.

    margins: left, right, top, bottom. The caption is below, as many lines as it needs.
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
    figure.text(EDGE / width, 1 - EDGE / height, title, va="top", fontsize=11, fontweight="bold")
    figure.text(EDGE / width, EDGE / height, "\n".join(lines), va="bottom", fontsize=8, linespacing=1.3)
    return figure, axes


def cell_size(subject: Subject, inches: float) -> tuple[float, float]:
    """Width and height of a cell for the image, whose longer side is `inches`."""
    height, width = subject.pixels.shape[:2]
    return inches * width / max(height, width), inches * height / max(height, width)


def bare(axes, fontsize: int = 8) -> None:
    """Take ticks and frames from axes that hold pictures."""
    for axis in np.asarray(axes).flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        axis.xaxis.label.set_size(fontsize)


def label_layers(axes, subject: Subject) -> None:
    """Write the layers' numbers and kinds above the columns of axes."""
    for number, (axis, layer) in enumerate(zip(axes[0], subject.layers), start=1):
        axis.set_title(f"layer {number}" + (f" ({layer.kind})" if layer.kind != "gka" else ""), fontsize=9)


def scale(figure, norm, beside, place: tuple[float, float, float, float], label: str = "", across: bool = False):
    """A colour bar at `place` (left, bottom, width, height), in parts of the axis `beside`. Returns it."""
    from matplotlib.cm import ScalarMappable

    box = beside.get_position()
    left, bottom = box.x0 + place[0] * box.width, box.y0 + place[1] * box.height
    axis = figure.add_axes((left, bottom, place[2] * box.width, place[3] * box.height))
    orientation = "horizontal" if across else "vertical"
    bar = figure.colorbar(ScalarMappable(norm, CMAP), cax=axis, orientation=orientation)
    bar.ax.tick_params(labelsize=7, length=2, pad=1)
    bar.outline.set_linewidth(0.4)
    bar.set_label(label, fontsize=8)
    return bar


def scale_below(figure, norm, axis, inches: float, gap: float) -> None:
    """A colour bar below `axis`, a picture `inches` high, with its two ends written at its ends."""
    bar = scale(figure, norm, axis, (0.04, -(gap + 0.05) / inches, 0.92, 0.05 / inches), across=True)
    bar.minorticks_off()
    bar.set_ticks([norm.vmin, norm.vmax], labels=[f"{norm.vmin:.2g}", f"{norm.vmax:.2g}"], fontsize=6.5)
    for label, side in zip(bar.ax.get_xticklabels(), ("left", "right")):
        label.set_horizontalalignment(side)


def linear(values: torch.Tensor) -> Normalize:
    """A scale over the range of `values`, which is made wider where they are all the same."""
    least, most = float(values.min()), float(values.max())
    return Normalize(least, most if most > least else least + 1e-12, clip=True)


def logarithmic(values: torch.Tensor, decades: float = 4) -> LogNorm:
    """A logarithmic scale up to the largest of `values`, over at most so many decades."""
    most = max(float(values.max()), 1e-30)
    least = max(float(values.min()), most * 10**-decades)
    return LogNorm(min(least, most * 0.999), most, clip=True)


def to_pixels(maps: torch.Tensor, size: int | tuple[int, int]) -> torch.Tensor:
    """Maps (B, H, *grid) at (B, H, *size): bicubic, and clamped at 0, below which bicubic overshoots.

    The paper's supplement says bilinear in one section and bicubic in another.
    """
    return nn.functional.interpolate(maps, size=size, mode="bicubic", align_corners=False).clamp(min=0)


def overlay(pixels: np.ndarray, patches: torch.Tensor, norm) -> np.ndarray:
    """The image with a map (rows, columns) of its patches over it, as bytes."""
    parts = torch.from_numpy(np.asarray(norm(patches.numpy()), dtype=np.float32))
    fine = to_pixels(parts[None, None], pixels.shape[:2])[0, 0].clamp(max=1)
    coloured = colormaps[CMAP](fine.numpy())[..., :3]
    return np.uint8(np.rint(255 * (ALPHA * coloured + (1 - ALPHA) * pixels)))


def coloured(values: torch.Tensor, norm) -> np.ndarray:
    """A map as bytes of red, green and blue."""
    return np.uint8(np.rint(255 * colormaps[CMAP](norm(values.numpy()))[..., :3]))


def save(figure, path: Path) -> Path:
    """Write the figure as PNG to `path` and as PDF beside it. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    figure.savefig(path.with_suffix(".pdf"), dpi=DPI, metadata={"CreationDate": None})
    return path
