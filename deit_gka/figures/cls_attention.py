"""Where a ViT looks: the attention matrices of every layer by hooks, and the CLS token's map over the patches (paper, supplement)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from deit_gka.model.attention import TimmAttention
from trainkit.plots import save, subplots

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def _weights(attention: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """W, (B, H, N, N), of one attention layer for its input, recomputed; for ours and for timm's softmax attention."""
    if isinstance(attention, TimmAttention):
        return attention.weights(x, x.unflatten(-1, (attention.num_heads, -1)), None, False)
    queries, keys, _ = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
    queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    return (torch.einsum("bihd,bjhd->bhij", queries, keys) * attention.scale).softmax(dim=-1)


@torch.inference_mode()
def attention_maps(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """The row-stochastic W of every layer, (B, H, N, N) each, from a single forward pass of normalised images (B, 3, S, S)."""
    maps: list[torch.Tensor] = []

    def keep(attention, args, kwargs):
        maps.append(_weights(attention, args[0]).float().cpu())

    hooks = [block.attn.register_forward_pre_hook(keep, with_kwargs=True) for block in model.blocks]
    try:
        model.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
    return maps


def cls_map(weights: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """What the CLS token sees of the patches: (B, H, N, N) -> (B, H, *grid), by the paper's CLS-to-patch equation."""
    return weights[:, :, 0, -grid[0] * grid[1] :].unflatten(-1, grid)


def to_pixels(maps: torch.Tensor, size: int) -> torch.Tensor:
    """Maps (B, H, *grid) at (B, H, size, size): bicubic, and clamped at 0, below which bicubic overshoots.

    The paper's supplement says bilinear in one section and bicubic in another.
    """
    return nn.functional.interpolate(maps, size=(size, size), mode="bicubic", align_corners=False).clamp(min=0)


def draw_cls_attention(
    rows: dict[str, nn.Module], images: torch.Tensor, path: Path, layer: int = -1, titles: Sequence[str] = ()
) -> Path:
    """A picture: the images on top, then a row for every model with its heads' mean CLS attention of `layer` laid over them.

    images: normalised, (B, 3, S, S). Colour map inferno, alpha 0.6, as in the paper's supplement.
    """
    size = images.shape[-1]
    pixels = (images.movedim(1, -1) * STD + MEAN).clamp(0, 1)
    figure, axes = subplots(
        1 + len(rows), len(images), figsize=(1.4 * len(images), 1.5 * (1 + len(rows))), squeeze=False
    )
    for column, pixel in enumerate(pixels):
        axes[0][column].imshow(pixel)
        if column < len(titles):
            axes[0][column].set_title(titles[column], fontsize=9)
    for row, (label, model) in enumerate(rows.items(), start=1):
        seen = cls_map(attention_maps(model, images)[layer], model.patch_embed.grid_size).mean(1, keepdim=True)
        seen = to_pixels(seen, size)
        for column, pixel in enumerate(pixels):
            axes[row][column].imshow(pixel)
            axes[row][column].imshow(seen[column, 0], cmap="inferno", alpha=0.6)
        axes[row][0].set_ylabel(label, fontsize=9)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    return save(figure, path, dpi=140)
