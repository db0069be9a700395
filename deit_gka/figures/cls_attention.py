"""What the CLS token looks at: its row of W over the patches, laid over the image (paper, supplement)."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from deit_gka.figures.groups import blocks, by_image, caption
from deit_gka.figures.maps import attention_maps
from deit_gka.figures.measures import diagonal_mass, entropy
from deit_gka.figures.sheet import Subject, cell_size, linear, overlay, save, scale_below, to_pixels
from trainkit_gka import plots
from trainkit_gka.plots import Figure


def draw_cls_attention(
    models: dict[str, nn.Module], images: torch.Tensor, path: Path, layer: int = -1, titles: Sequence[str] = ()
) -> Path:
    """Draw the images, and below them a row for every model with the mean over heads of CLS attention in `layer`.

    models: by the label of their row. images: normalised, (B, 3, S, S). titles: of the columns. Colour map inferno and
    alpha 0.6 are those of the paper's supplement. Returns the path.
    """
    mean, std = torch.tensor(IMAGENET_DEFAULT_MEAN), torch.tensor(IMAGENET_DEFAULT_STD)
    pixels = (images.movedim(1, -1) * std + mean).clamp(0, 1)
    rows, columns = 1 + len(models), len(images)
    figure, axes = plots.subplots(rows, columns, figsize=(1.4 * columns, 1.5 * rows), squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for row in axes:
        for axis, pixel in zip(row, pixels):
            axis.imshow(pixel)
    for axis, title in zip(axes[0], titles):
        axis.set_title(title, fontsize=9)
    for row, (label, model) in zip(axes[1:], models.items()):
        patches = cls_map(attention_maps(model, images)[layer].weights, model.patch_embed.grid_size)
        row[0].set_ylabel(label, fontsize=9)
        for axis, shown in zip(row, to_pixels(patches.mean(1, keepdim=True), images.shape[-1])):
            axis.imshow(shown[0], cmap="inferno", alpha=0.6)
    return plots.save(figure, path, dpi=140)


def cls_map(weights: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """The CLS token's weights of the patches: (B, H, N, N) -> (B, H, *grid), by the paper's CLS-to-patch equation."""
    return weights[:, :, 0, -grid[0] * grid[1] :].unflatten(-1, grid)


def draw_cls_maps(subjects: Sequence[Subject], folder: Path) -> list[Figure]:
    """Draw a contact sheet for every image: layers across, heads down, one scale for a layer; models one by one."""
    return [_draw_sheet(models, models[0].file(folder, "cls_maps")) for models in by_image(subjects)]


def _draw_sheet(models: Sequence[Subject], path: Path) -> Figure:
    first = models[0].tokens
    text = caption(
        models,
        f"{first.reader[0].upper()}{first.reader[1:]} of W over the patches, of every head, on one scale for a "
        "layer (the bar below it), bicubic, clamped. Below a map: the weight that "
        f"{'the class token gives itself' if first.has_class else 'patches give themselves, the mean'}, and the "
        f"entropy of the row in nats (uniform: {math.log(first.count):.2f}).",
    )
    title = f"{'CLS' if first.has_class else 'Mean'} attention by layer and head"
    heads, size = [subject.num_heads for subject in models], cell_size(models[0], 1.3)
    figure, parts = blocks(models, heads, size, title, text, (0.5, 0.3, 0.75, 0.52), (0.1, 0.22), fontsize=7)
    rows = [row for subject, axes in zip(models, parts) for row in _draw_block(figure, axes, subject, size[1])]
    return Figure(save(figure, path), title, text, rows)


def _draw_block(figure, axes, subject: Subject, inches: float) -> list[dict]:
    """Draw a model's maps, `inches` high. Returns their numbers."""
    tokens, table = subject.tokens, []
    for number, (column, layer) in enumerate(zip(axes.T, subject.layers), start=1):
        rows = tokens.read(layer.weights)
        maps = tokens.patches(rows)
        norm = linear(maps)
        own = rows[:, 0] if tokens.has_class else diagonal_mass(layer.weights[:, tokens.prefix :, tokens.prefix :])
        numbers = zip(own.tolist(), entropy(rows).tolist())
        for head, (axis, patches, (self_weight, nats)) in enumerate(zip(column, maps, numbers), start=1):
            axis.imshow(overlay(subject.pixels, patches, norm))
            axis.set_xlabel(f"self {self_weight:.3f}, {nats:.2f} nats", labelpad=2)
            place = {"model": subject.model, "layer": number, "head": head}
            table.append({**place, "self-weight": self_weight, "entropy (nats)": nats})
        scale_below(figure, norm, column[-1], inches, gap=0.26)
    for head, axis in enumerate(axes[:, 0], start=1):
        axis.set_ylabel(f"head {head}", fontsize=9)
    return table
