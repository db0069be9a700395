"""Parts of a block: norm, linear maps, rotary embedding, MLP.

Legend: B batch, T tokens, H heads, D head_dim, C width.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from gka.parts import rotary_tables, rotate

ROTARY_OVERALLOCATION = 10  # positions beyond sequence_len that evaluation may use, as in nanochat


def norm(x: torch.Tensor) -> torch.Tensor:
    """RMS norm over the last axis, without weights, in x.dtype."""
    return F.rms_norm(x, (x.shape[-1],))


class Linear(nn.Linear):
    """A bias-free linear map whose float32 weight is cast to the activations' dtype: bf16 without autocast."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def fill_uniform(weight: torch.Tensor, width: int) -> None:
    """Uniform with standard deviation 1 / sqrt(width)."""
    bound = math.sqrt(3.0 / width)
    nn.init.uniform_(weight, -bound, bound)


class Rotary(nn.Module):
    """Rotary position embedding on the two halves of a head.

    It turns in nanochat's direction, opposite to Llama's (`gka.parts.rotate`). The tables are bfloat16 on every device,
    as upstream's; they are buffers outside the state dict.
    """

    def __init__(self, head_dim: int, sequence_len: int):
        super().__init__()
        self.head_dim, self.length = head_dim, sequence_len * ROTARY_OVERALLOCATION
        shape = (1, self.length, 1, head_dim // 2)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(shape, dtype=torch.bfloat16), persistent=False)

    def init_weights(self) -> None:
        positions = torch.arange(self.length, dtype=torch.float32, device=self.cos.device)
        for table, exact in zip((self.cos, self.sin), rotary_tables(positions, self.head_dim)):
            table.copy_(exact[None, :, None, :])

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of every position, (length, D / 2) each."""
        return self.cos.view(self.length, -1), self.sin.view(self.length, -1)

    def forward(self, x: torch.Tensor, positions: slice | torch.Tensor) -> torch.Tensor:
        """Rotate (B, T, H, D) features at `positions`: a slice of T, or integers (B, T)."""
        return rotate(x, self.cos[0, positions], self.sin[0, positions])


class MLP(nn.Module):
    """C -> 4C -> C with relu^2."""

    def __init__(self, width: int):
        super().__init__()
        self.c_fc = Linear(width, 4 * width)
        self.c_proj = Linear(4 * width, width)

    def init_weights(self) -> None:
        fill_uniform(self.c_fc.weight, self.c_fc.in_features)
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.relu(self.c_fc(x), inplace=True).square())
