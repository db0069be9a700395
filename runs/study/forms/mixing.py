"""Other ways than head offsets for attention to meet the token before. Every one is causal. A layer has at most one,
and head offsets beside it only with value-share.

None is ours; ours is only their use in an operator without projections. Softmax attention gains from all of them too.

Pairings act on keys k and values v, one pair for each token, and give what slot j holds. For gka layers k is the
feature (rotated, then normalised per head) and v what `gka_values` says. Token 0 is its own predecessor.

    kv-shift       per head, learned: (norm(a k_j + a' k_j-1), b v_j + b' v_j-1). 4 H parameters.
                   KV shifting attention, Xu et al., ICML 2025, arXiv 2411.19574. Head offsets P and S are its cases
                   with 0 and 1.
    partial        the channels of k that are not rotated (`rotary` half) come from k_j-1: norm of that, and v_j.
                   No parameters. Partial key offset, modded-nanogpt, pull request 169.
    value-share    per channel, learned from 0: (k_j, v_j + s * v_j-1), before head offsets move them. C parameters.

Keys of mixed tokens are normalised per head again, for softmax too: the kernel keeps features of constant norm.

Blends act on the block input x, (B, T, C), before anything reads it; x_-1 is 0.

    token-shift    mu * x_j + (1 - mu) * x_j-1, learned per channel. C parameters. RWKV (arXiv 2305.13048) has a mixture
                   for each of its projections; here is one for all, since gka layers have one feature.
    canon          x_j + w_0 * x_j + ... + w_3 * x_j-3, learned per channel: a residual depthwise causal convolution.
                   4 C parameters. Canon A, Allen-Zhu, NeurIPS 2025, arXiv 2512.17351.
"""

import torch
import torch.nn.functional as F
from torch import nn

from gka.offsets import HeadOffsets
from nanochat_gka.model.blocks import norm

Tensor = torch.Tensor


class KVShift(nn.Module):
    """Learned shares, per head, of a token and its predecessor in keys and in values."""

    reach, moves_keys = 1, True
    activation_widths = 5  # predecessors of keys and values, mixed keys before and after their norm, mixed values

    def __init__(self, num_heads: int):
        super().__init__()
        self.keys = nn.Parameter(torch.empty(2, num_heads))  # the token's own share, its predecessor's
        self.values = nn.Parameter(torch.empty(2, num_heads))

    @torch.no_grad()
    def init_weights(self) -> None:
        """The token's own share uniform in [0, 1], its predecessor's the rest."""
        for shares in (self.keys, self.values):
            shares[0].uniform_()
            shares[1].copy_(1 - shares[0])

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of n slots, of those of n tokens, (B, n, H, D) each."""
        return norm(_shared(keys, self.keys)), _shared(values, self.values)


class PartialOffset(nn.Module):
    """The unrotated channels of all keys one token later."""

    reach, moves_keys = 1, True
    activation_widths = 2

    def __init__(self, head_dim: int):
        super().__init__()
        quarter = head_dim // 4  # rotary pairs a channel of the first half with one of the second
        self.unrotated = slice(quarter, 2 * quarter), slice(3 * quarter, None)

    def init_weights(self) -> None:
        """It has none."""

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `KVShift.forward`."""
        moved = keys.clone()
        for channels in self.unrotated:
            moved[:, 1:, :, channels] = keys[:, :-1, :, channels]
        return norm(moved), values


class ValueShare(nn.Module):
    """To every channel of a token's value a learned share of its predecessor's, before any head offsets."""

    def __init__(self, num_heads: int, head_dim: int, offsets: HeadOffsets | None):
        super().__init__()
        self.values = nn.Parameter(torch.empty(num_heads, head_dim))
        self.offsets = offsets
        self.reach = 1 + (offsets.reach if offsets else 0)
        self.moves_keys = offsets is not None and offsets.moves_keys
        self.activation_widths = 2 + (offsets is not None)  # predecessors, sums, and what offsets make of them

    def init_weights(self) -> None:
        """Zeros: at the start a value is the token's own."""
        nn.init.zeros_(self.values)

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `KVShift.forward`."""
        values = values + self.values.to(values.dtype) * _before(values)
        return self.offsets(keys, values) if self.offsets else (keys, values)


class TokenShift(nn.Module):
    activation_widths = 1

    def __init__(self, width: int, depth: float):
        """depth: of the layer, from 0 to 1."""
        super().__init__()
        self.depth, self.own = depth, nn.Parameter(torch.empty(width))

    @torch.no_grad()
    def init_weights(self) -> None:
        """RWKV's: from 0 to 1 over the channels, and nearer to 1 the deeper the layer."""
        width = len(self.own)
        ramp = torch.arange(width, dtype=torch.float32, device=self.own.device) / width
        self.own.copy_(ramp ** (1 - self.depth))

    def forward(self, x: Tensor) -> Tensor:
        """What the layer reads in place of x, (B, T, C)."""
        [previous] = _earlier(x, 1)
        return previous + self.own.to(x.dtype) * (x - previous)


class Canon(nn.Module):
    activation_widths = 2
    reach = 3

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1 + self.reach, width))

    def init_weights(self) -> None:
        """Zeros: at the start the layer reads x itself."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """As `TokenShift.forward`."""
        mixed = x
        for tap, tokens in zip(self.weight.to(x.dtype), (x, *_earlier(x, self.reach))):
            mixed = torch.addcmul(mixed, tap, tokens)
        return mixed


def _earlier(x: Tensor, count: int) -> list[Tensor]:
    """The `count` tokens before each of x, (B, T, C): `count` such tensors, nearest first; 0 before a sequence."""
    padded = F.pad(x, (0, 0, count, 0))
    return [padded[:, start : x.shape[1] + start] for start in reversed(range(count))]


def _shared(x: Tensor, shares: Tensor) -> Tensor:
    """shares[0] x_j + shares[1] x_j-1 of (B, T, H, D); shares: (2, H)."""
    own, before = shares.to(x.dtype)[:, :, None]
    return own * x + before * _before(x)


def _before(x: Tensor) -> Tensor:
    """The token before each of x, (B, T, H, D); token 0 is its own predecessor."""
    return torch.cat([x[:, :1], x[:, :-1]], dim=1)
