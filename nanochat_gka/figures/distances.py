"""σ against the distances of the features, which says whether it is narrow or wide."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from nanochat_gka.figures.subjects import TextSubject, caption
from trainkit_gka.figures.charts import heat_map
from trainkit_gka.figures.measures import by_head, median_distance
from trainkit_gka.figures.sheet import name_above, save, sheet
from trainkit_gka.plots import Figure


def medians_and_sigmas(subject: TextSubject) -> tuple[np.ndarray, np.ndarray]:
    """The median distance of two tokens' features, and σ, by layer and head, (L, H) each; NaN in layers without σ."""
    medians = [None if layer.sigma is None else median_distance(layer.features) for layer in subject.layers]
    sigmas = [layer.sigma for layer in subject.layers]
    return by_head(medians, subject.num_heads), by_head(sigmas, subject.num_heads)


def draw_distances(subjects: Sequence[TextSubject], folder: Path) -> list[Figure]:
    """Draw σ over the median distance as a table, and below it one against the other; models side by side.

    Of the models that have bandwidths.
    """
    subjects = [subject for subject in subjects if subject.has_sigma]
    words = caption(
        subjects,
        "Above: σ over the median distance |x_i − x_j| of two tokens' features, after rotation and norm, by layer and "
        "head, on one scale. Below: one against the other; dashed: where they are equal. Two tokens at the median "
        "distance d have the affinity exp(−d² / 2σ²): 0.61 where σ = d, 0.14 where it is half of d, 0.88 where it is "
        "twice d. σ alone cannot be compared across layers.",
    )
    depth, heads = max(len(s.layers) for s in subjects), max(s.num_heads for s in subjects)
    cell, title = (max(3.0, 0.42 * depth), max(2.2, 0.24 * heads)), "Bandwidths against distances"
    figure, axes = sheet(2, len(subjects), cell, title, words, (0.7, 1.0, 0.85, 0.55), (1.6, 0.85))
    rows, numbers_of = [], [medians_and_sigmas(subject) for subject in subjects]
    ratios = np.concatenate([(sigmas / medians).ravel() for medians, sigmas in numbers_of])
    norm = Normalize(np.nanmin(ratios), np.nanmax(ratios))
    end = 1.08 * max(np.nanmax(values) for pair in numbers_of for values in pair)
    for (table, chart), subject, (medians, sigmas) in zip(axes.T, subjects, numbers_of):
        heat_map(figure, table, sigmas / medians, "σ / median distance", norm, names=subject.head_names())
        name_above(table, subject.model)
        for number, layer in enumerate(subject.layers):
            if layer.sigma is not None:
                rows += [
                    {"model": subject.model, "layer": number + 1, "head": name, "σ": float(sigma),
                     "median distance": float(median), "σ / median distance": float(sigma / median)}
                    for name, sigma, median in zip(subject.head_names(layer), sigmas[number], medians[number])
                ]  # fmt: skip
        numbers = np.repeat(np.arange(1, len(medians) + 1), medians.shape[1])
        points = chart.scatter(medians.ravel(), sigmas.ravel(), c=numbers, s=18, cmap="viridis", vmin=1, vmax=depth)
        chart.plot((0, end), (0, end), color="black", linestyle="--", linewidth=1)
        chart.set(xlabel="median distance", ylabel="σ", xlim=(0, end), ylim=(0, end))
        chart.grid(alpha=0.3)
        box = chart.get_position()
        bar = figure.colorbar(points, cax=figure.add_axes((box.x1 + 0.01, box.y0, 0.008, box.height)), label="layer")
        bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        bar.ax.tick_params(labelsize=7)
    return [Figure(save(figure, folder / "distances.png"), title, words, rows)]
