"""Attention of four patches: their rows of W, the mean over heads and head by head (paper, supplement)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from deit_gka.figures.measures import Tokens
from deit_gka.figures.sheet import by_image, caption, cell_size, draw_sheet, frame, label_heads
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.sheet import GREY, coloured, logarithmic, scale_below
from trainkit_gka.plots import Figure


def query_maps(weights: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """The rows of the paper's four patches, over the patches: (..., N, N) -> (..., 4, *grid)."""
    return tokens.patches(weights[..., [tokens.token(*query) for query in tokens.queries()], :])


def query_distances(maps: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """How far the four patches look, in pixels: the distance, weighted by their maps. (..., 4, *grid) -> (..., 4)."""
    rows = maps.flatten(-2)
    rows = rows / rows.sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    places = [tokens.token(*query) - tokens.prefix for query in tokens.queries()]
    return (rows * tokens.distances()[places]).sum(-1)


def without_itself(maps: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """The weights in the maps of the four patches of all patches but themselves, (..., 4, *grid) -> (K,)."""
    mask = torch.ones(maps.shape[-3:], dtype=torch.bool)
    for number, query in enumerate(tokens.queries()):
        mask[(number, *query)] = False
    return maps[..., mask].flatten()


def draw_patch_to_patch(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw a sheet for every image: layers across; down, every query's map; the image once; by model."""
    return [_draw_mean(models, models[0].file(folder, "patch_to_patch")) for models in by_image(subjects)]


def draw_patch_to_patch_heads(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw a sheet for every image and query: layers across, heads down, the image once; by model."""
    return [
        _draw_heads(models, query, models[0].file(folder, f"patch_to_patch_heads-{query + 1}"))
        for models in by_image(subjects)
        for query in range(4)
    ]


def _draw_mean(models: Sequence[ImageSubject], path: Path) -> Figure:
    text = caption(
        models,
        "Rows of W of four patches, framed, the mean over heads, over all patches. The scale is logarithmic and shared "
        "by a layer (the bar below it): the patch's weight of itself would flatten a linear one.",
    )
    cell, rows = cell_size(models[0], 1.25), [4] * len(models)
    layout = dict(rows=rows, cell=cell, margins=(0.3, 0.3, 0.75, 0.35), gaps=(0.22, 0.12), image=0)
    return draw_sheet(models, path, "Patch-to-patch attention", text, draw=partial(_draw_mean_block, cell[1]), **layout)


def _draw_mean_block(inches: float, figure, axes, subject: ImageSubject) -> list[dict]:
    """Draw a model's maps, `inches` high. Returns their numbers."""
    tokens, rows = subject.tokens, []
    for number, (column, layer) in enumerate(zip(axes.T, subject.layers), start=1):
        maps = query_maps(layer.weights.mean(0), tokens)
        norm, distances = logarithmic(maps), query_distances(maps, tokens).tolist()
        for query, name, patches, pixels, axis in zip(tokens.queries(), tokens.query_names(), maps, distances, column):
            axis.imshow(coloured(patches, norm), interpolation="none")
            frame(axis, query, (1, 1))
            place = {"model": subject.model, "layer": number, "patch": name}
            rows.append({**place, "self-weight": float(patches[query]), "mean distance (pixels)": pixels})
        scale_below(figure, norm, column[-1], inches, gap=0.08)
    for name, axis in zip(tokens.query_names(), axes[:, 0]):
        axis.set_ylabel(name.replace(", ", "\n"), fontsize=8)
    return rows


def _draw_heads(models: Sequence[ImageSubject], query: int, path: Path) -> Figure:
    name = models[0].tokens.query_names()[query]
    text = caption(
        models,
        f"Rows of W of the patch in {name}, of every head. The patch itself is grey and not on the scale, which is "
        "logarithmic and shared by a layer (the bar below it). Below a map: the mean distance to the patches that the "
        "patch attends to, in pixels, and the weight of itself.",
    )
    title, cell = f"What the patch in {name} looks at, head by head", cell_size(models[0], 1.3)
    layout = dict(rows=[subject.num_heads for subject in models], cell=cell, margins=(0.3, 0.3, 0.75, 0.52))
    layout |= dict(gaps=(0.22, 0.2), fontsize=7, image=0)
    return draw_sheet(models, path, title, text, draw=partial(_draw_heads_block, query, cell[1]), **layout)


def _draw_heads_block(query: int, inches: float, figure, axes, subject: ImageSubject) -> list[dict]:
    """Draw a model's maps of one query and every head, `inches` high. Returns their numbers."""
    tokens, rows = subject.tokens, []
    place, name = tokens.queries()[query], tokens.query_names()[query]
    for number, (column, layer) in enumerate(zip(axes.T, subject.layers), start=1):
        maps = query_maps(layer.weights, tokens)
        norm, distances = logarithmic(without_itself(maps, tokens)), query_distances(maps, tokens)
        for head, (axis, patches) in enumerate(zip(column, maps[:, query])):
            picture, itself, pixels = coloured(patches, norm), float(patches[place]), float(distances[head, query])
            picture[place] = [round(255 * part) for part in GREY]
            axis.imshow(picture, interpolation="none")
            frame(axis, place, (1, 1))
            axis.set_xlabel(f"{pixels:.0f} px, self {itself:.2f}", labelpad=2)
            about = {"model": subject.model, "layer": number, "head": head + 1, "patch": name}
            rows.append({**about, "self-weight": itself, "mean distance (pixels)": pixels})
        scale_below(figure, norm, column[-1], inches, gap=0.26)
    label_heads(axes)
    return rows
