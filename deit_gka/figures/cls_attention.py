"""What the CLS token looks at: its row of W over the patches, laid over the image (paper, supplement)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from deit_gka.figures.maps import attention_maps
from trainkit.plots import save, subplots


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
    figure, axes = subplots(rows, columns, figsize=(1.4 * columns, 1.5 * rows), squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for row in axes:
        for axis, pixel in zip(row, pixels):
            axis.imshow(pixel)
    for axis, title in zip(axes[0], titles):
        axis.set_title(title, fontsize=9)
    for row, (label, model) in zip(axes[1:], models.items()):
        patches = cls_map(attention_maps(model, images)[layer], model.patch_embed.grid_size)
        row[0].set_ylabel(label, fontsize=9)
        for axis, overlay in zip(row, to_pixels(patches.mean(1, keepdim=True), images.shape[-1])):
            axis.imshow(overlay[0], cmap="inferno", alpha=0.6)
    return save(figure, path, dpi=140)


def cls_map(weights: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """The CLS token's weights of the patches: (B, H, N, N) -> (B, H, *grid), by the paper's CLS-to-patch equation."""
    return weights[:, :, 0, -grid[0] * grid[1] :].unflatten(-1, grid)


def to_pixels(maps: torch.Tensor, size: int) -> torch.Tensor:
    """Maps (B, H, *grid) at (B, H, size, size): bicubic, and clamped at 0, below which bicubic overshoots.

    The paper's supplement says bilinear in one section and bicubic in another.
    """
    return nn.functional.interpolate(maps, size=(size, size), mode="bicubic", align_corners=False).clamp(min=0)
