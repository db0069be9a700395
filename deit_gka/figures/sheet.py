"""What the figures share: their subject, pictures over the image, the sheets and scales of `trainkit_gka.figures`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from torch import nn

from deit_gka.figures.maps import LayerMaps
from deit_gka.figures.measures import Tokens
from gka.kinds import KINDS
from trainkit_gka.figures.sheet import (  # noqa: F401 (the figures take all of these from here)
    CMAP,
    GREY,
    bare,
    coloured,
    from_zero,
    label_layers,
    linear,
    logarithmic,
    plain,
    save,
    scale,
    scale_below,
    sheet,
)
from trainkit_gka.plots import BLACK, BLUE, ink

HYBRID = BLUE  # the colour of a model whose layers are of several kinds
BOX = "cyan"  # of the outline of a patch


@dataclass(frozen=True)
class Subject:
    """One model's attention on one image."""

    model: str  # the name of its folder of figures
    about: str  # model and weights, in words
    image: str
    pixels: np.ndarray  # (height, width, 3), 0 to 1
    tokens: Tokens
    layers: list[LayerMaps]  # without their B
    probabilities: Callable[[torch.Tensor], torch.Tensor]  # pixels (B, height, width, 3) -> (B, classes)
    classes: list[str] = field(default_factory=list)  # their names; empty if nobody knows them
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

    @property
    def colour(self) -> str:
        """Of the model's lines among those of other models."""
        kinds = {layer.kind for layer in self.layers}
        colour = KINDS[kinds.pop()].colour if len(kinds) == 1 else HYBRID
        return ink() if colour == BLACK else colour

    def file(self, folder: Path, family: str) -> Path:
        """Where a figure of this image goes."""
        return folder / f"{family}-{self.image}.png"

    def caption(self, *sentences: str) -> str:
        """Model, weights, image and tokens, then the sentences."""
        height, width = self.pixels.shape[:2]
        (rows, columns), prefix = self.tokens.grid, self.tokens.prefix
        tokens = f"{self.tokens.count} tokens: {rows} × {columns} patches and {prefix} before them"
        return " ".join([f"{self.about}. Image {self.image}, {height} × {width} pixels; {tokens}.", *sentences])


def cell_size(subject: Subject, inches: float) -> tuple[float, float]:
    """Width and height of a cell for the image, whose longer side is `inches`."""
    height, width = subject.pixels.shape[:2]
    return inches * width / max(height, width), inches * height / max(height, width)


def to_pixels(maps: torch.Tensor, size: int | tuple[int, int]) -> torch.Tensor:
    """Maps (B, H, *grid) at (B, H, *size): bicubic, and clamped at 0, below which bicubic overshoots.

    The paper's supplement says bilinear in one section and bicubic in another.
    """
    return nn.functional.interpolate(maps, size=size, mode="bicubic", align_corners=False).clamp(min=0)


def smooth_map(patches: torch.Tensor, norm, size: tuple[int, int]) -> np.ndarray:
    """A map (rows, columns) of an image's patches as bytes (*size, 3), in the very colours of its scale.

    It stands beside the image: mixed with one, its colours would not be on the scale.
    """
    parts = torch.from_numpy(np.asarray(norm(patches.numpy()), dtype=np.float32))
    fine = to_pixels(parts[None, None], size)[0, 0].clamp(max=1)
    return np.uint8(np.rint(255 * colormaps[CMAP](fine.numpy())[..., :3]))


def frame(axis, place: tuple[int, int], side: tuple[int, int]) -> None:
    """Outline the patch `place`, (row, column), of `side` = (height, width) in the axis's units, on any colour."""
    from matplotlib.patches import Rectangle

    (row, column), (height, width) = place, side
    corner = (column * width - 0.5, row * height - 0.5)
    for colour, wide in (("black", 2.6), (BOX, 1.2)):
        options = dict(fill=False, edgecolor=colour, linewidth=wide, clip_on=False, zorder=9)
        axis.add_patch(Rectangle(corner, width, height, **options))
