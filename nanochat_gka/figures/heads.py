"""What every head does, as tables: how many tokens it weights, how far back it looks, and what it gives to itself, to
the token before and to the first one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import Normalize

from nanochat_gka.figures.measures import MEASURES, uniform
from nanochat_gka.figures.subjects import TextSubject, caption
from trainkit_gka.figures.charts import heat_map
from trainkit_gka.figures.sheet import name_above, save, sheet
from trainkit_gka.plots import Figure

UNIFORM = "uniform"  # the name of the row below the heads


def head_table(subject: TextSubject, measure) -> np.ndarray:
    """The measure of every layer and head, and last of a head that weights all it sees alike: (L, H + 1)."""
    return np.stack(
        [torch.cat([measure(layer.reads), measure(uniform(layer))[None]]).numpy() for layer in subject.layers]
    )


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
    figure, axes = sheet(len(MEASURES), len(subjects), cell, title, words, margins, gaps)
    tables = {name: [head_table(subject, measure) for subject in subjects] for name, measure in MEASURES.items()}
    for row, (name, values) in zip(axes, tables.items()):
        norm = Normalize(min(map(np.min, values)), max(map(np.max, values)))
        for axis, subject, of_model in zip(row, subjects, values):
            heat_map(figure, axis, of_model, name, norm, [*subject.head_names(), UNIFORM])
            axis.axhline(subject.num_heads - 0.5, color="white", linewidth=3)
    for axis, subject in zip(axes[0], subjects):
        name_above(axis, subject.model)
    rows = [
        {"model": subject.model, "layer": number + 1, "head": head,
         **{name: float(values[place][number, column]) for name, values in tables.items()}}
        for place, subject in enumerate(subjects)
        for number, layer in enumerate(subject.layers)
        for column, head in enumerate([*subject.head_names(layer), UNIFORM])
    ]  # fmt: skip
    return [Figure(save(figure, folder / "heads.png"), title, words, rows)]
