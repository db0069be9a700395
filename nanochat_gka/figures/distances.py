"""σ against the distances of the features, which says whether it is narrow or wide."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nanochat_gka.figures.subjects import Subject, caption
from trainkit.figures.charts import heat_map
from trainkit.figures.measures import median_distance
from trainkit.figures.sheet import name_above, save, sheet
from trainkit.plots import Figure


def medians_and_sigmas(subject: Subject) -> tuple[np.ndarray, np.ndarray]:
    """The median distance of two tokens' features, and σ, by layer and head, (L, H) each; NaN in layers without σ."""
    missing = np.full(subject.num_heads, np.nan)
    medians = [missing if s.sigma is None else median_distance(s.features).numpy() for s in subject.layers]
    sigmas = [missing if s.sigma is None else s.sigma.numpy() for s in subject.layers]
    return np.stack(medians), np.stack(sigmas)


def draw_distances(subjects: Sequence[Subject], folder: Path) -> list[Figure]:
    """Draw σ over the median distance as a table, and below it one against the other; models side by side.

    Of the models that have bandwidths.
    """
    subjects = [subject for subject in subjects if subject.has_sigma]
    words = caption(
        subjects,
        "Above: σ over the median distance |x_i − x_j| of two tokens' features, after rotation and norm, by layer and "
        "head. Below: both of them, and the line where they are equal. Two tokens at the median distance d have the "
        "affinity exp(−d² / 2σ²): 0.61 where σ = d, 0.14 where it is half of d, 0.88 where it is twice d. σ alone "
        "cannot be compared across layers.",
    )
    depth, heads = max(len(s.layers) for s in subjects), max(s.num_heads for s in subjects)
    cell, title = (max(3.0, 0.42 * depth), max(2.2, 0.24 * heads)), "Bandwidths against distances"
    figure, axes = sheet(2, len(subjects), cell, title, words, (0.7, 1.0, 0.85, 0.55), (1.6, 0.85))
    rows = []
    for (table, chart), subject in zip(axes.T, subjects):
        medians, sigmas = medians_and_sigmas(subject)
        heat_map(figure, table, sigmas / medians, "σ / median distance", names=subject.head_names())
        name_above(table, subject.model)
        for number, layer in enumerate(subject.layers):
            if layer.sigma is not None:
                chart.scatter(medians[number], sigmas[number], s=18, label=f"layer {number + 1}")
                rows += [
                    {"model": subject.model, "layer": number + 1, "head": name, "σ": float(sigma),
                     "median distance": float(median), "σ / median distance": float(sigma / median)}
                    for name, sigma, median in zip(subject.head_names(), sigmas[number], medians[number])
                ]  # fmt: skip
        end = 1.08 * max(np.nanmax(medians), np.nanmax(sigmas))
        chart.plot((0, end), (0, end), color="black", linestyle="--", linewidth=1, label="equal")
        chart.set(xlabel="median distance", ylabel="σ", xlim=(0, end), ylim=(0, end))
        chart.grid(alpha=0.3)
        columns = 1 + depth // 14
        chart.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, ncols=columns)
    return [Figure(save(figure, folder / "distances.png"), title, words, rows)]
