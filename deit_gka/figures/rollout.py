"""Attention rollout: how much of every patch reaches the CLS token through all layers (paper, supplement; Abnar and
Zuidema 2020, arXiv 2005.00928)."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from deit_gka.figures.measures import Tokens
from deit_gka.figures.sheet import by_image, cell_size, smooth_map
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.sheet import bare, from_zero, plain, save, scale, sheet
from trainkit_gka.plots import Figure

DISCARD_RATIOS = (0.0, 0.5, 0.9)
LEAST_SHARE = 0.01  # of the row on patches; less would be drawn black


def rollout(weights: Sequence[torch.Tensor], tokens: Tokens, discard: float = 0.0) -> torch.Tensor:
    """R = Â_L ... Â_1, (N, N), whose rows sum to 1. weights: W of every layer, (H, N, N).

    Â is the mean over heads, without what is below its `discard` quantile, plus I, normalised by rows. The last layer
    comes first in the product: its CLS row leaves the network. Weights to the class token are never discarded. A token
    that loses its whole row keeps itself, by I.
    """
    total = torch.eye(tokens.count, dtype=torch.float64)
    for layer in weights:
        mean = layer.double().mean(0)
        if discard:
            low = mean < float(np.quantile(mean.numpy(), discard))
            if tokens.has_class:
                low[:, 0] = False
            mean = mean.masked_fill(low, 0)
        augmented = 0.5 * mean + 0.5 * torch.eye(len(mean), dtype=mean.dtype)
        total = augmented / augmented.sum(-1, keepdim=True) @ total
    return total


def on_patches(weights: Sequence[torch.Tensor], tokens: Tokens, ratio: float) -> torch.Tensor:
    """The row of the rollout that stands for the image, (N,), in float64."""
    return tokens.read(rollout(weights, tokens, ratio))


def largest_ratio(weights: Sequence[torch.Tensor], tokens: Tokens, ratio: float) -> float:
    """The largest hundredth, at most `ratio`, at which more than LEAST_SHARE of the row is on patches.

    The share falls as the ratio rises, so this is a binary search.
    """
    if on_patches(weights, tokens, ratio)[tokens.prefix :].sum() > LEAST_SHARE:
        return ratio
    low, high = 0, round(100 * ratio) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if on_patches(weights, tokens, middle / 100)[tokens.prefix :].sum() > LEAST_SHARE:
            low = middle
        else:
            high = middle - 1
    return low / 100


def draw_rollout(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw a row for every model on every image: the image, and beside it the rollout at the discard ratios."""
    subjects = [subject for models in by_image(subjects) for subject in models]
    heading = "Attention rollout: what reaches the " + ("CLS token" if subjects[0].tokens.has_class else "mean patch")
    abouts = "; ".join(dict.fromkeys(subject.about for subject in subjects))
    caption = (
        f"{abouts}. R = Â_L ⋯ Â_1 with Â = ½ mean over heads + ½ I, rows normalised; {subjects[0].tokens.reader} of R "
        "over the patches, in multiples of an equal share (1 / tokens), on one scale for a row. Weights below the "
        "quantile are zeroed before I is added; those to the class token are kept. Below a map: the part of that "
        "row that is on patches, the rest is on the tokens before them. Where a ratio leaves less than "
        f"{LEAST_SHARE:.0%} on patches, the largest one that leaves more is drawn and named."
    )
    size = cell_size(subjects[0], 2.3)
    names = ["\n".join(textwrap.wrap(subject.model, int(size[1] * 15))) for subject in subjects]
    left = 0.3 + 0.12 * max(1 + name.count("\n") for name in names)
    figure, axes = sheet(
        len(subjects), 1 + len(DISCARD_RATIOS), size, heading, caption, (left, 0.75, 0.72, 0.32), (0.06, 0.3)
    )
    bare(axes)
    for axis, ratio in zip(axes[0, 1:], DISCARD_RATIOS):
        axis.set_title(f"discard ratio {ratio:g}", fontsize=9)
    table = []
    for row, name, subject in zip(axes, names, subjects):
        layers, tokens = [layer.weights for layer in subject.layers], subject.tokens
        ratios = [largest_ratio(layers, tokens, ratio) for ratio in DISCARD_RATIOS]
        rows = [on_patches(layers, tokens, ratio) for ratio in ratios]
        maps = [tokens.patches(values * tokens.count).float() for values in rows]
        norm = from_zero(torch.stack(maps))
        row[0].imshow(subject.pixels, interpolation="none")
        row[0].set_ylabel(plain(name), fontsize=7)
        row[0].set_xlabel(plain(subject.image))
        for axis, wanted, ratio, values, patches in zip(row[1:], DISCARD_RATIOS, ratios, rows, maps):
            axis.imshow(smooth_map(patches, norm, subject.pixels.shape[:2]), interpolation="none")
            share = float(values[tokens.prefix :].sum())
            instead = f"{wanted:g} is empty, {ratio:g}: " if ratio < wanted else ""
            axis.set_xlabel(f"{instead}{share:.1%} on patches")
            table.append({"model": subject.model, "image": subject.image, "discard ratio": ratio, "on patches": share})
        scale(figure, norm, row[-1], (1.04, 0, 0.06, 1), "× equal share")
    return [Figure(save(figure, folder / "rollout.png"), heading, caption, table)]
