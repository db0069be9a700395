"""Ways for attention to meet the token before: what an operator compares and mixes comes from more than one token.

A layer has at most one of them. None is ours; ours is only their use in an operator without projections, where one
feature is query, key and value, so that a head can say "tokens like me" but not "the token before me" or "what followed
the last time". Softmax attention gains from all of them too. Every one is causal.

Pairings act on keys k and values v, one pair for each token, and give what slot j holds. For gka layers k is the
feature (rotated, then normalised per head) and v what `gka_values` says. Token 0 is its own predecessor.

    head offsets   per head, fixed: P holds (k_j, v_j-1), S holds (k_j-1, v_j), N holds (k_j, v_j). No parameters.
                   P2 and S2 are of two tokens, and so on; before a sequence there is token 0.
    kv-shift       per head, learned: (norm(a k_j + a' k_j-1), b v_j + b' v_j-1). 4 H parameters.
                   KV shifting attention, Xu et al., ICML 2025, arXiv 2411.19574. P and S are its cases with 0 and 1.
    partial        the channels of k that are not rotated (`rotary` half) come from k_j-1: norm of that, and v_j.
                   No parameters. Partial key offset, modded-nanogpt, pull request 169.

Keys of mixed tokens are normalised per head again, for softmax too: the kernel keeps features of constant norm.

Blends act on the block input x, (B, T, C), before anything reads it; x_-1 is 0.

    token-shift    mu * x_j + (1 - mu) * x_j-1, learned per channel. C parameters. RWKV (arXiv 2305.13048) has a mixture
                   for each of its projections; here is one for all, since gka layers have one feature.
    canon          x_j + w_0 * x_j + ... + w_3 * x_j-3, learned per channel: a residual depthwise causal convolution.
                   4 C parameters. Canon A, Allen-Zhu, NeurIPS 2025, arXiv 2512.17351.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from nanochat_gka.model.blocks import norm
from nanochat_gka.model.config import GPTConfig

Tensor = torch.Tensor
ALL = slice(None)


class Pairing(nn.Module, ABC):
    """(keys, values), (B, n, H, D) each, of n tokens to those of n slots. Slot j holds tokens from j - reach to j."""

    reach: int = 1
    moves_keys: bool = True  # whether a slot's key is not its token's
    products: ClassVar[int] = 0  # of a number with a parameter, per token and channel
    activation_widths: ClassVar[int] = 1  # (B, T, C) tensors kept for the backward pass

    def init_weights(self) -> None:
        """Set the parameters to their starting values."""

    @abstractmethod
    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of the slots."""


class HeadOffsets(Pairing):
    """Keys or values of whole heads some tokens later. late_keys, late_values: heads, of H, and their tokens."""

    def __init__(self, num_heads: int, late_keys: list[tuple[slice, int]], late_values: list[tuple[slice, int]]):
        super().__init__()
        self.late_keys, self.late_values = late_keys, late_values
        self.key_delays, self.value_delays = (_delays(num_heads, late) for late in (late_keys, late_values))
        self.moves_keys = bool(late_keys)
        self.reach = max(self.key_delays + self.value_delays)

    def forward(self, keys, values):
        if self.late_values:
            values = _later(values, [(heads, ALL, tokens) for heads, tokens in self.late_values])
        if self.late_keys:
            keys = _later(keys, [(heads, ALL, tokens) for heads, tokens in self.late_keys])
        return keys, values


class KVShift(Pairing):
    """Learned shares, per head, of a token and its predecessor in keys and in values."""

    products = 4
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

    def forward(self, keys, values):
        return norm(_shared(keys, self.keys)), _shared(values, self.values)


class PartialOffset(Pairing):
    """The unrotated channels of all keys one token later."""

    activation_widths = 2

    def __init__(self, unrotated: list[slice]):
        super().__init__()
        self.unrotated = unrotated

    def forward(self, keys, values):
        return norm(_later(keys, [(ALL, channels, 1) for channels in self.unrotated])), values


class Blend(nn.Module, ABC):
    """x, (B, T, C), and the `reach` tokens before each, nearest first, to what the layer reads in place of x."""

    reach: ClassVar[int]
    activation_widths: ClassVar[int]

    @abstractmethod
    def init_weights(self) -> None:
        """Set the parameters to their starting values."""

    @abstractmethod
    def forward(self, x: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        """What the layer reads, (B, T, C)."""


class TokenShift(Blend):
    reach, activation_widths = 1, 1

    def __init__(self, width: int, depth: float):
        super().__init__()
        self.depth, self.own = depth, nn.Parameter(torch.empty(width))

    @torch.no_grad()
    def init_weights(self) -> None:
        """RWKV's: from 0 to 1 over the channels, and nearer to 1 the deeper the layer."""
        width = len(self.own)
        ramp = torch.arange(width, dtype=torch.float32, device=self.own.device) / width
        self.own.copy_(ramp ** (1 - self.depth))

    def forward(self, x, earlier):
        [previous] = earlier
        return previous + self.own.to(x.dtype) * (x - previous)


class Canon(Blend):
    reach, activation_widths = 3, 2

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1 + self.reach, width))

    def init_weights(self) -> None:
        """Zeros: at the start the layer reads x itself."""
        nn.init.zeros_(self.weight)

    def forward(self, x, earlier):
        weight = self.weight.to(x.dtype)
        mixed = x
        for tap, tokens in zip(weight, (x, *earlier)):
            mixed = torch.addcmul(mixed, tap, tokens)
        return mixed


def pairing(config: GPTConfig, layer: int) -> Pairing | None:
    """The layer's pairing, if it has one."""
    mixing = config.layer_mixing(layer)
    if mixing == "kv-shift":
        return KVShift(config.n_head)
    if mixing == "partial":
        return PartialOffset(config.unrotated_channels)
    late_keys, late_values = (
        [(heads, offset.tokens) for heads, offset in config.offsets_of(layer) if offset.letter == letter]
        for letter in ("S", "P")
    )
    return HeadOffsets(config.n_head, late_keys, late_values) if late_keys or late_values else None


def blend(config: GPTConfig, layer: int) -> Blend | None:
    """The layer's blend, if it has one."""
    mixing = config.layer_mixing(layer)
    if mixing == "token-shift":
        return TokenShift(config.n_embd, layer / config.n_layer)
    return Canon(config.n_embd) if mixing == "canon" else None


def _delays(num_heads: int, late: list[tuple[slice, int]]) -> tuple[int, ...]:
    """By how many tokens each head is late."""
    delays = [0] * num_heads
    for heads, tokens in late:
        delays[heads] = [tokens] * len(delays[heads])
    return tuple(delays)


def _later(x: Tensor, places: list[tuple[slice, slice, int]]) -> Tensor:
    """(B, T, H, D) with some (heads, channels) some tokens later; token 0 fills the places before, for its norm."""
    moved = x.clone()
    for heads, channels, tokens in places:
        if tokens == 1:  # one copy
            moved[:, 1:, heads, channels] = x[:, :-1, heads, channels]
        else:  # two, and right for fewer tokens too: an ONNX graph has one shape for all lengths
            own = x[:, :, heads, channels]
            padded = torch.cat([own[:, :1].expand(-1, tokens, -1, -1), own], dim=1)
            moved[:, :, heads, channels] = padded[:, : x.shape[1]]
    return moved


def _shared(x: Tensor, shares: Tensor) -> Tensor:
    """shares[0] x_j + shares[1] x_j-1 of (B, T, H, D); shares: (2, H)."""
    own, before = shares.to(x.dtype)[:, :, None]
    previous = torch.cat([x[:, :1], x[:, :-1]], dim=1)
    return own * x + before * previous
