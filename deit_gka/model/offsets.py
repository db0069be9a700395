"""Spatial offsets (gka/offsets.py) in timm's models, which know the grid of their patches."""

import torch
from timm.layers import PatchEmbed
from timm.models import VisionTransformer
from torch import nn

from gka.offsets import neighbours, spatial_pattern


class SpatialOffsets(nn.Module):
    """Values, (B, N, H, D), to those that the tokens of a layer hold. `place_offsets` must have told it the grid.

    pattern: of `gka.offsets.NEIGHBOURS`, a letter for each head, tiled; ValueError for others, and for more than heads.
    """

    def __init__(self, pattern: str, num_heads: int):
        super().__init__()
        self.pattern = spatial_pattern(pattern, num_heads)
        self.patches: tuple[PatchEmbed, ...] = ()  # of the model; in a tuple, so that it is not a module of this one
        self.prefix = 0  # tokens before the patches

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.patches:
            raise ValueError(
                "spatial_offsets are for the deit_*_gka and deit_*_vlt models, which know the patches' grid"
            )
        return neighbours(values, self.pattern, self.patches[0].grid_size, self.prefix)


torch.fx.wrap("neighbours")  # one node: torch.fx cannot record what is written into a tensor


class ValueOffsetProjection(nn.Linear):
    """W_Q, W_K and W_V in one, as timm's attention has them, with spatial offsets of the values."""

    def __init__(self, dim: int, bias: bool, offsets: SpatialOffsets, num_heads: int, **placed):
        super().__init__(dim, 3 * dim, bias=bias, **placed)
        self.offsets, self.num_heads = offsets, num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries_and_keys, values = super().forward(x).split((2 * self.in_features, self.in_features), dim=-1)
        moved = self.offsets(values.unflatten(-1, (self.num_heads, -1))).flatten(2)
        return torch.cat([queries_and_keys, moved], dim=-1)


def place_offsets(model: nn.Module) -> None:
    """Tell all spatial offsets in `model` the grid of its patches.

    Raises ValueError if that changes from image to image, or if patches are dropped.
    """
    for vit in model.modules():
        offsets = [module for module in vit.modules() if isinstance(module, SpatialOffsets)]
        if not offsets or not isinstance(vit, VisionTransformer):
            continue
        if not (vit.patch_embed.strict_img_size and isinstance(vit.patch_drop, nn.Identity)):
            advice = "leave dynamic_img_size, strict_img_size and patch_drop_rate as they are"
            raise ValueError(f"spatial_offsets need all patches of one grid: {advice}")
        for module in offsets:
            module.patches, module.prefix = (vit.patch_embed,), vit.num_prefix_tokens
