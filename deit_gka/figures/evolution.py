"""How W changes over depth: the mean over heads, and its CLS row beside the image (paper, supplement)."""

from collections.abc import Sequence
from pathlib import Path

import torch

from deit_gka.figures.matrices import matrix_picture, off_diagonal
from deit_gka.figures.sheet import by_image, caption, draw_sheet
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.measures import diagonal_mass, effective_tokens
from trainkit_gka.figures.sheet import coloured, from_zero, logarithmic, scale
from trainkit_gka.plots import Figure


def draw_evolution(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw a sheet for every image: layers across; down, W and its CLS row; the image once; by model."""
    layout = dict(cell=(1.45, 1.45), margins=(0.55, 0.8, 0.75, 0.1), gaps=(0.08, 0.42), fontsize=7, image=1)
    figures = []
    for models in by_image(subjects):
        text = caption(
            models,
            "The mean over heads of W (above; its diagonal grey, its mass and the effective tokens, exp(entropy), "
            f"below it), and its {models[0].tokens.reader} over the patches. One scale for a row of pictures: "
            "logarithmic for W, linear from 0 below. σ: the mean over heads, where a layer has it. The paper turns "
            "this sheet by 90 degrees: a row for every layer.",
        )
        path, rows = models[0].file(folder, "evolution"), [2] * len(models)
        figures.append(draw_sheet(models, path, "Kernel evolution over depth", text, rows, draw=_draw_block, **layout))
    return figures


def _draw_block(figure, axes, subject: ImageSubject) -> list[dict]:
    """Draw a model's layers. Returns their numbers."""
    tokens, rows = subject.tokens, []
    means = torch.stack([layer.weights.mean(0) for layer in subject.layers])
    maps = tokens.patches(tokens.read(means))
    off, norm = logarithmic(off_diagonal(means), decades=3), from_zero(maps)
    for axis in axes.flat:
        axis.set_anchor("N")
    for number, (column, layer, mean, patches) in enumerate(zip(axes.T, subject.layers, means, maps), start=1):
        column[0].imshow(matrix_picture(mean, off, tokens.prefix), interpolation="none")
        column[1].imshow(coloured(patches, norm), interpolation="none")
        sigma = None if layer.sigma is None else float(layer.sigma.mean())
        mass, effective = float(diagonal_mass(mean)), float(effective_tokens(layer.weights).mean())
        words = "" if sigma is None else f"\nσ {sigma:.2f}"
        column[0].set_xlabel(f"diagonal {mass:.3f}{words}, eff. {effective:.0f}", labelpad=2)
        numbers = {"sigma": sigma, "diagonal mass": mass, "effective tokens": effective}
        rows.append({"model": subject.model, "layer": number, **numbers})
    for axis, name in zip(axes[:, 0], ("W", "CLS row" if tokens.has_class else "mean row")):
        axis.set_ylabel(name, fontsize=9)
    for axis, chosen in zip(axes[:, -1], (off, norm)):
        scale(figure, chosen, axis, (1.06, 0, 0.06, 1))
    return rows
