"""Sheets of pictures over an image: models that are drawn together, a block of rows for each, maps of patches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from torch import nn

from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.sheet import CMAP, bare, label_layers, name_above, save, sheet
from trainkit_gka.plots import Figure

LAYERS, HEADING = 0.3, 0.28  # inches above a block: for the numbers of the layers, and for the name of the model
BOX = "cyan"  # of the outline of a patch

# Several models on several images


def by_image(subjects: Sequence[ImageSubject]) -> list[list[ImageSubject]]:
    """A list for every image: the models on it, in their order, without repetitions."""
    return _grouped([subject for subject in subjects if not subject.repeats], "image")


def by_model(subjects: Sequence[ImageSubject]) -> list[list[ImageSubject]]:
    """A list for every model: its subjects, in the order of the images, without repetitions."""
    return _grouped([subject for subject in subjects if not subject.repeats], "about")


def runs_of_recipe(subjects: Sequence[ImageSubject]) -> list[list[ImageSubject]]:
    """The subjects of the first model, and of those that repeat it with other seeds: a list for each."""
    about = subjects[0].about
    return _grouped([subject for subject in subjects if about in (subject.about, subject.repeats)], "about")


def _grouped(subjects: Sequence[ImageSubject], name: str) -> list[list[ImageSubject]]:
    groups: dict[str, list[ImageSubject]] = {}
    for subject in subjects:
        groups.setdefault(getattr(subject, name), []).append(subject)
    return list(groups.values())


def caption(models: Sequence[ImageSubject], *sentences: str) -> str:
    """Models and image of a figure (all models are on one image), then the sentences."""
    first = models[0]
    if all((each.pixels.shape, each.tokens) == (first.pixels.shape, first.tokens) for each in models):
        return replace(first, about="; ".join(each.about for each in models)).caption(*sentences)
    return " ".join([*(each.caption() for each in models), *sentences])


def draw_sheet(
    models: Sequence[ImageSubject],
    path: Path,
    title: str,
    text: str,
    rows: Sequence[int],
    cell: tuple[float, float],
    margins: tuple[float, float, float, float],
    gaps: tuple[float, float],
    draw: Callable[..., list[dict]],
    fontsize: int = 8,
    image: int | None = None,
) -> Figure:
    """A sheet with a block for every model, of its `rows` and its layers, written to `path`.

    Title, text, cell, margins and gaps are those of `trainkit_gka.figures.sheet.sheet`; the margins are around every
    block, and the blocks one below the other. The names of the models are above them if there are several. image: the
    row, from 0, in front of whose maps the image stands, in a column of its own. draw: called with the figure, the axes
    of a block (without the image's) and the subject; it returns rows of numbers.
    """
    left, right, top, bottom = margins
    lead, heading = int(image is not None), HEADING if len(models) > 1 else 0
    columns, step = max(lead + len(subject.layers) for subject in models), bottom + LAYERS + heading - gaps[1]
    margins = (left, right, top + heading, bottom + (len(models) - 1) * step)
    figure, axes = sheet(sum(rows), columns, cell, title, text, margins, gaps)
    bare(axes, fontsize)
    table = []
    for number, (block, subject) in enumerate(zip(np.split(axes, np.cumsum(rows)[:-1]), models)):
        for axis in block.flat:
            box = axis.get_position()
            axis.set_position((box.x0, box.y0 - number * step / figure.get_figheight(), box.width, box.height))
        for axis in block[:, lead + len(subject.layers) :].flat:
            axis.set_visible(False)
        before, block = np.split(block[:, : lead + len(subject.layers)], [lead], axis=1)
        for row, axis in enumerate(before.flat):
            axis.set_visible(row == image)
            axis.imshow(subject.pixels, interpolation="none")
            axis.set_title("image", fontsize=9)
        label_layers(block, subject)
        if heading:
            name_above(block[0, 0], subject.model)
        table += draw(figure, block, subject)
    return Figure(save(figure, path), title, text, table)


def label_heads(axes) -> None:
    """Number the heads at the left of the rows of axes."""
    for head, axis in enumerate(axes[:, 0], start=1):
        axis.set_ylabel(f"head {head}", fontsize=9)


# Maps of an image's patches


def cell_size(subject: ImageSubject, inches: float) -> tuple[float, float]:
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
