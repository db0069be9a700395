"""W itself, its diagonal masked: of every layer and head, and the mean over heads over depth (paper, supplement)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from deit_gka.figures.sheet import columns, draw_sheets, heads
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.measures import diagonal_mass, effective_tokens
from trainkit_gka.figures.sheet import GREY, coloured, from_zero, linear, logarithmic, scale
from trainkit_gka.plots import Figure

SATURATED = 0.995  # a few pairs of equal patches would leave the rest dark


def off_diagonal(weights: torch.Tensor) -> torch.Tensor:
    """The entries of square matrices without their diagonals, (..., N, N) -> (..., N (N - 1))."""
    return weights[..., ~torch.eye(weights.shape[-1], dtype=torch.bool)]


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

    tokens: how many are drawn, evenly spread, -1 = all.
    """
    count, (chosen, prefix) = subjects[0].tokens.count, _chosen(subjects[0], tokens)
    before = f" The tokens before the patches ({prefix}) are drawn broad, apart from them." if prefix else ""
    title = "Attention matrices W without their diagonal"
    text = (
        f"W of every head, {len(chosen)} × {len(chosen)} of {count} × {count}: queries down, keys across.{before} The "
        "diagonal is grey; below a matrix: its mass (the mean weight that a token gives itself) and the largest weight "
        f"off it. The colours of a matrix run over its own range off the diagonal, up to the {SATURATED:.1%} quantile."
    )
    draw = partial(_draw_block, tokens)
    layout = dict(inches=1.45, square=True)
    return draw_sheets(subjects, folder, "matrices", title, text, draw, heads, **layout)


def _chosen(subject: ImageSubject, tokens: int) -> tuple[torch.Tensor, int]:
    """The tokens that are drawn, and how many of them are before the patches."""
    count = subject.tokens.count
    if not 0 < tokens < count:
        return torch.arange(count), subject.tokens.prefix
    return torch.linspace(0, count - 1, tokens).round().long(), int(subject.tokens.has_class)


def _draw_block(tokens: int, axes, subject: ImageSubject) -> list[dict]:
    """Draw a model's matrices. Returns their numbers."""
    rows, (chosen, prefix) = [], _chosen(subject, tokens)
    for place, column, layer in columns(axes, subject):
        masses = diagonal_mass(layer.weights).tolist()
        for head, (axis, weights, mass) in enumerate(zip(column, layer.weights, masses), start=1):
            some = weights[chosen][:, chosen]
            most = float(off_diagonal(weights).max())
            off = off_diagonal(some)
            picture = matrix_picture(some, linear(off[off <= float(np.quantile(off.numpy(), SATURATED))]), prefix)
            axis.imshow(picture, interpolation="none")
            axis.set_xlabel(f"diagonal {mass:.3f}, max {most:#.2g}", labelpad=2)
            rows.append({**place, "head": head, "diagonal mass": mass, "largest off it": most})
    return rows


def draw_evolution(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw a sheet for every image: layers across; down, W and its CLS row; the image once; by model."""
    layout = dict(inches=1.45, margins=(0.55, 0.8, 0.75, 0.1), gaps=(0.08, 0.42), square=True, image=1)
    title = "Kernel evolution over depth"
    text = (
        "The mean over heads of W (above; its diagonal grey, its mass and the effective tokens, exp(entropy), below "
        f"it), and its {subjects[0].tokens.reader} over the patches. One scale for a row of pictures: logarithmic for "
        "W, linear from 0 below. σ: the mean over heads, where a layer has it. The paper turns this sheet by 90 "
        "degrees: a row for every layer."
    )
    return draw_sheets(subjects, folder, "evolution", title, text, _draw_means, _labels, **layout)


def _labels(subject: ImageSubject) -> list[str]:
    return ["W", "CLS row" if subject.tokens.has_class else "mean row"]


def _draw_means(axes, subject: ImageSubject) -> list[dict]:
    """Draw a model's layers. Returns their numbers."""
    tokens, rows = subject.tokens, []
    means = torch.stack([layer.weights.mean(0) for layer in subject.layers])
    maps = tokens.patches(tokens.read(means))
    scales = logarithmic(off_diagonal(means), decades=3), from_zero(maps)
    for axis in axes.flat:
        axis.set_anchor("N")
    for (place, (above, below), layer), mean, patches in zip(columns(axes, subject), means, maps):
        above.imshow(matrix_picture(mean, scales[0], tokens.prefix), interpolation="none")
        below.imshow(coloured(patches, scales[1]), interpolation="none")
        sigma = None if layer.sigma is None else float(layer.sigma.mean())
        mass = float(diagonal_mass(mean))
        effective = float(effective_tokens(layer.weights).mean())
        words = "" if sigma is None else f"\nσ {sigma:.2f}"
        above.set_xlabel(f"diagonal {mass:.3f}{words}, eff. {effective:.0f}", labelpad=2)
        rows.append({**place, "sigma": sigma, "diagonal mass": mass, "effective tokens": effective})
    for axis, norm in zip(axes[:, -1], scales):
        scale(norm, axis, (1.06, 0, 0.06, 1))
    return rows
