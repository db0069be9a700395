"""Spatial head offsets: on some heads a token's value is that of a neighbouring patch; keys and queries stay.

The vision twin of the language models' head offsets (gka/offsets.py): no parameter, no FLOP. In an operator without
projections a head can only say "tokens like me"; with offsets it says "what stands left of tokens like me". A letter
per head, cycling:

    N  the patch itself      L  left of it      R  right of it      U  above it      B  below it
    D  diagonally, above and left of it

A patch without that neighbour, at the border, keeps its own value; so do class, distillation and register tokens.
"""

import torch
from timm.layers import PatchEmbed
from timm.models import VisionTransformer
from torch import nn

NEIGHBOURS = {"N": (0, 0), "L": (0, -1), "R": (0, 1), "U": (-1, 0), "B": (1, 0), "D": (-1, -1)}  # rows, columns


class SpatialOffsets(nn.Module):
    """Values, (B, N, H, D), to those that the tokens of a layer hold. `place_offsets` must have told it the grid.

    pattern: letters of NEIGHBOURS, upper or lower case, one for each head, tiled. Raises ValueError for others, and for
    more letters than heads.
    """

    def __init__(self, pattern: str, num_heads: int):
        super().__init__()
        self.pattern = str(pattern).upper()
        if not self.pattern or set(self.pattern) - NEIGHBOURS.keys():
            letters = ", ".join(NEIGHBOURS)
            raise ValueError(f"spatial_offsets must be letters of {letters}, one for each head, got {pattern!r}")
        if (count := len(self.pattern)) > num_heads:
            raise ValueError(f"spatial_offsets {pattern} has {count} letters but there are {num_heads} heads")
        self.patches: tuple[PatchEmbed, ...] = ()  # of the model; in a tuple, so that it is not a module of this one
        self.prefix = 0  # tokens before the patches

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        grid = self.patches[0].grid_size if self.patches else None
        return neighbours(values, self.pattern, grid, self.prefix)


def neighbours(values: torch.Tensor, pattern: str, grid: tuple[int, int] | None, prefix: int) -> torch.Tensor:
    """The values that tokens hold, of `prefix` tokens and then a grid of patches; see `SpatialOffsets`."""
    if grid is None:
        raise ValueError("spatial_offsets are for the deit_*_gka and deit_*_vlt models, which know the patches' grid")
    rows, columns = grid
    if values.shape[1] != prefix + rows * columns:
        expected = f"{prefix} tokens and {rows} x {columns} patches"
        raise ValueError(f"spatial_offsets need {expected}, got {values.shape[1]} tokens; img_size sets the grid")
    moved = values.clone()
    here, there = (tokens[:, prefix:].unflatten(1, (rows, columns)) for tokens in (moved, values))

    def side(step: int, size: int) -> slice:
        """The places that are left when `step` are taken off the front, or -step off the end."""
        return slice(max(0, step), size + min(0, step))

    for place, letter in enumerate(pattern):
        down, right = NEIGHBOURS[letter]
        if down or right:
            heads = slice(place, None, len(pattern))
            source = there[:, side(down, rows), side(right, columns), heads]
            here[:, side(-down, rows), side(-right, columns), heads] = source
    return moved


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
