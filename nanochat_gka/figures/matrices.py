"""W of every layer and head, queries down and tokens across, on one logarithmic scale."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import LogNorm

from nanochat_gka.figures.heads import MEASURES
from nanochat_gka.figures.rows import TOKENS
from nanochat_gka.figures.subjects import FONT, TextSubject, caption, rows_by_head
from trainkit_gka.figures.sheet import bare, coloured, label_layers, name_above, scale, sheet
from trainkit_gka.plots import Figure

WIDTH, LARGEST, SMALLEST = 12.0, 2.4, 1.45  # inches: of all pictures beside each other, of one at most, at least
SMALLEST_FONT, EVERY = 5.0, 8  # points; where words would be smaller, every so many-th token is numbered
HIDDEN = 232  # the grey of masked weights
MASSES = ("weight of itself", "weight of the token before")


def matrix_picture(weights: torch.Tensor, norm) -> np.ndarray:
    """(T, T) weights in colours; tokens after the query, and others that have no weight at all, are grey."""
    picture = coloured(weights, norm)
    picture[(weights == 0).numpy()] = HIDDEN
    return picture


def draw_matrices(subjects: Sequence[TextSubject], folder: Path, tokens: int = TOKENS) -> list[Figure]:
    """Draw a contact sheet: layers across, heads down, the models below each other.

    tokens: how many of the text are drawn, -1 = all. No query sees later tokens, so these rows are complete.
    """
    text = subjects[0].words
    count = len(text) if tokens < 0 else min(tokens, len(text))
    words = caption(
        subjects,
        "W of every head: a row for every query, from the top, over the tokens whose values it mixes; grey is hidden "
        "by the causal mask, the window or an offset. One logarithmic scale for all. Below a matrix: the mean weight "
        "of a token for itself (the mass of the diagonal) and for the token before it, without the first row.",
        "" if count == len(text) else f"The first {count} of {len(text)} tokens are drawn.",
    )
    columns = max(len(s.layers) for s in subjects)
    rows = sum(s.num_heads + 1 for s in subjects) - 1
    side = min(LARGEST, max(SMALLEST, WIDTH / columns))
    labels = text[:count]
    font = min(7.0, 0.85 * 72 * side / count)
    if font < SMALLEST_FONT:
        labels = [str(n) if n % EVERY == 0 else "" for n in range(1, count + 1)]
        font = 6.0
    longest = max(map(len, labels), default=0) * font * 0.62 / 72
    margins = (0.5 + longest, 0.9, 0.85, 0.3 + longest)
    title = "Attention matrices W over tokens"
    save, axes = sheet(rows, columns, (side, side), title, words, margins, (0.1, 0.25))
    bare(axes, fontsize=6.5)
    for axis in axes.flat:
        axis.set_visible(False)
    # From a tenth of an equal share of the tokens, rounded down to a power of ten, up to 1.
    norm = LogNorm(10.0 ** math.floor(math.log10(0.1 / count)), 1.0, clip=True)
    top = 0

    def numbers(subject: TextSubject, layer: int, head: int) -> dict[str, float]:
        weights = subject.layers[layer].reads[head, :count, :count]
        return {name: float(MEASURES[name](weights)) for name in MASSES}

    table = rows_by_head(subjects, numbers)
    of_matrix = iter(table)
    for subject in subjects:
        block = axes[top : top + subject.num_heads, : len(subject.layers)]
        top += subject.num_heads + 1
        label_layers(block, subject)
        name_above(block[0, 0], subject.model)
        for column, layer in zip(block.T, subject.layers):
            for axis, weights in zip(column, layer.reads[:, :count, :count]):
                itself, before = map(next(of_matrix).get, MASSES)
                axis.set_visible(True)
                axis.imshow(matrix_picture(weights, norm), interpolation="none")
                axis.set_xlabel(f"itself {itself:.3f}, before {before:.3f}", labelpad=2)
        _label(block, subject.head_names(), labels, font)
    scale(norm, axes[0, -1], (1.06, 0, 0.06, 1), "weight")
    return [save(folder / "matrices.png", table)]


def _label(axes, heads: Sequence[str], labels: Sequence[str], fontsize: float) -> None:
    """Write the heads and the tokens at the left, and the tokens below."""
    style = dict(fontsize=fontsize, family=FONT, parse_math=False)
    for axis in [*axes[:, 0], *axes[-1]]:
        axis.tick_params(length=0, pad=1)
    for axis, head in zip(axes[:, 0], heads):
        axis.set_ylabel(f"head {head}", fontsize=8)
        axis.set_yticks(range(len(labels)), labels, **style)
    for axis in axes[-1]:
        axis.set_xticks(range(len(labels)), labels, rotation=90, **style)
