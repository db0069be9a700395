"""The attention of a layer, one class for each row of `gka.KINDS`. A new kind is a row there and a class here.

A module of `--forms` varies these classes from outside, see `GPTConfig.variation`.

A layer projects its tokens to queries and to what later tokens need of them (`stored`: values and keys; for GKA one
tensor, which is both or which the keys follow from), then attends. While text is generated, the cache holds `stored`.
Legend: B batch, T tokens, n tokens so far, H heads, D head_dim, C = H * D.
"""

import math
from abc import ABC, abstractmethod
from itertools import groupby
from typing import ClassVar

import torch
from torch import nn

from gka import (
    KINDS,
    Kind,
    decode_attention,
    dot_product_attention,
    gaussian_attention,
    gaussian_weights,
    initial_log_sigma,
    select_impl,
)
from gka.bandwidth import at_least_float32
from gka.masking import Mask
from gka.offsets import HeadOffsets, head_offsets
from nanochat_gka.model.blocks import Linear, Rotary, fill_uniform, norm
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.context import Context, Tensors

GATE_CHANNELS = 32
GATE_SCALE = 0.1
# What AdamW trains of a layer, for Muon has the other matrices: the flag of its learning rate, and a factor of it.
ADAMW_PARTS = {
    "log_sigma": ("sigma_lr", 1.0),
    "channel_log_scales": ("channel_lr", 1.0),
    "head_gate": ("gate_lr", 1.0),
}


class Attention(nn.Module, ABC):
    """What all kinds share: the bias-free projections of the kind's row (nanochat's names), W_O, the value gate, and
    the pairing of keys with values of other tokens, `offsets.HeadOffsets` or None.
    """

    CLASSES: ClassVar[dict[str, type["Attention"]]] = {}
    kind: ClassVar[Kind]
    plain_widths: ClassVar[int]  # of `activation_widths`, without what a model may add to its kind
    has_bandwidth: ClassVar[bool]  # one learned sigma per head
    is_drawn = True  # figures know what `weights` of its queries and keys are

    def __init_subclass__(cls, kind: str = "", **arguments):
        """kind: a row of the table, for its class; a variation of that class has none of its own."""
        super().__init_subclass__(**arguments)
        if kind:
            cls.kind, cls.has_bandwidth = KINDS[kind], KINDS[kind].has_bandwidth
            Attention.CLASSES[kind] = cls

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.window(layer)
        self.is_last = layer == config.n_layer - 1
        self.projections = [f"c_{letter.lower()}" for letter in self.kind.input_projections]
        for name in self.projections:
            setattr(self, name, Linear(config.n_embd, config.n_embd))
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.ve_gate = Linear(GATE_CHANNELS, config.n_head) if config.has_value_embedding(layer) else None
        self.pairing = self.make_pairing()
        is_varied = config.is_varied(layer)
        scales = torch.empty(config.n_embd, dtype=torch.float32)
        self.channel_log_scales = nn.Parameter(scales) if config.channel_bandwidths and is_varied else None
        self.head_gate = Linear(config.n_embd, config.n_head) if config.head_gates and is_varied else None

    def init_weights(self) -> None:
        for name in self.projections:
            fill_uniform(getattr(self, name).weight, self.config.n_embd)
        nn.init.zeros_(self.c_proj.weight)
        if self.ve_gate is not None:
            nn.init.zeros_(self.ve_gate.weight)  # 2 * sigmoid(0) = 1: the value embedding as it is
        if self.channel_log_scales is not None:
            nn.init.zeros_(self.channel_log_scales)
        if self.head_gate is not None:
            nn.init.zeros_(self.head_gate.weight)  # 2 * sigmoid(0) = 1: the heads as they are

    def make_pairing(self) -> HeadOffsets | None:
        """How the layer's keys and values are put together."""
        return head_offsets(self.config.offset_pattern(self.layer), self.config.n_head)

    @property
    def activation_widths(self) -> int:
        """(B, T, C) tensors that the layer keeps for the backward pass, for `training.memory`."""
        added = (self.pairing, self.channel_log_scales, self.head_gate)
        return self.plain_widths + sum(part is not None for part in added)

    @property
    def attention_flops(self) -> int:
        """Training FLOPs per token that are not of a product with a parameter: 12 C for every token in the window."""
        return 12 * self.config.n_embd * self.window

    def forward(
        self, x: torch.Tensor, value_embedding: torch.Tensor | None, rotary: Rotary, context: Context
    ) -> torch.Tensor:
        """Mix and project; arguments as `mix`. Returns the tokens that the context selects, (B, T, C) for all."""
        heads = self.mix(x, value_embedding, rotary, context)
        if self.head_gate is not None:
            heads = heads * self.gates(context.select(self, x))[..., None]
        return self.c_proj(heads.flatten(2))

    def gates(self, x: torch.Tensor) -> torch.Tensor:
        """2 sigmoid(0.1 G x), what each head's output is multiplied by, (B, T, H), of the block input (B, T, C).

        Gated attention (arXiv 2505.06708) with one number per head, as modded-nanogpt's. A small linear map of the
        token, though not one of Q, K, V.
        """
        return 2 * torch.sigmoid(GATE_SCALE * self.head_gate(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer compares tokens by: x * exp(a) per channel, (B, T, C); x without channel bandwidths."""
        return x if self.channel_log_scales is None else x * self.channel_log_scales.exp().to(x.dtype)

    def mix(
        self, x: torch.Tensor, value_embedding: torch.Tensor | None, rotary: Rotary, context: Context
    ) -> torch.Tensor:
        """The heads of the tokens that the context selects, (B, T, H, D) for all.

        x: the normalised block input, (B, T, C). value_embedding: (B, T, C), None in layers without.
        """
        queries, new = self.project(x, value_embedding, rotary, context.positions)
        return context.attend(self, rotary, queries, new)

    @abstractmethod
    def project(self, x, value_embedding, rotary: Rotary, positions) -> tuple[torch.Tensor, Tensors]:
        """Queries of the tokens at `positions`, and what later tokens need of them; every tensor is (B, T, H, D).

        A cache keeps the first `cached_tensors` of the latter; `attend` computes the others again.
        """

    @abstractmethod
    def attend(self, rotary: Rotary, queries: torch.Tensor, stored: Tensors) -> torch.Tensor:
        """Mix what is stored of n tokens, (B, n, H, D) each, for the queries of the last T of them, (B, T, H, D)."""

    def attend_cached(self, rotary: Rotary, queries: torch.Tensor, stored: Tensors, lengths: list[int]) -> torch.Tensor:
        """As `attend`, of rows that have `lengths` tokens each in what a cache stores, (B, capacity, H, D)."""
        mixed, first = [], 0
        for length, members in groupby(lengths):  # neighbours of equal length share a call, without padding or masks
            rows = slice(first, first + len(list(members)))
            mixed.append(self.attend(rotary, queries[rows], tuple(tensor[rows, :length] for tensor in stored)))
            first = rows.stop
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def keys_and_values(self, rotary: Rotary, num_queries: int, stored: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """What the heads of the last `num_queries` tokens read, (B, n, H, D) each, of what is `stored` of n tokens."""
        keys, values = stored
        if self.pairing is None:
            return keys, values
        if num_queries < keys.shape[1]:
            first = self.first_in_reach(num_queries, keys.shape[1])
            keys, values = keys[:, first:], values[:, first:]
        return self.pairing(keys, values)

    def first_in_reach(self, num_queries: int, num_tokens: int) -> int:
        """Of `num_tokens`, the earliest one that is in a slot which the last `num_queries` see."""
        reach = 0 if self.pairing is None else self.pairing.reach
        return max(0, num_tokens - num_queries - self.window - reach)

    def slots(self, x: torch.Tensor, value_embedding: torch.Tensor | None, rotary: Rotary) -> Tensors:
        """Queries of whole sequences, and the keys and values of their slots, (B, T, H, D) each. For pictures."""
        queries, stored = self.project(x, value_embedding, rotary, slice(0, x.shape[1]))
        return queries, *self.keys_and_values(rotary, x.shape[1], stored)

    @abstractmethod
    def weights(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """W of whole sequences, (B, H, T, T), from (B, T, H, D) each. For pictures: fused operators never build it."""

    @property
    def cached_tensors(self) -> int:
        """How many (B, n, H, D) tensors a cache must keep."""
        return self.kind.cached_tensors

    derives_keys = False

    def operator(self, dtype: torch.dtype) -> str | None:
        """Which implementation of `gka.gaussian_attention` trains this layer on rows of `dtype`; None: it has none."""
        return None

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.config.n_head, self.config.head_dim))

    def add_value_embedding(self, values, x, value_embedding: torch.Tensor | None) -> torch.Tensor:
        """values + 2 sigmoid(W_g x[:32]) * embedding, per head."""
        if value_embedding is None:
            return values
        gate = 2 * torch.sigmoid(self.ve_gate(x[..., :GATE_CHANNELS]))
        return values + gate[..., None] * self.heads(value_embedding)


class SoftmaxAttention(Attention, kind="softmax"):
    """nanochat's attention: project, rotate, normalise queries and keys per head."""

    plain_widths = 6  # queries and keys before and after their norm, values, output

    def values(self, x):
        return self.heads(self.c_v(x))

    def project(self, x, value_embedding, rotary, positions):
        compared = self.scaled(x)
        queries, keys = (norm(rotary(self.heads(c(compared)), positions)) for c in (self.c_q, self.c_k))
        return queries, (keys, self.add_value_embedding(self.values(x), x, value_embedding))

    def attend(self, rotary, queries, stored):
        keys, values = self.keys_and_values(rotary, queries.shape[1], stored)
        return dot_product_attention(queries, keys, values, causal=True, window=self.window)

    def weights(self, queries, keys):
        logits = torch.einsum("bihd,bjhd->bhij", queries, keys) * self.config.head_dim**-0.5
        visible = Mask(causal=True, window=self.window).dense(queries.shape[1], keys.shape[1], logits.device)
        return logits.masked_fill(~visible, -math.inf).softmax(dim=-1)


class VLTAttention(SoftmaxAttention, kind="vlt"):
    """Value-less attention (paper section 4.4): W_V is gone, the values are the features."""

    plain_widths = 5  # as softmax, without values

    def values(self, x):
        return self.heads(x)


class GKAAttention(Attention, kind="gka"):
    """Gaussian kernel attention (paper section 5.1): no W_Q, W_K, W_V.

    A feature, the per-head norm of the rotated block input, is query, key and value. Per-head norms are constant, so
    the kernel is plain attention at scale 1 / sigma^2 (docs/mathematics.md). One tensor is stored, the features.

    Four variations are not the paper's:
    - `gka_values` that are not rotated. Keys follow from them and the position, so the values are what is stored.
    - Value embeddings: keys no longer follow from the values, so both are stored.
    - Head offsets, see `offsets`.
    - Channel bandwidths: every channel is scaled by exp(a) before rotation and norm, with a learned from 0 for each of
      the C channels. The kernel is a Gaussian with a diagonal metric (automatic relevance determination, MacKay 1994,
      Neal 1996). Before the rotation, for after it unequal scales of a rotated pair would make distances depend on
      positions. Values are not scaled: rotated ones are stored beside the keys, of others the keys follow.
    """

    # Values before and after their norm, rotated features, features, scaled queries, output. One fewer where values are
    # rotated.
    plain_widths = 6

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        if self.has_bandwidth:
            self.log_sigma = nn.Parameter(torch.empty(config.n_head, dtype=torch.float32))

    def init_weights(self) -> None:
        super().init_weights()
        if not self.has_bandwidth:
            return
        with torch.no_grad():
            self.log_sigma.copy_(initial_log_sigma(self.config.n_head, self.config.initial_sigma_squared))

    def _log_sigma(self) -> torch.Tensor:
        return at_least_float32(self.log_sigma)

    @property
    def cached_tensors(self):
        scales_rotated = self.channel_log_scales is not None and self.config.gka_values == "rotated"
        return self.kind.cached_tensors + (self.ve_gate is not None or scales_rotated)

    @property
    def derives_keys(self):
        """Whether keys are not the values and follow from them: a cache may leave them out."""
        return self.cached_tensors == 1 and self.config.gka_values != "rotated"

    def project(self, x, value_embedding, rotary, positions):
        heads = self.heads(x)
        values = norm(heads) if self.config.gka_values == "normalised" else heads
        features = self.features(values, rotary, positions)
        if self.config.gka_values == "rotated":
            values = features if self.channel_log_scales is None else norm(rotary(values, positions))
        values = self.add_value_embedding(values, x, value_embedding)
        return features, (features,) if values is features else (values, features)

    def features(self, values: torch.Tensor, rotary: Rotary, positions) -> torch.Tensor:
        """What is compared, of values that are not rotated, (B, n, H, D) each: norm(rotary(values * exp(a)))."""
        return norm(rotary(self.heads(self.scaled(values.flatten(2))), positions))

    def keys_and_values(self, rotary, num_queries, stored):
        values, keys, num_tokens = stored[0], stored[-1], stored[0].shape[1]
        keys_are_missing = self.derives_keys and len(stored) == 1
        pairs_old_ones = self.pairing is not None and num_queries < num_tokens
        if keys_are_missing or pairs_old_ones:  # what follows is work on every token
            first = self.first_in_reach(num_queries, num_tokens)
            values, keys = values[:, first:], keys[:, first:]
            if keys_are_missing:
                keys = self.features(values, rotary, slice(first, num_tokens))
        return (keys, values) if self.pairing is None else self.pairing(keys, values)

    def attend(self, rotary, queries, stored):
        keys, values = self.keys_and_values(rotary, queries.shape[1], stored)
        keys = None if keys is queries else keys
        return gaussian_attention(
            queries, self._log_sigma(), keys=keys, values=values, causal=True, window=self.window, constant_norm=True
        )

    def attend_cached(self, rotary, queries, stored, lengths):
        tables = rotary.tables if self.derives_keys and len(stored) == 1 else None
        scales = None
        if tables is not None and self.channel_log_scales is not None:
            scales = self.heads(self.channel_log_scales.exp().to(queries.dtype).float())
        keys = stored[1] if len(stored) == 2 else None
        key_delays, value_delays = (self.pairing.key_delays, self.pairing.value_delays) if self.pairing else ((), ())
        return decode_attention(
            queries, self._log_sigma(), stored[0], keys=keys, rotary=tables, channel_scales=scales, lengths=lengths,
            window=self.window, constant_norm=True, key_delays=key_delays, value_delays=value_delays
        )  # fmt: skip

    def weights(self, queries, keys):
        return gaussian_weights(queries, self._log_sigma(), keys=keys, causal=True, window=self.window)

    def operator(self, dtype):
        shape = (1, self.config.sequence_len, self.config.n_head, self.config.head_dim)
        x = torch.empty(shape, dtype=dtype, device=self.log_sigma.device, requires_grad=True)
        keys = torch.empty_like(x) if self.pairing is not None and self.pairing.moves_keys else None
        return select_impl(x, keys=keys, causal=True, window=self.window, constant_norm=True)


def build_attention(config: GPTConfig, layer: int) -> Attention:
    """The attention of a layer: the class of its kind, or what the model's form puts in its place."""
    kind = Attention.CLASSES[config.layer_attention(layer)]
    return config.variation(layer, kind)(config, layer)
