"""Numbers of heads over depth: the learned bandwidths and how wide they are (paper, supplement), and how far patches
look."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from deit_gka.figures.maps import attended_distances
from deit_gka.figures.sheet import grouped
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.charts import heat_map, lines
from trainkit_gka.figures.measures import by_head, effective_tokens
from trainkit_gka.figures.sheet import legend_beside, plain, sheet
from trainkit_gka.plots import BLACK, Figure


def numbers_of(subjects: Sequence[ImageSubject], ranked: bool) -> np.ndarray:
    """σ, σ over the median distance and effective tokens of a model, means over images: (3, L, H).

    ranked: heads are sorted by σ in every layer, by effective tokens in layers without σ.
    """
    relative = np.mean([subject.sigmas / subject.median_distances for subject in subjects], axis=0)
    widths = [by_head([effective_tokens(s.weights) for s in each.layers], each.num_heads) for each in subjects]
    numbers = np.stack([subjects[0].sigmas, relative, np.mean(widths, axis=0)])
    if not ranked:
        return numbers
    order = np.where(np.isnan(numbers[0]), numbers[2], numbers[0]).argsort(axis=-1, kind="stable")
    return np.take_along_axis(numbers, order[None], axis=-1)


def draw_bandwidths(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw σ as the paper does (heat map, lines over depth), then σ over the median distance and effective tokens.

    Of the first model, the mean over images; with runs that repeat it, the mean and the range over the runs.
    """
    about = subjects[0].about
    runs = grouped([subject for subject in subjects if about in (subject.about, subject.repeats)], "about")
    first = runs[0][0]
    several = len(runs) > 1
    every = np.stack([numbers_of(run, ranked=several) for run in runs])
    (sigma, relative, effective), low, high = every.mean(0), every.min(0), every.max(0)
    spread = [(low[i], high[i]) if several else None for i in (0, 2)]
    name = "rank" if several else "head"
    count = first.tokens.count
    depth = len(first.layers)
    starts = list(dict.fromkeys(layer.initial_sigma for layer in first.layers if layer.sigma is not None))
    seeds = (
        f" The cells and lines are means over these {len(runs)} runs, which differ in their seeds, and the bands reach "
        "from the least to the most. Head 1 of a run is not head 1 of another, so heads are ranked by σ in every "
        "layer: rank 1 is the narrowest."
    )
    text = (
        f"{'; '.join(run[0].about for run in runs)}.{seeds if several else ''} Left: σ, from {np.nanmin(low[0]):.3f} "
        f"to {np.nanmax(high[0]):.3f}, which started at {starts[0]:.3f}. Right: σ over the median distance of two "
        "tokens' features in that layer and head, and effective tokens, exp(entropy of a row of W), the mean over "
        f"rows; {count} is a uniform W, 1 the identity. These two depend on the image: the mean over "
        f"{', '.join(subject.image for subject in runs[0])}. σ alone cannot be compared across layers."
    )
    cell = (max(5.2, 0.48 * depth), max(2.3, 0.25 * first.num_heads))
    save, axes = sheet(2, 2, cell, "Learned bandwidths", text, margins=(0.7, 0.9, 0.75, 0.5), gaps=(1.95, 0.85))
    heat_map(axes[0, 0], sigma, "(a) σ")
    heat_map(axes[0, 1], relative, "(b) σ / median distance")
    lines(axes[1, 0], sigma, "(c) σ over depth", "σ", spread[0], name)
    if len(starts) == 1:
        axes[1, 0].axhline(starts[0], color=BLACK, linestyle="--", linewidth=1, label=f"initial, {starts[0]:.2f}")
    lines(axes[1, 1], effective, "(d) effective tokens over depth", f"effective tokens of {count}", spread[1], name)
    for above, below in axes.T:
        above.set_ylabel(name)
        legend_beside(below)
    values = {"sigma": sigma, "sigma / median distance": relative, "effective tokens": effective}
    values |= {"least sigma": low[0], "largest sigma": high[0]} if several else {}
    rows = [
        {
            "layer": layer + 1,
            name: head + 1,
            **{key: None if np.isnan(of[layer, head]) else float(of[layer, head]) for key, of in values.items()},
        }
        for layer, head in np.ndindex(sigma.shape)
    ]
    return [save(folder / "sigma.png", rows)]


def draw_distances(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw the mean attended distance in pixels over depth, a line for every head, a panel for every model."""
    models = grouped([subject for subject in subjects if not subject.repeats], "about")
    first = models[0][0]
    images = ", ".join(subject.image for subject in models[0])
    uniform = [float(subject.tokens.distances().mean()) for subject, *_ in models]
    text = (
        f"{'; '.join(subject.about for subject, *_ in models)}. Mean distance between a patch and the patches it "
        "attends to, weighted by W among the patches, in pixels of the model's "
        f"{' × '.join(map(str, first.pixels.shape[:2]))}; mean over patches and over {images}. Dashed: uniform "
        f"attention, {uniform[0]:.1f}. Dotted: one patch, {first.tokens.patch[1]}."
    )
    width = 7 if len(models) == 1 else 4
    save, axes = sheet(1, len(models), (width, 3.2), "Mean attended distance", text, (0.8, 1.5, 0.75, 0.6), (0.5, 0.06))
    rows, top = [], 0.0
    for axis, of_model, expected in zip(axes[0], models, uniform):
        subject = of_model[0]
        means = [[attended_distances(layer.weights, one.tokens).mean(-1) for layer in one.layers] for one in of_model]
        distances = torch.stack([torch.stack(layers) for layers in means]).mean(0)  # over images, (L, H)
        top = max(top, 1.05 * expected, 1.05 * float(distances.max()))
        lines(axis, distances.numpy(), plain(subject.model) if len(models) > 1 else "", "")
        axis.axhline(expected, color=BLACK, linestyle="--", linewidth=1, label="uniform")
        axis.axhline(subject.tokens.patch[1], color=BLACK, linestyle=":", linewidth=1, label="one patch")
        rows += [
            {"model": subject.model, "layer": layer, "head": head, "pixels": value}
            for layer, heads in enumerate(distances.tolist(), start=1)
            for head, value in enumerate(heads, start=1)
        ]
    for axis in axes[0]:
        axis.set_ylim(0, top)
    axes[0, 0].set_ylabel("pixels")
    legend_beside(axes[0, -1], like=max(axes[0], key=lambda axis: len(axis.lines)))
    return [save(folder / "distance.png", rows)]
