"""The attention of a layer, one class for each row of `gka.KINDS`. A new kind is a row there and a class here.

A layer projects its tokens to queries and to tensors for later tokens (`stored`: values and keys; for GKA one tensor,
which is both or from which the keys are derived), then attends. While text is generated, the cache holds `stored`.
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
    parts,
    select_impl,
)
from gka.bandwidth import at_least_float32
from gka.masking import Mask
from gka.offsets import head_offsets
from gka.parts import GATE_CHANNELS
from nanochat_gka.model.blocks import Linear, Rotary, fill_uniform, norm
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.context import Context, PackedRows, Tensors

# The parameters of a layer that AdamW trains, with the flag of their learning rate; Muon trains the matrices.
ADAMW_PARTS = {"log_sigma": "sigma_lr", "channel_log_scales": "channel_lr", "head_gate": "gate_lr"}


class Attention(nn.Module, ABC):
    """The base of all kinds: bias-free projections in nanochat's names, gates, and `gka.offsets`' pairing or None."""

    kind: ClassVar[Kind]
    plain_widths: ClassVar[int]  # of `activation_widths`, without a model's additions
    derives_keys = False  # a cache may leave keys out, since they follow from the values

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.window(layer)
        self.is_last = layer == config.n_layer - 1
        self.projections = [f"c_{letter.lower()}" for letter in self.kind.input_projections]
        for name in self.projections:
            setattr(self, name, Linear(config.n_embd, config.n_embd))
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.ve_gate = Linear(GATE_CHANNELS, config.n_head) if config.has_value_embedding(layer) else None
        self.pairing = head_offsets(config.offset_pattern(layer), config.n_head)
        has_additions = config.has_additions(layer)
        scales = torch.empty(config.n_embd, dtype=torch.float32)
        self.channel_log_scales = nn.Parameter(scales) if config.channel_bandwidths and has_additions else None
        self.head_gate = Linear(config.n_embd, config.n_head) if config.head_gates and has_additions else None

    def init_weights(self) -> None:
        for name in self.projections:
            fill_uniform(getattr(self, name).weight, self.config.n_embd)
        # Gates are 2 * sigmoid(0) = 1 at first: value embeddings and heads as they are.
        for zeros in (self.c_proj, self.ve_gate, self.head_gate):
            if zeros is not None:
                nn.init.zeros_(zeros.weight)
        if self.channel_log_scales is not None:
            nn.init.zeros_(self.channel_log_scales)

    @property
    def activation_widths(self) -> int:
        """(B, T, C) tensors that the layer keeps for the backward pass, for `training.memory`."""
        added = (self.pairing, self.channel_log_scales, self.head_gate)
        return self.plain_widths + sum(part is not None for part in added)

    @property
    def attention_flops(self) -> int:
        """Training FLOPs per token beside products with parameters: 12 C for every token in the window."""
        return 12 * self.config.n_embd * self.window

    def forward(
        self, x: torch.Tensor, value_embedding: torch.Tensor | None, rotary: Rotary, context: Context
    ) -> torch.Tensor:
        """Mix and project: the outputs of the tokens that the context selects, (B, T, C) for all.

        x: the normalised block input, (B, T, C). value_embedding: (B, T, C), None in layers without.
        """
        queries, new = self.project(x, value_embedding, rotary, context.positions)
        heads = context.attend(self, rotary, queries, new)  # (B, T, H, D)
        if self.head_gate is not None:
            heads = heads * self.gates(context.select(self, x))[..., None]
        return self.c_proj(heads.flatten(2))

    def gates(self, x: torch.Tensor) -> torch.Tensor:
        """The factors of the heads' outputs, (B, T, H), of the block input (B, T, C)."""
        return parts.head_gates(self.head_gate(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """x * exp(a) per channel, by which tokens are compared, (B, T, C); x without channel bandwidths."""
        return x if self.channel_log_scales is None else parts.scaled(x, self.channel_log_scales)

    @abstractmethod
    def project(self, x, value_embedding, rotary: Rotary, positions) -> tuple[torch.Tensor, Tensors]:
        """Queries of the tokens at `positions`, and the tensors to store for later tokens; each is (B, T, H, D).

        A cache keeps the first `cached_tensors` of the latter; `attend` computes the others again.
        """

    @abstractmethod
    def attend(
        self, rotary: Rotary, queries: torch.Tensor, stored: Tensors, documents: PackedRows | None = None
    ) -> torch.Tensor:
        """The heads of the last T of n tokens, (B, T, H, D), of their queries and of the tensors stored for all n.

        documents: those of the tokens, which are all rows in one, (1, n, H, D); None: a row is one document.
        """

    def attend_cached(self, rotary: Rotary, queries: torch.Tensor, stored: Tensors, lengths: list[int]) -> torch.Tensor:
        """As `attend`, of rows with `lengths` tokens each in the tensors of a cache, (B, capacity, H, D)."""
        mixed, first = [], 0
        for length, members in groupby(lengths):  # neighbours of equal length share a call, without padding or masks
            rows = slice(first, first + len(list(members)))
            mixed.append(self.attend(rotary, queries[rows], tuple(tensor[rows, :length] for tensor in stored)))
            first = rows.stop
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def keys_and_values(
        self, rotary: Rotary, num_queries: int, stored: Tensors, documents: PackedRows | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values by slot, (B, n, H, D) each, from the first that the last `num_queries` of n tokens see."""
        first = 0
        if self.pairing is not None or self.derives_keys:
            reach = 0 if self.pairing is None else self.pairing.reach
            first = max(0, stored[0].shape[1] - num_queries - self.window - reach)
        stored = tuple(tensor[:, first:] for tensor in stored) if first else stored
        keys, values = self.unpack(rotary, first, stored)
        starts = None if documents is None else documents.starts
        return (keys, values) if self.pairing is None else self.pairing(keys, values, starts)

    def unpack(self, rotary: Rotary, first: int, stored: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens from position `first` on."""
        keys, values = stored
        return keys, values

    @abstractmethod
    def weights(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """W of whole sequences, (B, H, T, T), from (B, T, H, D) each. For pictures: fused operators never build it."""

    @property
    def cached_tensors(self) -> int:
        """How many (B, n, H, D) tensors a cache must keep."""
        return self.kind.cached_tensors

    def operator(self, dtype: torch.dtype) -> str | None:
        """The implementation of `gka.gaussian_attention` that trains this layer on rows of `dtype`; None without."""
        return None

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.config.n_head, self.config.head_dim))

    def add_value_embedding(self, values, x, value_embedding: torch.Tensor | None) -> torch.Tensor:
        """values + 2 sigmoid(W_g x[:32]) * embedding, per head."""
        if value_embedding is None:
            return values
        return parts.add_value_embedding(values, self.ve_gate(x[..., :GATE_CHANNELS]), self.heads(value_embedding))


class SoftmaxAttention(Attention):
    """nanochat's attention: project, rotate, normalise queries and keys per head."""

    kind = KINDS["softmax"]
    plain_widths = 6  # queries and keys before and after their norm, values, output

    def values(self, x):
        return self.heads(self.c_v(x))

    def project(self, x, value_embedding, rotary, positions):
        compared = self.scaled(x)
        queries, keys = (norm(rotary(self.heads(c(compared)), positions)) for c in (self.c_q, self.c_k))
        return queries, (keys, self.add_value_embedding(self.values(x), x, value_embedding))

    def attend(self, rotary, queries, stored, documents=None):
        inputs = queries, *self.keys_and_values(rotary, queries.shape[1], stored, documents)
        mask = dict(causal=True, window=self.window)
        if documents is None:
            return dot_product_attention(*inputs, **mask)
        # Row by row, for a mask of all tokens of a call is built.
        rows = zip(*(tensor.chunk(len(documents.of_rows), dim=1) for tensor in inputs), strict=True)
        mixed = [dot_product_attention(*row, cu_seqlens=c, **mask) for row, c in zip(rows, documents.of_rows)]
        return torch.cat(mixed, dim=1)

    def weights(self, queries, keys):
        logits = torch.einsum("bihd,bjhd->bhij", queries, keys) * self.config.head_dim**-0.5
        visible = Mask(causal=True, window=self.window).dense(queries.shape[1], keys.shape[1], logits.device)
        return logits.masked_fill(~visible, -math.inf).softmax(dim=-1)


class VLTAttention(SoftmaxAttention):
    """Value-less attention (paper section 4.4): W_V is gone, the values are the features."""

    kind = KINDS["vlt"]
    plain_widths = 5  # as softmax, without values

    def values(self, x):
        return self.heads(x)


class GKAAttention(Attention):
    """Gaussian kernel attention (paper section 5.1): no W_Q, W_K, W_V.

    A feature, the per-head norm of the rotated block input, is query and key. Per-head norms are constant, so the
    kernel is plain attention at scale 1 / sigma^2 (docs/mathematics.md). Values, in which the subclasses differ, are
    stored before keys.

    Channel bandwidths, not the paper's, scale every channel of a feature by exp(a), with a learned from 0 for each of
    the C channels: a Gaussian with a diagonal metric (automatic relevance determination, MacKay 1994, Neal 1996). They
    come before rotation and norm, as unequal scales of a rotated pair would make distances depend on positions. Values
    are not scaled.
    """

    kind = KINDS["gka"]
    plain_widths = 6  # values before and after their norm, rotated features, features, scaled queries, output

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        self.log_sigma = nn.Parameter(torch.empty(config.n_head, dtype=torch.float32))

    def init_weights(self) -> None:
        super().init_weights()
        with torch.no_grad():
            self.log_sigma.copy_(initial_log_sigma(self.config.n_head, self.config.initial_sigma_squared))

    def features(self, heads: torch.Tensor, rotary: Rotary, positions) -> torch.Tensor:
        """norm(rotary(heads * exp(a))): queries and keys of block input or unrotated values, (B, n, H, D) each."""
        return norm(rotary(self.heads(self.scaled(heads.flatten(2))), positions))

    def unpack(self, rotary, first, stored):
        return stored[-1], stored[0]

    def attend(self, rotary, queries, stored, documents=None):
        keys, values = self.keys_and_values(rotary, queries.shape[1], stored, documents)
        keys = None if keys is queries else keys
        sigma = at_least_float32(self.log_sigma)
        mask = dict(causal=True, window=self.window, cu_seqlens=None if documents is None else documents.cu_seqlens)
        return gaussian_attention(queries, sigma, keys=keys, values=values, **mask, constant_norm=True)

    def attend_cached(self, rotary, queries, stored, lengths):
        key_delays, value_delays = (self.pairing.key_delays, self.pairing.value_delays) if self.pairing else ((), ())
        derived = len(stored) == 1 and self.derives_keys
        scales = self.channel_log_scales if derived else None
        return decode_attention(
            queries,
            at_least_float32(self.log_sigma),
            stored[0],
            keys=stored[1] if len(stored) == 2 else None,
            rotary=rotary.tables if derived else None,
            channel_scales=None if scales is None else self.heads(scales.exp().to(queries.dtype).float()),
            lengths=lengths,
            window=self.window,
            constant_norm=True,
            key_delays=key_delays,
            value_delays=value_delays,
        )

    def weights(self, queries, keys):
        return gaussian_weights(queries, at_least_float32(self.log_sigma), keys=keys, causal=True, window=self.window)

    def operator(self, dtype):
        shape = (1, self.config.sequence_len, self.config.n_head, self.config.head_dim)
        x = torch.empty(shape, dtype=dtype, device=self.log_sigma.device, requires_grad=True)
        keys = torch.empty_like(x) if self.pairing is not None and self.pairing.moves_keys else None
        documents = None
        if self.config.document_start >= 0:  # two, for an example
            documents = torch.tensor([0, 1, self.config.sequence_len], dtype=torch.int32, device=x.device)
        mask = dict(causal=True, window=self.window, cu_seqlens=documents)
        return select_impl(x, keys=keys, **mask, constant_norm=True)


class RotatedGKA(GKAAttention):
    """The paper's form: the values are the features, and one tensor is stored.

    Value embeddings or channel bandwidths make the values another tensor than the features; then both are stored.
    """

    @property
    def cached_tensors(self):
        return 1 + (self.ve_gate is not None or self.channel_log_scales is not None)

    def project(self, x, value_embedding, rotary, positions):
        heads = self.heads(x)
        features = self.features(heads, rotary, positions)
        values = features if self.channel_log_scales is None else norm(rotary(heads, positions))
        values = self.add_value_embedding(values, x, value_embedding)
        return features, (features,) if values is features else (values, features)


class UnrotatedGKA(GKAAttention):
    """Values are normalised per head but not rotated, which is not the paper's form.

    Keys follow from the values and their positions, so that a cache may store the values alone; value embeddings,
    which are added to the values, undo that.
    """

    @property
    def cached_tensors(self):
        return 1 + (self.ve_gate is not None)

    @property
    def derives_keys(self):
        return self.ve_gate is None

    def project(self, x, value_embedding, rotary, positions):
        values = norm(self.heads(x))
        features = self.features(values, rotary, positions)
        return features, (self.add_value_embedding(values, x, value_embedding), features)

    def unpack(self, rotary, first, stored):
        if len(stored) == 2:
            return super().unpack(rotary, first, stored)
        [values] = stored
        return self.features(values, rotary, slice(first, first + values.shape[1])), values


CLASSES = {"softmax": SoftmaxAttention, "vlt": VLTAttention}
GKA_CLASSES = {"rotated": RotatedGKA, "unrotated": UnrotatedGKA}  # by `gka_values`


def build_attention(config: GPTConfig, layer: int) -> Attention:
    """The attention of a layer: the class of its kind, for gka of its values."""
    kind = config.layer_attention(layer)
    return (GKA_CLASSES[config.gka_values] if kind == "gka" else CLASSES[kind])(config, layer)
