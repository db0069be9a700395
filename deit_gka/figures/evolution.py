"""How W changes over depth: the mean over heads, its CLS row, and that over the image (paper, supplement)."""

from collections.abc import Sequence
from pathlib import Path

import torch

from deit_gka.figures.groups import by_image
from deit_gka.figures.matrices import matrix_picture, off_diagonal
from deit_gka.figures.measures import diagonal_mass, effective_tokens
from deit_gka.figures.sheet import (
    Subject,
    bare,
    coloured,
    label_layers,
    linear,
    logarithmic,
    overlay,
    save,
    scale,
    sheet,
)
from trainkit.plots import Figure


def draw_evolution(subjects: Sequence[Subject], folder: Path) -> list[Figure]:
    """Draw a sheet for every image: layers across; down, W, its CLS row, and that row over the image."""
    return [_draw_sheet(models[0], models[0].file(folder, "evolution")) for models in by_image(subjects)]


def _draw_sheet(subject: Subject, path: Path) -> Figure:
    tokens, depth = subject.tokens, len(subject.layers)
    means = torch.stack([layer.weights.mean(0) for layer in subject.layers])
    maps = tokens.patches(tokens.read(means))
    off, norm = logarithmic(off_diagonal(means), decades=3), linear(maps)
    caption = subject.caption(
        "The mean over heads of W (above; its diagonal grey, its mass and the effective tokens, exp(entropy), below "
        f"it), its {tokens.reader} over the patches, and the same over the image. One scale for a row of pictures: "
        "logarithmic for W, linear for the others. σ: the mean over heads, where a layer has it. The paper turns this "
        "sheet by 90 degrees: a row for every layer."
    )
    title = "Kernel evolution over depth"
    figure, axes = sheet(3, depth, (1.45, 1.45), title, caption, margins=(0.55, 0.8, 0.75, 0.1), gaps=(0.08, 0.42))
    bare(axes, fontsize=7)
    for axis in axes.flat:
        axis.set_anchor("N")
    label_layers(axes, subject)
    rows = []
    for column, layer, mean, patches in zip(axes.T, subject.layers, means, maps):
        column[0].imshow(matrix_picture(mean, off, tokens.prefix), interpolation="none")
        column[1].imshow(coloured(patches, norm), interpolation="none")
        column[2].imshow(overlay(subject.pixels, patches, norm))
        sigma = None if layer.sigma is None else float(layer.sigma.mean())
        mass, effective = float(diagonal_mass(mean)), float(effective_tokens(layer.weights).mean())
        rows.append({"layer": len(rows) + 1, "sigma": sigma, "diagonal mass": mass, "effective tokens": effective})
        words = "" if sigma is None else f"\nσ {sigma:.2f}"
        column[0].set_xlabel(f"diagonal {mass:.3f}{words}, eff. {effective:.0f}", labelpad=2)
    for axis, name in zip(axes[:, 0], ("W", "CLS row" if tokens.has_class else "mean row", "over the image")):
        axis.set_ylabel(name, fontsize=9)
    for axis, chosen in zip(axes[:2, -1], (off, norm)):
        scale(figure, chosen, axis, (1.06, 0, 0.06, 1))
    return Figure(save(figure, path), title, caption, rows)
