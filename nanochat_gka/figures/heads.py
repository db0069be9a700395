"""Measures of every head, as tables: how many tokens it weights, how far back it looks, and the weight of the token
itself, of the token before and of the first one.

Measures are means over the queries of a text, (..., T, T) -> (...), of weights by the token whose value is mixed
(`LayerWeights.reads`). The first token sees itself alone, whatever the head: it is left out. T must be at least 2.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import Normalize

from gka.masking import Mask
from nanochat_gka.figures.subjects import TextSubject, caption, rows_by_head
from trainkit_gka.figures.charts import heat_map
from trainkit_gka.figures.measures import diagonal_mass, effective_tokens
from trainkit_gka.figures.sheet import name_above, sheet
from trainkit_gka.plots import Figure

UNIFORM = "uniform"  # the name of the row below the heads


def attended_distance(weights: torch.Tensor) -> torch.Tensor:
    """How many tokens back a query looks: the distance weighted by its row."""
    places = torch.arange(weights.shape[-1])
    distances = (places[:, None] - places).clamp(min=0)
    return (weights * distances).sum(-1)[..., 1:].mean(-1)


MEASURES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # exp(entropy) of a row: 1 where one token has all the weight, i + 1 where query i weights all it sees alike.
    "effective tokens": lambda weights: effective_tokens(weights[..., 1:, :]),
    "weight of itself": lambda weights: diagonal_mass(weights[..., 1:, 1:]),
    "weight of the token before": lambda weights: diagonal_mass(weights[..., 1:, :-1]),
    # Where heads may leave the weight that they have no use for.
    "weight of the first token": lambda weights: weights[..., 1:, 0].mean(-1),
    "mean distance (tokens)": attended_distance,
}


def head_table(subject: TextSubject, measure) -> np.ndarray:
    """The measure of every layer and head, and last of a head that weights all it sees alike: (L, H + 1)."""
    rows, count = [], len(subject.words)
    for layer in subject.layers:
        visible = Mask(causal=True, window=layer.window).dense(count, count, torch.device("cpu")).float()
        uniform = visible / visible.sum(-1, keepdim=True)
        rows.append(torch.cat([measure(layer.reads), measure(uniform)[None]]).numpy())
    return np.stack(rows)


def draw_heads(subjects: Sequence[TextSubject], folder: Path) -> list[Figure]:
    """Draw a table for every measure, models side by side on one scale."""
    words = caption(
        subjects,
        "Means over the queries of the text from the second token on; the lowest row of a table is what a head that "
        "weights all tokens it sees alike would have. Effective tokens: exp(entropy of a row of W). The weight of "
        "the token itself is the mass of the diagonal; of the first token: what heads may leave there. The mean "
        "distance counts tokens back, weighted by W.",
    )
    depth, heads = max(len(s.layers) for s in subjects), max(s.num_heads for s in subjects)
    cell, title = (max(2.6, 0.42 * depth), max(1.4, 0.24 * (heads + 1))), "What every head does"
    margins, gaps = (0.95, 0.75, 0.85, 0.5), (1.75, 0.75)
    save, axes = sheet(len(MEASURES), len(subjects), cell, title, words, margins, gaps)
    tables = {name: {s: head_table(s, measure) for s in subjects} for name, measure in MEASURES.items()}
    for row, (name, by_subject) in zip(axes, tables.items()):
        norm = Normalize(min(map(np.min, by_subject.values())), max(map(np.max, by_subject.values())))
        for axis, (subject, values) in zip(row, by_subject.items()):
            heat_map(axis, values, name, norm, [*subject.head_names(), UNIFORM])
            axis.axhline(subject.num_heads - 0.5, color="white", linewidth=3)
    for axis, subject in zip(axes[0], subjects):
        name_above(axis, subject.model)

    def numbers(subject: TextSubject, layer: int, head: int) -> dict[str, float]:
        return {name: float(by_subject[subject][layer, head]) for name, by_subject in tables.items()}

    rows = rows_by_head(subjects, numbers, more=(UNIFORM,))
    return [save(folder / "heads.png", rows)]
