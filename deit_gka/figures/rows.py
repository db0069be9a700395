"""Rows of W over the patches: of the CLS token, and of four patches, beside the image (paper, supplement)."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from deit_gka.figures.maps import Tokens, attended_distances, place_name
from deit_gka.figures.sheet import columns, draw_sheets, frame, heads, smooth_map
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.measures import diagonal_mass, entropy
from trainkit_gka.figures.sheet import coloured, from_zero, logarithmic, scale_below
from trainkit_gka.plots import Figure

# The CLS token


def draw_cls_maps(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw a contact sheet for every image: layers across, heads down, one scale for a layer; models one by one."""
    tokens = subjects[0].tokens
    layout = dict(margins=(0.5, 0.3, 0.75, 0.52), gaps=(0.1, 0.22), image=0)
    text = (
        f"{tokens.reader[0].upper()}{tokens.reader[1:]} of W over the patches, of every head, on one scale for a "
        "layer (the bar below it), bicubic. Below a map: the weight that "
        f"{'the class token gives itself' if tokens.has_class else 'patches give themselves, the mean'}, and the "
        f"entropy of the row in nats (uniform: {math.log(tokens.count):.2f})."
    )
    title = f"{'CLS' if tokens.has_class else 'Mean'} attention by layer and head"
    return draw_sheets(subjects, folder, "cls_maps", title, text, _draw_cls, heads, **layout)


def _draw_cls(axes, subject: ImageSubject) -> list[dict]:
    """Draw a model's maps. Returns their numbers."""
    tokens, table = subject.tokens, []
    for place, column, layer in columns(axes, subject):
        rows = tokens.read(layer.weights)
        maps = tokens.patches(rows)
        norm = from_zero(maps)
        itself = rows[:, 0] if tokens.has_class else diagonal_mass(layer.weights[:, tokens.prefix :, tokens.prefix :])
        numbers = zip(itself.tolist(), entropy(rows).tolist())
        for head, (axis, patches, (self_weight, nats)) in enumerate(zip(column, maps, numbers), start=1):
            axis.imshow(smooth_map(patches, norm, subject.pixels.shape[:2]), interpolation="none")
            axis.set_xlabel(f"self {self_weight:.3f}, {nats:.2f} nats", labelpad=2)
            table.append({**place, "head": head, "self-weight": self_weight, "entropy (nats)": nats})
        scale_below(norm, column[-1], gap=0.26)
    return table


# Four patches


def query_maps(weights: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the paper's four patches the rows over the patches, (..., N, N) -> (..., 4, *grid), and how far they look.

    The latter in pixels, (..., 4).
    """
    places = tokens.query_tokens()
    distances = attended_distances(weights, tokens)[..., [place - tokens.prefix for place in places]]
    return tokens.patches(weights[..., places, :]), distances


def draw_patch_to_patch(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw a sheet for every image: layers across; down, every query's map; the image once; by model."""
    title, text = "Patch-to-patch attention", (
        "Rows of W of four patches, framed, the mean over heads, over all patches. The scale is logarithmic and shared "
        "by a layer (the bar below it): the patch's weight of itself would flatten a linear one."
    )  # fmt: skip
    layout = dict(inches=1.25, margins=(0.3, 0.3, 0.75, 0.35), gaps=(0.22, 0.12), image=0)
    return draw_sheets(subjects, folder, "patch_to_patch", title, text, _draw_mean, _labels, **layout)


def _labels(subject: ImageSubject) -> list[str]:
    return [place_name(*query).replace(", ", "\n") for query in subject.tokens.queries()]


def _draw_mean(axes, subject: ImageSubject) -> list[dict]:
    """Draw a model's maps, the mean over heads. Returns their numbers."""
    rows = []
    for place, column, layer in columns(axes, subject):
        maps, distances = query_maps(layer.weights.mean(0), subject.tokens)
        norm = logarithmic(maps)
        for query, patches, pixels, axis in zip(subject.tokens.queries(), maps, distances.tolist(), column):
            axis.imshow(coloured(patches, norm), interpolation="none")
            frame(axis, query)
            numbers = {"self-weight": float(patches[query]), "mean distance (pixels)": pixels}
            rows.append({**place, "patch": place_name(*query), **numbers})
        scale_below(norm, column[-1], gap=0.08)
    return rows
