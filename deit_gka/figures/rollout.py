"""Attention rollout: how much of every patch reaches the CLS token through all layers (paper, supplement; Abnar and
Zuidema 2020, arXiv 2005.00928)."""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from deit_gka.figures.maps import Tokens
from deit_gka.figures.sheet import by_image, cell_size, smooth_map
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.sheet import bare, from_zero, name_above, plain, scale, sheet
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


def on_patches(weights: Sequence[torch.Tensor], tokens: Tokens, ratio: float) -> tuple[torch.Tensor, float]:
    """The row of the rollout that stands for the image, (N,), in float64, and its share on patches."""
    row = tokens.read(rollout(weights, tokens, ratio))
    return row, float(row[tokens.prefix :].sum())


def largest_ratio(weights: Sequence[torch.Tensor], tokens: Tokens, ratio: float) -> float:
    """The largest hundredth, at most `ratio`, at which more than LEAST_SHARE of the row is on patches; at least 0.

    The share falls as the ratio rises.
    """

    def empty(hundredths: int) -> bool:
        return on_patches(weights, tokens, hundredths / 100)[1] <= LEAST_SHARE

    most = round(100 * ratio)
    return ratio if not empty(most) else max(0, bisect_left(range(most), True, key=empty) - 1) / 100


def draw_rollout(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw a row for every model on every image: the image, and beside it the rollout at the discard ratios."""
    subjects = [subject for models in by_image(subjects) for subject in models]
    heading = "Attention rollout: what reaches the " + ("CLS token" if subjects[0].tokens.has_class else "mean patch")
    text = (
        f"{'; '.join(dict.fromkeys(subject.about for subject in subjects))}. R = Â_L ⋯ Â_1 with Â = ½ mean over heads "
        f"+ ½ I, rows normalised; {subjects[0].tokens.reader} of R over the patches, in multiples of an equal share (1 "
        "/ tokens), on one scale for a row. Weights below the quantile are zeroed before I is added; those to the "
        "class token are kept. Below a map: the part of that row that is on patches, the rest is on the tokens before "
        f"them. Where a ratio leaves less than {LEAST_SHARE:.0%} on patches, the largest one that leaves more is drawn "
        "and named."
    )
    size = cell_size(subjects[0], 2.3)
    margins = (0.3, 0.75, 0.9, 0.32)
    save, axes = sheet(len(subjects), 1 + len(DISCARD_RATIOS), size, heading, text, margins, (0.06, 0.75))
    bare(axes)
    for axis, ratio in zip(axes[0, 1:], DISCARD_RATIOS):
        axis.set_title(f"discard ratio {ratio:g}", fontsize=9)
    table = []
    for row, subject in zip(axes, subjects):
        layers, tokens = [layer.weights for layer in subject.layers], subject.tokens
        ratios = [largest_ratio(layers, tokens, ratio) for ratio in DISCARD_RATIOS]
        rows, shares = zip(*(on_patches(layers, tokens, ratio) for ratio in ratios))
        maps = [tokens.patches(values * tokens.count).float() for values in rows]
        norm = from_zero(torch.stack(maps))
        row[0].imshow(subject.pixels, interpolation="none")
        name_above(row[0], subject.model)
        row[0].set_xlabel(plain(subject.image))
        for axis, wanted, ratio, share, patches in zip(row[1:], DISCARD_RATIOS, ratios, shares, maps):
            axis.imshow(smooth_map(patches, norm, subject.pixels.shape[:2]), interpolation="none")
            instead = f"{wanted:g} is empty, {ratio:g}: " if ratio < wanted else ""
            axis.set_xlabel(f"{instead}{share:.1%} on patches")
            table.append({"model": subject.model, "image": subject.image, "discard ratio": ratio, "on patches": share})
        scale(norm, row[-1], (1.04, 0, 0.06, 1), "× equal share")
    return [save(folder / "rollout.png", table)]
