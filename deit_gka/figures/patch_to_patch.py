"""What four patches look at: their rows of W, the mean over heads and head by head (paper, supplement)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from deit_gka.figures.groups import blocks, by_image, caption
from deit_gka.figures.measures import Tokens
from deit_gka.figures.sheet import GREY, Subject, cell_size, coloured, logarithmic, overlay, save, scale_below
from trainkit_gka.plots import Figure

BOX = "cyan"


def query_maps(weights: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """The rows of the paper's four patches, over the patches: (..., N, N) -> (..., 4, *grid)."""
    return tokens.patches(weights[..., [tokens.token(*query) for query in tokens.queries()], :])


def query_distances(maps: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """How far the four patches look, in pixels: the distance, weighted by their maps. (..., 4, *grid) -> (..., 4)."""
    rows = maps.flatten(-2)
    rows = rows / rows.sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    own = [tokens.token(*query) - tokens.prefix for query in tokens.queries()]
    return (rows * tokens.distances()[own]).sum(-1)


def without_own(maps: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """The weights in the maps of the four patches of all patches but themselves, (..., 4, *grid) -> (K,)."""
    kept = torch.ones(maps.shape[-3:], dtype=torch.bool)
    for number, query in enumerate(tokens.queries()):
        kept[(number, *query)] = False
    return maps[..., kept].flatten()


def draw_patch_to_patch(subjects: Sequence[Subject], folder: Path) -> list[Figure]:
    """Draw a sheet for every image: layers across; down, every query's map and the map over the image; by model."""
    return [_draw_mean(models, models[0].file(folder, "patch_to_patch")) for models in by_image(subjects)]


def draw_patch_to_patch_heads(subjects: Sequence[Subject], folder: Path) -> list[Figure]:
    """Draw a sheet for every image: layers across; down, every query's map of every head over the image; by model."""
    return [_draw_heads(models, models[0].file(folder, "patch_to_patch_heads")) for models in by_image(subjects)]


def _names(tokens: Tokens) -> str:
    return ", ".join(f"({row}, {column})" for row, column in tokens.queries())


def _draw_mean(models: Sequence[Subject], path: Path) -> Figure:
    text = caption(
        models,
        f"Rows of W of the patches (row, column) {_names(models[0].tokens)}, the mean over heads, over all patches; "
        "the box is the patch. The scale is logarithmic and shared by a layer (the bar below it): the patch's weight "
        "of itself would flatten a linear one. Lower picture of a pair: the same over the image.",
    )
    title, size = "Patch-to-patch attention", cell_size(models[0], 1.25)
    figure, parts = blocks(models, [8] * len(models), size, title, text, margins=(0.7, 0.3, 0.75, 0.35))
    rows = [row for subject, axes in zip(models, parts) for row in _draw_mean_block(figure, axes, subject, size[1])]
    return Figure(save(figure, path), title, text, rows)


def _draw_mean_block(figure, axes, subject: Subject, inches: float) -> list[dict]:
    """Draw a model's maps, `inches` high. Returns their numbers."""
    tokens, rows = subject.tokens, []
    queries = tokens.queries()
    for number, (column, layer) in enumerate(zip(axes.T, subject.layers), start=1):
        maps = query_maps(layer.weights.mean(0), tokens)
        norm = logarithmic(maps)
        for query, patches, pixels, raw, over in zip(
            queries, maps, query_distances(maps, tokens).tolist(), column[::2], column[1::2]
        ):
            raw.imshow(coloured(patches, norm), interpolation="none")
            over.imshow(overlay(subject.pixels, patches, norm))
            box(raw, query, (1, 1), shift=0.5)
            box(over, query, tokens.patch, shift=0.5)
            place = {"model": subject.model, "layer": number, "patch": str(query)}
            rows.append({**place, "self-weight": float(patches[query]), "mean distance (pixels)": pixels})
        scale_below(figure, norm, column[-1], inches, gap=0.08)
    for query, raw, over in zip(queries, axes[::2, 0], axes[1::2, 0]):
        raw.set_ylabel(f"patch {query}", fontsize=9)
        over.set_ylabel("over the image", fontsize=8)
    return rows


def _draw_heads(models: Sequence[Subject], path: Path) -> Figure:
    text = caption(
        models,
        f"Rows of W of the patches (row, column) {_names(models[0].tokens)}, of every head, over the image. The patch "
        "itself is grey and not on the scale, which is logarithmic and shared by a layer (the bar below it). Below a "
        "map: the mean distance to the patches that the patch attends to, in pixels, and the weight of itself.",
    )
    title, size = "Patch-to-patch attention by head", cell_size(models[0], 1.2)
    counts = [4 * subject.num_heads for subject in models]
    figure, parts = blocks(models, counts, size, title, text, (0.75, 0.3, 0.75, 0.52), (0.08, 0.2), fontsize=7)
    rows = [row for subject, axes in zip(models, parts) for row in _draw_heads_block(figure, axes, subject, size[1])]
    return Figure(save(figure, path), title, text, rows)


def _draw_heads_block(figure, axes, subject: Subject, inches: float) -> list[dict]:
    """Draw a model's maps of every head, `inches` high. Returns their numbers."""
    tokens, heads, rows = subject.tokens, subject.num_heads, []
    for number, (column, layer) in enumerate(zip(axes.T, subject.layers), start=1):
        maps = query_maps(layer.weights, tokens)
        norm, distances = logarithmic(without_own(maps, tokens)), query_distances(maps, tokens)
        for index, query in enumerate(tokens.queries()):
            for head, axis in enumerate(column[index * heads : (index + 1) * heads]):
                own, pixels = float(maps[head, index][query]), float(distances[head, index])
                axis.imshow(grey_patch(overlay(subject.pixels, maps[head, index], norm), query, tokens.patch))
                box(axis, query, tokens.patch, shift=0.5)
                axis.set_xlabel(f"{pixels:.0f} px, self {own:.2f}", labelpad=2)
                place = {"model": subject.model, "layer": number, "head": head + 1, "patch": str(query)}
                rows.append({**place, "self-weight": own, "mean distance (pixels)": pixels})
        scale_below(figure, norm, column[-1], inches, gap=0.26)
    for index, query in enumerate(tokens.queries()):
        for head in range(heads):
            axes[index * heads + head, 0].set_ylabel(f"patch {query}\nhead {head + 1}", fontsize=8)
    return rows


def grey_patch(picture: np.ndarray, query: tuple[int, int], side: tuple[int, int]) -> np.ndarray:
    """The picture, (height, width, 3) bytes, with the patch `query`, (row, column), of `side` pixels grey."""
    (row, column), (height, width), picture = query, side, picture.copy()
    picture[row * height : (row + 1) * height, column * width : (column + 1) * width] = np.multiply(255, GREY)
    return picture


def box(axis, query: tuple[int, int], side: tuple[int, int], shift: float) -> None:
    """Draw the outline of the patch `query`, (row, column), of `side` = (height, width) in the axis's units."""
    from matplotlib.patches import Rectangle

    (row, column), (height, width) = query, side
    corner = (column * width - shift, row * height - shift)
    axis.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=BOX, linewidth=1.2, clip_on=False, zorder=9))
