"""Sheets of pictures over an image: models that are drawn together, a block of rows for each, maps of patches."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from torch import nn

from deit_gka.figures.maps import LayerMaps
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.sheet import CMAP, bare, label_layers, name_above, sheet
from trainkit_gka.plots import Figure

LAYERS, HEADING = 0.3, 0.28  # inches above a block: for the numbers of the layers, and for the name of the model
BOX = "cyan"  # of the outline of a patch

# Several models on several images


def grouped(subjects: Sequence[ImageSubject], name: str) -> list[list[ImageSubject]]:
    """The subjects that share the attribute `name`, in their order: a list for every value."""
    groups: dict[str, list[ImageSubject]] = {}
    for subject in subjects:
        groups.setdefault(getattr(subject, name), []).append(subject)
    return list(groups.values())


def by_image(subjects: Sequence[ImageSubject]) -> list[list[ImageSubject]]:
    """A list for every image: the models on it, in their order, without repetitions."""
    return grouped([subject for subject in subjects if not subject.repeats], "image")


def caption(models: Sequence[ImageSubject], *sentences: str) -> str:
    """Models, image and tokens of a figure (all models are on one image), then the sentences."""
    abouts: dict[str, list[str]] = {}
    for subject in models:
        (height, width), tokens = subject.pixels.shape[:2], subject.tokens
        patches = f"{tokens.count} tokens: {tokens.grid[0]} × {tokens.grid[1]} patches and {tokens.prefix} before them"
        abouts.setdefault(f"Image {subject.image}, {height} × {width} pixels; {patches}.", []).append(subject.about)
    return " ".join([*(f"{'; '.join(some)}. {image}" for image, some in abouts.items()), *sentences])


def draw_sheets(
    subjects: Sequence[ImageSubject],
    folder: Path,
    family: str,
    title: str,
    sentences: str,
    draw: Callable[[Any, ImageSubject], list[dict]],
    labels: Callable[[ImageSubject], Sequence[str]],
    inches: float = 1.3,
    margins: tuple[float, float, float, float] = (0.5, 0.3, 0.75, 0.3),
    gaps: tuple[float, float] = (0.1, 0.24),
    square: bool = False,
    image: int | None = None,
) -> list[Figure]:
    """For every image a sheet with a block for every model, its layers across: `folder`/<family>-<image>.png.

    sentences: of the caption, after models and image. draw: draws on the axes of a block, (rows, layers), and returns
    its numbers. labels: names of a block's rows. inches: the longer side of a picture, which has the shape of the
    image, or is square. margins, around every block, and gaps: see `trainkit_gka.figures.sheet.sheet`. image: the row,
    from 0, in front of whose maps the image stands, in a column of its own.
    """
    figures, lead, (left, right, top, bottom) = [], int(image is not None), margins
    for models in by_image(subjects):
        rows = [len(labels(subject)) for subject in models]
        heading = HEADING if len(models) > 1 else 0
        across = max(lead + len(subject.layers) for subject in models)
        step = bottom + LAYERS + heading - gaps[1]
        around = (left, right, top + heading, bottom + (len(models) - 1) * step)
        cell = (inches, inches) if square else cell_size(models[0], inches)
        text = caption(models, sentences)
        save, axes = sheet(sum(rows), across, cell, title, text, around, gaps)
        bare(axes, fontsize=7)
        table = []
        for number, (block, subject) in enumerate(zip(np.split(axes, np.cumsum(rows)[:-1]), models)):
            for axis in block.flat:
                box = axis.get_position()
                down = number * step / axis.figure.get_figheight()
                axis.set_position((box.x0, box.y0 - down, box.width, box.height))
            before, block, after = np.split(block, [lead, lead + len(subject.layers)], axis=1)
            for row, axis in enumerate(before.flat):
                axis.set_visible(row == image)
                axis.imshow(subject.pixels, interpolation="none")
                axis.set_title("image", fontsize=9)
            for axis in after.flat:
                axis.set_visible(False)
            label_layers(block, subject)
            for axis, label in zip(block[:, 0], labels(subject)):
                axis.set_ylabel(label, fontsize=8)
            if heading:
                name_above(block[0, 0], subject.model)
            table += draw(block, subject)
        figures.append(save(folder / f"{family}-{models[0].image}.png", table))
    return figures


def heads(subject: ImageSubject) -> list[str]:
    """Labels of a block with a row for every head."""
    return [f"head {number + 1}" for number in range(subject.num_heads)]


def columns(axes, subject: ImageSubject) -> Iterator[tuple[dict, Any, LayerMaps]]:
    """Of every layer: the first cells of its rows of numbers, its axes, and its maps."""
    for number, (column, layer) in enumerate(zip(axes.T, subject.layers), start=1):
        yield {"model": subject.model, "layer": number}, column, layer


# Maps of an image's patches


def cell_size(subject: ImageSubject, inches: float) -> tuple[float, float]:
    """Width and height of a cell for the image, whose longer side is `inches`."""
    height, width = subject.pixels.shape[:2]
    return inches * width / max(height, width), inches * height / max(height, width)


def smooth_map(patches: torch.Tensor, norm, size: tuple[int, int]) -> np.ndarray:
    """A map (rows, columns) of an image's patches as bytes (*size, 3), in the very colours of its scale.

    Bicubic, clamped at 0, below which bicubic overshoots (the paper's supplement says bilinear in one section and
    bicubic in another). It stands beside the image: mixed with one, its colours would not be on the scale.
    """
    parts = torch.from_numpy(np.asarray(norm(patches.numpy()), dtype=np.float32))
    fine = nn.functional.interpolate(parts[None, None], size=size, mode="bicubic", align_corners=False)[0, 0]
    return np.uint8(np.rint(255 * colormaps[CMAP](fine.clamp(0, 1).numpy())[..., :3]))


def frame(axis, place: tuple[int, int], side: tuple[int, int] = (1, 1)) -> None:
    """Outline the patch `place`, (row, column), of `side` = (height, width) in the axis's units, on any colour."""
    from matplotlib.patches import Rectangle

    (row, column), (height, width) = place, side
    corner = (column * width - 0.5, row * height - 0.5)
    for colour, wide in (("black", 2.6), (BOX, 1.2)):
        options = dict(fill=False, edgecolor=colour, linewidth=wide, clip_on=False, zorder=9)
        axis.add_patch(Rectangle(corner, width, height, **options))
