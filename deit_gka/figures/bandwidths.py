"""The learned bandwidths: σ by head and layer, beside it σ over the median distance and effective tokens (paper,
supplement)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deit_gka.figures.sheet import runs_of_recipe
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.charts import heat_map, lines
from trainkit_gka.figures.measures import by_head, effective_tokens, median_distance
from trainkit_gka.figures.sheet import legend_beside, save, sheet
from trainkit_gka.plots import BLACK, Figure


def relative_bandwidths(subject: ImageSubject) -> np.ndarray:
    """σ over the median distance of two tokens of that layer and head, (L, H); NaN in layers without σ."""
    ratios = [None if s.sigma is None else s.sigma / median_distance(s.features) for s in subject.layers]
    return by_head(ratios, subject.num_heads)


def widths(subject: ImageSubject) -> np.ndarray:
    """Effective tokens of every layer and head, (L, H), whatever the kind."""
    return by_head([effective_tokens(layer.weights) for layer in subject.layers], subject.num_heads)


def numbers_of(subjects: Sequence[ImageSubject]) -> np.ndarray:
    """σ, σ over the median distance and effective tokens of a model, means over images: (3, L, H)."""
    relative = np.mean([relative_bandwidths(subject) for subject in subjects], axis=0)
    return np.stack([subjects[0].sigmas, relative, np.mean([widths(subject) for subject in subjects], axis=0)])


def ranked(numbers: np.ndarray) -> np.ndarray:
    """`numbers_of` a model, (3, L, H), heads sorted by σ in every layer, by effective tokens in layers without σ."""
    sigma, _, effective = numbers
    order = np.where(np.isnan(sigma), effective, sigma).argsort(axis=-1, kind="stable")
    return np.take_along_axis(numbers, order[None], axis=-1)


def draw_bandwidths(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw σ as the paper does (heat map, lines over depth), then σ over the median distance and effective tokens.

    Of the first model, the mean over images; with runs that repeat it, the mean and the range over the runs.
    """
    runs = runs_of_recipe(subjects)
    first, title = runs[0][0], "Learned bandwidths"
    every = np.stack([numbers_of(run) if len(runs) == 1 else ranked(numbers_of(run)) for run in runs])
    (sigma, relative, effective), low, high = every.mean(0), every.min(0), every.max(0)
    spread = [(low[i], high[i]) if len(runs) > 1 else None for i in (0, 2)]
    name, count, depth = "head" if len(runs) == 1 else "rank", first.tokens.count, len(first.layers)
    initial = next(layer.initial_sigma for layer in first.layers if layer.sigma is not None)
    text = _caption(runs, np.nanmin(low[0]), np.nanmax(high[0]), initial)
    cell = (max(5.2, 0.48 * depth), max(2.3, 0.25 * first.num_heads))
    figure, axes = sheet(2, 2, cell, title, text, margins=(0.7, 0.9, 0.75, 0.5), gaps=(1.95, 0.85))
    heat_map(figure, axes[0, 0], sigma, "(a) σ")
    heat_map(figure, axes[0, 1], relative, "(b) σ / median distance")
    lines(axes[1, 0], sigma, "(c) σ over depth", "σ", spread[0], name)
    if {layer.initial_sigma for layer in first.layers if layer.sigma is not None} == {initial}:
        axes[1, 0].axhline(initial, color=BLACK, linestyle="--", linewidth=1, label=f"initial, {initial:.2f}")
    lines(axes[1, 1], effective, "(d) effective tokens over depth", f"effective tokens of {count}", spread[1], name)
    for above, below in axes.T:
        above.set_ylabel(name)
        legend_beside(below)
    values = {"sigma": sigma, "sigma / median distance": relative, "effective tokens": effective}
    if len(runs) > 1:
        values |= {"least sigma": low[0], "largest sigma": high[0]}
    rows = [
        {"layer": layer + 1, name: head + 1, **{key: _cell(value[layer, head]) for key, value in values.items()}}
        for layer, head in np.ndindex(sigma.shape)
    ]
    return [Figure(save(figure, folder / "sigma.png"), title, text, rows)]


def _caption(runs: Sequence[Sequence[ImageSubject]], least: float, most: float, initial: float) -> str:
    first, images = runs[0][0], ", ".join(subject.image for subject in runs[0])
    seeds = (
        f" The cells and lines are means over these {len(runs)} runs, which differ in their seeds, and the bands reach "
        "from the least to the most. Head 1 of a run is not head 1 of another, so heads are ranked by σ in every "
        "layer: rank 1 is the narrowest."
    )
    return (
        f"{'; '.join(run[0].about for run in runs)}.{seeds if len(runs) > 1 else ''} Left: σ, from {least:.3f} to "
        f"{most:.3f}, which started at {initial:.3f}. Right: σ over the median distance of two tokens' features in "
        "that layer and head, and effective tokens, exp(entropy of a row of W), the mean over rows; "
        f"{first.tokens.count} is a uniform W, 1 the identity. These two depend on the image: the mean over {images}. "
        "σ alone cannot be compared across layers."
    )


def _cell(value: np.floating) -> float | None:
    """A number for a table; None where there is nothing to measure."""
    return None if np.isnan(value) else float(value)
