"""Attention of the CLS token: its row of W over the patches, beside the image (paper, supplement)."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.cm import ScalarMappable
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from deit_gka.figures.maps import attention_maps
from deit_gka.figures.sheet import by_image, caption, cell_size, draw_sheet, label_heads, smooth_map
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka import plots
from trainkit_gka.figures.measures import diagonal_mass, entropy
from trainkit_gka.figures.sheet import CMAP, bare, from_zero, scale_below
from trainkit_gka.plots import Figure


def draw_cls_attention(
    models: dict[str, nn.Module], images: torch.Tensor, path: Path, layer: int = -1, titles: Sequence[str] = ()
) -> Path:
    """Draw the images, and below them a row for every model with the mean over heads of CLS attention in `layer`.

    models: by the label of their row. images: normalised, (B, 3, S, S). titles: of the columns. The colour map is that
    of the paper's supplement, on one scale for all maps. Returns the path.
    """
    mean, std = torch.tensor(IMAGENET_DEFAULT_MEAN), torch.tensor(IMAGENET_DEFAULT_STD)
    pixels = (images.movedim(1, -1) * std + mean).clamp(0, 1)
    maps = {
        label: cls_map(attention_maps(model, images)[layer].weights, model.patch_embed.grid_size).mean(1)
        for label, model in models.items()
    }
    norm = from_zero(torch.cat([*maps.values()]))
    rows, columns = 1 + len(models), len(images)
    figure, axes = plots.subplots(rows, columns, figsize=(0.6 + 1.1 * columns, 1.2 * rows), squeeze=False)
    figure.set_layout_engine("constrained")
    bare(axes)
    pictures = [pixels, *([smooth_map(one, norm, images.shape[-2:]) for one in of_model] for of_model in maps.values())]
    for row, label, of_row in zip(axes, ("image", *maps), pictures):
        row[0].set_ylabel(label, fontsize=9)
        for axis, picture in zip(row, of_row):
            axis.imshow(picture, interpolation="none")
    for axis, title in zip(axes[0], titles):
        axis.set_title(title, fontsize=9)
    bar = figure.colorbar(ScalarMappable(norm, CMAP), ax=axes[1:], fraction=0.02, pad=0.01)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path, dpi=140)
    return path


def cls_map(weights: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """The CLS token's weights of the patches: (B, H, N, N) -> (B, H, *grid), by the paper's CLS-to-patch equation."""
    return weights[:, :, 0, -grid[0] * grid[1] :].unflatten(-1, grid)


def draw_cls_maps(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw a contact sheet for every image: layers across, heads down, one scale for a layer; models one by one."""
    return [_draw_sheet(models, models[0].file(folder, "cls_maps")) for models in by_image(subjects)]


def _draw_sheet(models: Sequence[ImageSubject], path: Path) -> Figure:
    first = models[0].tokens
    text = caption(
        models,
        f"{first.reader[0].upper()}{first.reader[1:]} of W over the patches, of every head, on one scale for a "
        "layer (the bar below it), bicubic. Below a map: the weight that "
        f"{'the class token gives itself' if first.has_class else 'patches give themselves, the mean'}, and the "
        f"entropy of the row in nats (uniform: {math.log(first.count):.2f}).",
    )
    title = f"{'CLS' if first.has_class else 'Mean'} attention by layer and head"
    rows, cell = [subject.num_heads for subject in models], cell_size(models[0], 1.3)
    layout = dict(margins=(0.5, 0.3, 0.75, 0.52), gaps=(0.1, 0.22), fontsize=7, image=0)
    return draw_sheet(models, path, title, text, rows, cell, draw=partial(_draw_block, cell[1]), **layout)


def _draw_block(inches: float, figure, axes, subject: ImageSubject) -> list[dict]:
    """Draw a model's maps, `inches` high. Returns their numbers."""
    tokens, table = subject.tokens, []
    for number, (column, layer) in enumerate(zip(axes.T, subject.layers), start=1):
        rows = tokens.read(layer.weights)
        maps = tokens.patches(rows)
        norm = from_zero(maps)
        itself = rows[:, 0] if tokens.has_class else diagonal_mass(layer.weights[:, tokens.prefix :, tokens.prefix :])
        numbers = zip(itself.tolist(), entropy(rows).tolist())
        for head, (axis, patches, (self_weight, nats)) in enumerate(zip(column, maps, numbers), start=1):
            axis.imshow(smooth_map(patches, norm, subject.pixels.shape[:2]), interpolation="none")
            axis.set_xlabel(f"self {self_weight:.3f}, {nats:.2f} nats", labelpad=2)
            place = {"model": subject.model, "layer": number, "head": head}
            table.append({**place, "self-weight": self_weight, "entropy (nats)": nats})
        scale_below(figure, norm, column[-1], inches, gap=0.26)
    label_heads(axes)
    return table
