"""How far patches look in every layer: a curve for every head, models side by side."""

from collections.abc import Sequence
from pathlib import Path

import torch

from deit_gka.figures.measures import attended_distance
from deit_gka.figures.sheet import by_model
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.charts import lines
from trainkit_gka.figures.sheet import legend_beside, plain, save, sheet
from trainkit_gka.plots import BLACK, Figure


def draw_distances(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw the mean attended distance in pixels over depth, a line for every head, a panel for every model."""
    models = by_model(subjects)
    first, images = models[0][0], ", ".join(subject.image for subject in models[0])
    abouts = "; ".join(each[0].about for each in models)
    side = " × ".join(map(str, first.pixels.shape[:2]))
    text = (
        f"{abouts}. Mean distance between a patch and the patches it attends to, weighted by W among the patches, in "
        f"pixels of the model's {side}; mean over patches and over {images}. Dashed: uniform attention, "
        f"{_uniform(first):.1f}. Dotted: one patch, {first.tokens.patch[1]}."
    )
    title, width = "Mean attended distance", 7 if len(models) == 1 else 4
    figure, axes = sheet(1, len(models), (width, 3.2), title, text, (0.8, 1.5, 0.75, 0.6), (0.5, 0.06))
    rows, top = [], 0.0
    for axis, of_model in zip(axes[0], models):
        subject, distances = of_model[0], mean_distances(of_model)
        top = max(top, 1.05 * _uniform(subject), 1.05 * float(distances.max()))
        lines(axis, distances.numpy(), plain(subject.model) if len(models) > 1 else "", "")
        axis.axhline(_uniform(subject), color=BLACK, linestyle="--", linewidth=1, label="uniform")
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
    return [Figure(save(figure, folder / "distance.png"), title, text, rows)]


def mean_distances(subjects: Sequence[ImageSubject]) -> torch.Tensor:
    """Mean attended distance of one model, the mean over images, in pixels: (L, H)."""
    each = [torch.stack([attended_distance(layer.weights, s.tokens) for layer in s.layers]) for s in subjects]
    return torch.stack(each).mean(0)


def _uniform(subject: ImageSubject) -> float:
    return float(subject.tokens.distances().mean())
