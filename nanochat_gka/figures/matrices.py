"""W of every layer and head, queries down and tokens across, on one logarithmic scale."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import LogNorm

from nanochat_gka.figures.measures import previous_weight, self_weight
from nanochat_gka.figures.rows import TOKENS
from nanochat_gka.figures.subjects import TextSubject, caption
from nanochat_gka.figures.words import FONT
from trainkit_gka.figures.sheet import bare, coloured, label_layers, name_above, save, scale, sheet
from trainkit_gka.plots import Figure

WIDTH, LARGEST, SMALLEST = 12.0, 2.4, 1.45  # inches: of all pictures beside each other, of one at most, at least
SMALLEST_FONT, EVERY = 5.0, 8  # points; where words would be smaller, every so many-th token is numbered
MOST_COLUMNS = 24  # of a sheet with models side by side
HIDDEN = 232  # the grey of what the mask hides


def scale_of(count: int) -> LogNorm:
    """From a tenth of an equal share of `count` tokens, rounded down to a power of ten, up to 1."""
    return LogNorm(10.0 ** math.floor(math.log10(0.1 / count)), 1.0, clip=True)


def arrange(subjects: Sequence[TextSubject]) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Rows and columns of the sheet, and of every model its first row and column.

    Models are side by side with an empty column between them, or, if they have many layers, below each other.
    """
    heads = [subject.num_heads + 1 for subject in subjects]  # and an empty one after them
    depths = [len(subject.layers) + 1 for subject in subjects]
    if sum(depths) - 1 <= MOST_COLUMNS:
        return (max(heads) - 1, sum(depths) - 1), [(0, sum(depths[:number])) for number in range(len(subjects))]
    return (sum(heads) - 1, max(depths) - 1), [(sum(heads[:number]), 0) for number in range(len(subjects))]


def matrix_picture(weights: torch.Tensor, norm) -> np.ndarray:
    """(T, T) weights in colours; tokens after the query, and others that have no weight at all, are grey."""
    picture = coloured(weights, norm)
    picture[(weights == 0).numpy()] = HIDDEN
    return picture


def draw_matrices(subjects: Sequence[TextSubject], folder: Path, tokens: int = TOKENS) -> list[Figure]:
    """Draw a contact sheet: layers across, heads down, the models side by side or below each other.

    tokens: how many of the text are drawn, -1 = all. No query sees what comes later, so these rows are whole.
    """
    first = subjects[0]
    count = len(first.words) if tokens < 0 else min(tokens, len(first.words))
    shape, corners = arrange(subjects)
    side = min(LARGEST, max(SMALLEST, WIDTH / shape[1]))
    font = min(7.0, 0.85 * 72 * side / count)
    part = "" if count == len(first.words) else f"The first {count} of {len(first.words)} tokens are drawn."
    words = caption(
        subjects,
        "W of every head: a row for every query, from the top, over the tokens whose values it mixes; grey is hidden "
        "by the causal mask, the window or an offset. One logarithmic scale for all. Below a matrix: the mean weight "
        "of a token for itself (the mass of the diagonal) and for the token before it, without the first row.",
        part,
    )
    legible = font >= SMALLEST_FONT
    labels = first.words[:count] if legible else [str(n) if n % EVERY == 0 else "" for n in range(1, count + 1)]
    font = font if legible else 6.0
    longest = max(map(len, labels), default=0) * font * 0.62 / 72
    margins = (0.5 + longest, 0.9, 0.85, 0.3 + longest)
    title = "Attention matrices W over tokens"
    figure, axes = sheet(*shape, (side, side), title, words, margins, (0.1, 0.25))
    bare(axes, fontsize=6.5)
    for axis in axes.flat:
        axis.set_visible(False)
    norm, table = scale_of(count), []
    for subject, (top, left) in zip(subjects, corners):
        block = axes[top : top + subject.num_heads, left : left + len(subject.layers)]
        table += _draw_subject(block, subject, count, norm)
        _label(block, labels, font)
    scale(figure, norm, axes[0, -1], (1.06, 0, 0.06, 1), "weight")
    return [Figure(save(figure, folder / "matrices.png"), title, words, table)]


def _draw_subject(axes, subject: TextSubject, count: int, norm) -> list[dict]:
    """A model's columns of the sheet: the first `count` tokens of every head. Returns what is written below."""
    label_layers(axes, subject)
    name_above(axes[0, 0], subject.model)
    table = []
    for axis in axes.flat:
        axis.set_visible(True)
    for number, (column, layer) in enumerate(zip(axes.T, subject.layers), start=1):
        weights_of_layer, names = layer.reads[:, :count, :count], subject.head_names(layer)
        masses = self_weight(weights_of_layer).tolist(), previous_weight(weights_of_layer).tolist()
        for axis, weights, name, itself, before in zip(column, weights_of_layer, names, *masses):
            axis.imshow(matrix_picture(weights, norm), interpolation="none")
            axis.set_xlabel(f"itself {itself:.3f}, before {before:.3f}", labelpad=2)
            table.append(
                {"model": subject.model, "layer": number, "head": name, "weight of itself": itself,
                 "weight of the token before": before}
            )  # fmt: skip
    for axis, name in zip(axes[:, 0], subject.head_names()):
        axis.set_ylabel(f"head {name}", fontsize=8)
    return table


def _label(axes, labels: Sequence[str], fontsize: float) -> None:
    """Write the tokens at the left and below."""
    for axis in [*axes[:, 0], *axes[-1]]:
        axis.tick_params(length=0, pad=1)
    for axis in axes[:, 0]:
        axis.set_yticks(range(len(labels)), labels=labels, fontsize=fontsize, family=FONT, parse_math=False)
    for axis in axes[-1]:
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=fontsize, family=FONT, parse_math=False)
