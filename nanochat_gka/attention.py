"""The attention of a layer: softmax, VLT or GKA, one forward signature. Adding one is a class and a line in ATTENTION.

Legend: B batch, T tokens, H heads, D head_dim, C = H * D.
"""

from abc import ABC, abstractmethod

import torch
from torch import nn

from gka import dot_product_attention, gaussian_attention, initial_log_sigma, select_impl
from nanochat_gka.blocks import Linear, Rotary, fill_uniform, norm
from nanochat_gka.config import GPTConfig

GATE_CHANNELS = 32


class Attention(nn.Module, ABC):
    """What all kinds share: bias-free projections named in PROJECTIONS (nanochat's names), W_O and the value gate."""

    PROJECTIONS: tuple[str, ...] = ()

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.config, self.window = config, config.window(layer)
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

    def forward(self, x: torch.Tensor, value_embedding: torch.Tensor | None, rotary: Rotary) -> torch.Tensor:
        """x: the normalised block input, (B, T, C). value_embedding: (B, T, C) or None. Returns (B, T, C)."""
        return self.c_proj(self.mix(x, value_embedding, rotary).flatten(2))

    @abstractmethod
    def mix(self, x: torch.Tensor, value_embedding: torch.Tensor | None, rotary: Rotary) -> torch.Tensor:
        """The heads' outputs, (B, T, H, D)."""

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.config.n_head, self.config.head_dim))

    def add_value_embedding(self, values: torch.Tensor, x: torch.Tensor, value_embedding: torch.Tensor | None) -> torch.Tensor:
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

    def mix(self, x, value_embedding, rotary):
        queries, keys = (norm(rotary(self.heads(projection(x)))) for projection in (self.c_q, self.c_k))
        values = self.add_value_embedding(self.values(x), x, value_embedding)
        return dot_product_attention(queries, keys, values, causal=True, window=self.window)


class VLTAttention(SoftmaxAttention):
    """Value-less attention (paper section 4.4): W_V is gone, the values are the features."""

    PROJECTIONS = ("c_q", "c_k")

    def values(self, x):
        return self.heads(x)


class GKAAttention(Attention):
    """Gaussian kernel attention (paper section 5.1): no W_Q, W_K, W_V; features = per-head norm of the rotated block input.

    Per-head norms are constant, so the kernel is plain attention at scale 1 / sigma^2 (gka/README.md).
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        self.log_sigma = nn.Parameter(torch.empty(config.n_head, dtype=torch.float32))
        self.offsets = {config.head_offset(head) for head in range(config.n_head)} - {"none"}
        for offset in ("predecessor", "successor"):
            self.register_buffer(offset, torch.empty(config.n_head, 1, dtype=torch.bool), persistent=False)

    def init_weights(self) -> None:
        super().init_weights()
        config = self.config
        with torch.no_grad():
            self.log_sigma.copy_(initial_log_sigma(config.n_head, config.initial_sigma_squared))
        for offset in ("predecessor", "successor"):
            heads = [[config.head_offset(head) == offset] for head in range(config.n_head)]
            getattr(self, offset).copy_(torch.tensor(heads))

    def mix(self, x, value_embedding, rotary):
        heads = self.heads(x)
        features = norm(rotary(heads))
        values = {"normalised": lambda: norm(heads), "rotated": lambda: features, "raw": lambda: heads}[self.config.gka_values]()
        values = self.add_value_embedding(values, x, value_embedding)
        keys = None
        if "predecessor" in self.offsets:
            values = torch.where(self.predecessor, _previous(values), values)
        if "successor" in self.offsets:
            keys = torch.where(self.successor, _previous(features), features)
        return gaussian_attention(features, self.log_sigma, keys=keys, values=values, causal=True, window=self.window, constant_norm=True)

    def chosen_impl(self, dtype: torch.dtype) -> str:
        """Which implementation of the operator trains this layer on rows of `dtype`, where its weights are."""
        shape = (1, self.config.sequence_len, self.config.n_head, self.config.head_dim)
        x = torch.empty(shape, dtype=dtype, device=self.log_sigma.device, requires_grad=True)
        keys = torch.empty_like(x) if "successor" in self.offsets else None
        return select_impl(x, keys=keys, causal=True, window=self.window, constant_norm=True)


def _previous(x: torch.Tensor) -> torch.Tensor:
    """(B, T, H, D) moved one token later; the first token, which has no predecessor, stands in for it (its norm stays constant)."""
    return torch.cat([x[:, :1], x[:, :-1]], dim=1)


ATTENTION = {"softmax": SoftmaxAttention, "gka": GKAAttention, "vlt": VLTAttention}
