"""The attention of a layer: softmax, VLT or GKA, one forward signature. Adding one is a class and a line in ATTENTION.

A layer projects its tokens to queries and to what later tokens need of them (`stored`: keys and values; for GKA one
tensor, which is both or which keys follow from), then attends. While generating, `stored` is what the cache holds.
Legend: B batch, T tokens, n tokens so far, H heads, D head_dim, C = H * D.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from gka import dot_product_attention, gaussian_attention, initial_log_sigma, select_impl
from nanochat_gka.model.blocks import Linear, Rotary, fill_uniform, norm
from nanochat_gka.model.config import GPTConfig

GATE_CHANNELS = 32
Tensors = tuple[torch.Tensor, ...]


class Past(Protocol):
    """Where the tokens of a pass stand and what they follow, for a pass that is not simply B whole sequences.

    positions: of the tokens, a slice of T or (B, T); longest: one more than the last of them; wanted: indices (n,) into a single row, for a pass of
    which only these tokens' outputs are needed, else None. For every group of rows whose attention is one call `split` yields the arguments of
    `Attention.attend`; `join` puts the outputs back in place: (B, T, H, D), or, where the last layer asks for the wanted ones, (1, n, H, D).
    """

    positions: slice | torch.Tensor
    longest: int
    wanted: torch.Tensor | None

    def split(
        self, layer: int, queries: torch.Tensor, new: Tensors, wanted_only: bool
    ) -> Iterator[tuple[torch.Tensor, Tensors, torch.Tensor | None]]: ...

    def join(self, mixed: list[torch.Tensor], wanted_only: bool) -> torch.Tensor: ...

    def end(self) -> None: ...


class Attention(nn.Module, ABC):
    """What all kinds share: bias-free projections named in PROJECTIONS (nanochat's names), W_O and the value gate."""

    PROJECTIONS: tuple[str, ...] = ()

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.window(layer)
        for name in self.PROJECTIONS:
            setattr(self, name, Linear(config.n_embd, config.n_embd))
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.ve_gate = Linear(GATE_CHANNELS, config.n_head) if config.has_value_embedding(layer) else None

    def init_weights(self) -> None:
        for name in self.PROJECTIONS:
            fill_uniform(getattr(self, name).weight, self.config.n_embd)
        nn.init.zeros_(self.c_proj.weight)
        if self.ve_gate is not None:
            nn.init.zeros_(self.ve_gate.weight)  # 2 * sigmoid(0) = 1: the value embedding as it is

    def forward(self, x, value_embedding, rotary, past: Past | None = None, wanted_only: bool = False) -> torch.Tensor:
        """Mix and project. Arguments as `mix`. Returns (B, T, C), or (1, n, C) of the wanted tokens."""
        return self.c_proj(self.mix(x, value_embedding, rotary, past, wanted_only).flatten(2))

    def mix(
        self,
        x: torch.Tensor,
        value_embedding: torch.Tensor | None,
        rotary: Rotary,
        past: Past | None = None,
        wanted_only: bool = False,
    ) -> torch.Tensor:
        """The heads, (B, T, H, D) or, of the tokens that `past` wants, (1, n, H, D).

        x: the normalised block input, (B, T, C). value_embedding: (B, T, C) or None. past: None for whole sequences.
        """
        positions = slice(0, x.shape[1]) if past is None else past.positions
        queries, stored = self.project(x, value_embedding, rotary, positions)
        if past is None:
            return self.attend(rotary, queries, stored, queries)
        return past.join(
            [self.attend(rotary, *group) for group in past.split(self.layer, queries, stored, wanted_only)], wanted_only
        )

    @abstractmethod
    def project(
        self, x: torch.Tensor, value_embedding: torch.Tensor | None, rotary: Rotary, positions
    ) -> tuple[torch.Tensor, Tensors]:
        """Queries of the tokens at `positions`, and what is stored of them: `cached_tensors` tensors, all (B, T, H, D)."""

    @abstractmethod
    def attend(
        self, rotary: Rotary, queries: torch.Tensor, stored: Tensors, all_queries: torch.Tensor | None
    ) -> torch.Tensor:
        """Mix what is stored of n tokens for the queries of the last T of them; returns (B, T, H, D). all_queries: of all n, if they are known."""

    @property
    def cached_tensors(self) -> int:
        """How many (B, n, H, D) tensors are stored."""
        return 2

    derives_keys = False

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.config.n_head, self.config.head_dim))

    def add_value_embedding(
        self, values: torch.Tensor, x: torch.Tensor, value_embedding: torch.Tensor | None
    ) -> torch.Tensor:
        """values + 2 sigmoid(W_g x[:32]) * embedding, per head."""
        if value_embedding is None:
            return values
        gate = 2 * torch.sigmoid(self.ve_gate(x[..., :GATE_CHANNELS]))
        return values + gate[..., None] * self.heads(value_embedding)


class SoftmaxAttention(Attention):
    """nanochat's attention: project, rotate, normalise queries and keys per head."""

    PROJECTIONS = ("c_q", "c_k", "c_v")

    def values(self, x):
        return self.heads(self.c_v(x))

    def project(self, x, value_embedding, rotary, positions):
        queries, keys = (norm(rotary(self.heads(projection(x)), positions)) for projection in (self.c_q, self.c_k))
        return queries, (keys, self.add_value_embedding(self.values(x), x, value_embedding))

    def attend(self, rotary, queries, stored, all_queries):
        return dot_product_attention(queries, *stored, causal=True, window=self.window)


class VLTAttention(SoftmaxAttention):
    """Value-less attention (paper section 4.4): W_V is gone, the values are the features."""

    PROJECTIONS = ("c_q", "c_k")

    def values(self, x):
        return self.heads(x)


class GKAAttention(Attention):
    """Gaussian kernel attention (paper section 5.1): no W_Q, W_K, W_V; a feature, the per-head norm of the rotated block
    input, is query, key and value.

    Per-head norms are constant, so the kernel is plain attention at scale 1 / sigma^2 (gka/README.md). One tensor is
    stored, the features. Three variations are not the paper's. `gka_values` normalised or raw: values are not rotated;
    keys follow from them and the position, so values are what is stored. Value embeddings: keys no longer follow, both
    are stored. `head_offsets`: whole heads pair keys and values one token apart. That is a fixed, parameter-free case of
    KV shifting attention (Xu et al., ICML 2025, arXiv 2411.19574), which learns how much of a key and a value comes from
    the token before; partial key offset (modded-nanogpt PR 169), Canon layers (arXiv 2512.17351) and RWKV's token shift
    are its kin. Softmax gains from it too. Ours is only the use in an operator without projections.
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        self.log_sigma = nn.Parameter(torch.empty(config.n_head, dtype=torch.float32))
        self.late_values, self.late_keys = config.heads_with("predecessor"), config.heads_with("successor")

    def init_weights(self) -> None:
        super().init_weights()
        with torch.no_grad():
            self.log_sigma.copy_(initial_log_sigma(self.config.n_head, self.config.initial_sigma_squared))

    @property
    def cached_tensors(self):
        return 1 if self.ve_gate is None else 2

    @property
    def derives_keys(self):
        """Whether decoding computes the keys of all past tokens again: they are not stored, and are not the values."""
        return self.cached_tensors == 1 and self.config.gka_values != "rotated"

    def project(self, x, value_embedding, rotary, positions):
        heads = self.heads(x)
        values = norm(heads) if self.config.gka_values == "normalised" else heads
        features = norm(rotary(values, positions))
        if self.config.gka_values == "rotated":
            values = features
        if value_embedding is None:
            return features, (values,)
        return features, (features, self.add_value_embedding(values, x, value_embedding))

    def attend(self, rotary, queries, stored, all_queries):
        values, features = stored[-1], all_queries if len(stored) == 1 else stored[0]  # a feature is query and key
        if len(stored) == 1 and self.config.gka_values == "rotated":  # and value
            values = features = stored[0] if features is None else features
        total, offsets = values.shape[1], self.late_values or self.late_keys
        if features is None or (offsets and queries.shape[1] < total):  # what comes is work on every token
            first = max(
                0, total - queries.shape[1] - self.window - 1
            )  # the earliest token in reach of a query, and its predecessor
            values = values[:, first:]
            features = norm(rotary(values, slice(first, total))) if features is None else features[:, first:]
        keys = None if features is queries else features
        if self.late_values:
            values = _one_later(values, self.late_values)
        if self.late_keys:
            keys = _one_later(features, self.late_keys)
        return gaussian_attention(
            queries, self.log_sigma, keys=keys, values=values, causal=True, window=self.window, constant_norm=True
        )

    def chosen_impl(self, dtype: torch.dtype) -> str:
        """Which implementation of the operator trains this layer on rows of `dtype`, where its weights are."""
        shape = (1, self.config.sequence_len, self.config.n_head, self.config.head_dim)
        x = torch.empty(shape, dtype=dtype, device=self.log_sigma.device, requires_grad=True)
        keys = torch.empty_like(x) if self.late_keys else None
        return select_impl(x, keys=keys, causal=True, window=self.window, constant_norm=True)


def _one_later(x: torch.Tensor, heads: list[slice]) -> torch.Tensor:
    """(B, T, H, D) with `heads` moved one token later; the first token, which has no predecessor, stays where it is (its norm stays constant)."""
    moved = x.clone()
    for some in heads:
        moved[:, 1:, some] = x[:, :-1, some]
    return moved


ATTENTION = {"softmax": SoftmaxAttention, "gka": GKAAttention, "vlt": VLTAttention}
