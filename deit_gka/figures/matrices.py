"""W as it is, of every layer and head, the diagonal masked (paper, supplement)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from deit_gka.figures.sheet import by_image, caption, draw_sheet, label_heads
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.measures import diagonal_mass
from trainkit_gka.figures.sheet import GREY, coloured, linear
from trainkit_gka.plots import Figure

SATURATED = 0.995  # a few pairs of equal patches would leave the rest dark


def off_diagonal(weights: torch.Tensor) -> torch.Tensor:
    """The entries of square matrices without their diagonals, (..., N, N) -> (..., N (N - 1))."""
    size = weights.shape[-1]
    return weights[..., ~torch.eye(size, dtype=torch.bool)]


def subsample(weights: torch.Tensor, tokens: int) -> torch.Tensor:
    """The rows and columns of `tokens` tokens, evenly spread from first to last; all if there are fewer."""
    count = weights.shape[-1]
    if not 0 < tokens < count:
        return weights
    chosen = torch.linspace(0, count - 1, tokens).round().long()
    return weights[..., chosen, :][..., chosen]


def matrix_picture(weights: torch.Tensor, norm, prefix: int) -> np.ndarray:
    """W, (N, N), in colours: the diagonal grey, rows and columns of the `prefix` broad and apart from the patches'."""
    picture = coloured(weights, norm)
    picture[range(len(weights)), range(len(weights))] = np.uint8(np.multiply(255, GREY))
    if not prefix:
        return picture
    broad = max(1, len(weights) // 40)
    for axis in (0, 1):
        before, patches = np.split(picture, [prefix], axis=axis)
        before = np.repeat(before, broad, axis=axis)
        gap = np.full_like(np.take(before, [0], axis=axis).repeat(max(1, broad // 2), axis=axis), 255)
        picture = np.concatenate([before, gap, patches], axis=axis)
    return picture


def draw_matrices(subjects: Sequence[ImageSubject], folder: Path, tokens: int = -1) -> list[Figure]:
    """Draw a contact sheet for every image: layers across, heads down, models one by one.

    tokens: how many are drawn, -1 = all.
    """
    layout = dict(cell=(1.45, 1.45), margins=(0.5, 0.3, 0.75, 0.3), gaps=(0.1, 0.24), fontsize=7)
    figures = []
    for models in by_image(subjects):
        count, (drawn, prefix) = models[0].tokens.count, _drawn(models[0], tokens)
        before = f" The tokens before the patches ({prefix}) are drawn broad, apart from them." if prefix else ""
        text = caption(
            models,
            f"W of every head, {drawn} × {drawn} of {count} × {count}: queries down, keys across.{before} The diagonal "
            "is grey; below a matrix: its mass (the mean weight that a token gives itself) and the largest weight off "
            f"it. The colours of a matrix run over its own range off the diagonal, up to the {SATURATED:.1%} quantile.",
        )
        path, rows = models[0].file(folder, "matrices"), [subject.num_heads for subject in models]
        title, draw = "Attention matrices W without their diagonal", partial(_draw_block, tokens)
        figures.append(draw_sheet(models, path, title, text, rows, draw=draw, **layout))
    return figures


def _drawn(subject: ImageSubject, tokens: int) -> tuple[int, int]:
    """How many tokens are drawn, and how many of them are before the patches."""
    count = subject.tokens.count
    drawn = min(count, tokens) if tokens > 0 else count
    return drawn, subject.tokens.prefix if drawn == count else int(subject.tokens.has_class)


def _draw_block(tokens: int, figure, axes, subject: ImageSubject) -> list[dict]:
    """Draw a model's matrices. Returns their numbers."""
    rows, (_, prefix) = [], _drawn(subject, tokens)
    for number, (column, layer) in enumerate(zip(axes.T, subject.layers), start=1):
        masses = diagonal_mass(layer.weights).tolist()
        for head, (axis, weights, mass) in enumerate(zip(column, layer.weights, masses), start=1):
            some = subsample(weights, tokens)
            off, most = off_diagonal(some), float(off_diagonal(weights).max())
            picture = matrix_picture(some, linear(off[off <= float(np.quantile(off.numpy(), SATURATED))]), prefix)
            axis.imshow(picture, interpolation="none")
            axis.set_xlabel(f"diagonal {mass:.3f}, max {most:#.2g}", labelpad=2)
            place = {"model": subject.model, "layer": number, "head": head}
            rows.append({**place, "diagonal mass": mass, "largest off it": most})
    label_heads(axes)
    return rows
