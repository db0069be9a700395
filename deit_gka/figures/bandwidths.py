"""The learned bandwidths: σ by head and layer, and beside it what says whether a σ is narrow or wide (paper,
supplement)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deit_gka.figures.groups import by_model
from deit_gka.figures.measures import effective_tokens, median_distance
from deit_gka.figures.sheet import Subject, save, sheet
from trainkit.figures.charts import heat_map, lines
from trainkit.plots import Figure


def relative_bandwidths(subject: Subject) -> np.ndarray:
    """σ over the median distance of two tokens of that layer and head, (L, H); NaN in layers without σ."""
    missing = np.full(subject.num_heads, np.nan)
    return np.stack(
        [
            missing if layer.sigma is None else (layer.sigma / median_distance(layer.features)).numpy()
            for layer in subject.layers
        ]
    )


def widths(subject: Subject) -> np.ndarray:
    """Effective tokens of every layer and head, (L, H), whatever the kind."""
    return np.stack([effective_tokens(layer.weights).numpy() for layer in subject.layers])


def draw_bandwidths(subjects: Sequence[Subject], folder: Path) -> list[Figure]:
    """Draw σ as the paper does (heat map, lines over depth), then σ over the median distance and effective tokens.

    subjects: of the first model, the means over images are drawn.
    """
    subjects = by_model(subjects)[0]
    first, images = subjects[0], ", ".join(subject.image for subject in subjects)
    sigma, count = first.sigmas, first.tokens.count
    relative = np.mean([relative_bandwidths(subject) for subject in subjects], axis=0)
    effective = np.mean([widths(subject) for subject in subjects], axis=0)
    initial = next(layer.initial_sigma for layer in first.layers if layer.sigma is not None)
    same = {layer.initial_sigma for layer in first.layers if layer.sigma is not None} == {initial}
    caption = (
        f"{first.about}. Left: σ, from {np.nanmin(sigma):.3f} to {np.nanmax(sigma):.3f}, which started at "
        f"{initial:.3f}. Right: σ over the median distance of two tokens' features in that layer and head, and "
        f"effective tokens, exp(entropy of a row of W), the mean over rows; {count} is a uniform W, 1 the identity. "
        f"These two depend on the image: the mean over {images}. σ alone cannot be compared across layers."
    )
    heads, depth = first.num_heads, len(first.layers)
    title = "Learned bandwidths"
    figure, axes = sheet(
        2, 2, (max(5.2, 0.48 * depth), max(2.3, 0.25 * heads)), title, caption,
        margins=(0.7, 0.9, 0.75, 0.5), gaps=(1.95, 0.85),
    )  # fmt: skip
    heat_map(figure, axes[0, 0], sigma, "(a) σ")
    heat_map(figure, axes[0, 1], relative, "(c) σ / median distance")
    lines(axes[1, 0], sigma, "(b) σ over depth", "σ")
    if same:
        axes[1, 0].axhline(initial, color="black", linestyle="--", linewidth=1, label=f"initial, {initial:.2f}")
    lines(axes[1, 1], effective, "(d) effective tokens over depth", f"effective tokens of {count}")
    for axis in axes[1]:
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    rows = [
        {"layer": layer + 1, "head": head + 1, "sigma": number(sigma[layer, head]),
         "sigma / median distance": number(relative[layer, head]), "effective tokens": number(effective[layer, head])}
        for layer, head in np.ndindex(depth, heads)
    ]  # fmt: skip
    return [Figure(save(figure, folder / "sigma.png"), title, caption, rows)]


def number(value: np.floating) -> float | None:
    """A cell of a table; None where there is nothing to measure."""
    return None if np.isnan(value) else float(value)
