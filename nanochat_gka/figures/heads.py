"""What every head does, as tables: how many tokens it weights, how far back it looks, and what it gives to itself, to
the token before and to the first one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import Normalize

from nanochat_gka.figures.measures import MEASURES, uniform
from nanochat_gka.figures.subject import Subject, offsets_note
from trainkit.figures.charts import heat_map
from trainkit.figures.sheet import name_above, save, sheet


def head_table(subject: Subject, measure) -> np.ndarray:
    """The measure of every layer and head, and last of a head that weights all it sees alike: (L, H + 1)."""
    return np.stack(
        [torch.cat([measure(layer.reads), measure(uniform(layer))[None]]).numpy() for layer in subject.layers]
    )


def draw_heads(subjects: Sequence[Subject], folder: Path) -> list[Path]:
    """Draw a table for every measure, models side by side on one scale. Returns the file."""
    first = subjects[0]
    caption = first.caption(
        "Means over the queries of the text from the second token on; the lowest row of a table is what a head that "
        "weights all tokens it sees alike would have. Effective tokens: exp(entropy of a row of W). The weight of "
        "the token itself is the mass of the diagonal; of the first token: what heads may leave there. The mean "
        "distance counts tokens back, weighted by W.",
        *[f"Beside it: {subject.about}." for subject in subjects[1:]],
        offsets_note(*subjects),
    )
    depth, heads = max(len(s.layers) for s in subjects), max(s.num_heads for s in subjects)
    figure, axes = sheet(
        len(MEASURES), len(subjects), (max(2.6, 0.42 * depth), max(1.4, 0.24 * (heads + 1))), "What every head does", caption,
        (0.95, 0.75, 0.85, 0.5), (1.75, 0.75),
    )  # fmt: skip
    for row, (name, measure) in zip(axes, MEASURES.items()):
        tables = [head_table(subject, measure) for subject in subjects]
        norm = Normalize(min(map(np.min, tables)), max(map(np.max, tables)))
        for axis, subject, values in zip(row, subjects, tables):
            heat_map(figure, axis, values, name, norm, [*subject.head_names(), "uniform"])
            axis.axhline(subject.num_heads - 0.5, color="white", linewidth=3)
    for axis, subject in zip(axes[0], subjects):
        name_above(axis, subject.name)
    return [save(figure, folder / "heads.png")]
