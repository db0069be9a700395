"""What may stand in the place of the Gaussian kernel, to learn what the kernel itself is worth. For studies alone.

`--kernel` gives it to the gka layers of a model; everything else of the layer stays. v are the values that the layer
would mix, N(i) the tokens that query i sees.

    mean           y_i = the mean of v_j over N(i): all affinities are equal. No bandwidths.
    previous       y_i = v_i-1 (v_0 for the first token). No bandwidths.
    tied-softmax   y_i = sum_j softmax_j(z_i . z_j / sigma^2) v_j over N(i), with z the rotated block input of the head:
                   dot-product attention with query = key, without projections and with a learned scale for each head.
                   On features of constant norm that is the Gaussian kernel itself, so z is not normalised.
    none           no attention: the block is its MLP. No W_O, no bandwidths.
"""

import torch
import torch.nn.functional as F

from gka import dot_product_attention
from gka.masking import Mask
from nanochat_gka.model.attention import Attention, GKAAttention, SoftmaxAttention
from nanochat_gka.model.config import GPTConfig


class Baseline(GKAAttention):
    """A gka layer with another kernel."""

    def operator(self, dtype):
        return None

    def attend_cached(self, rotary, queries, stored, lengths):
        return Attention.attend_cached(self, rotary, queries, stored, lengths)


class MeanAttention(Baseline):
    has_bandwidth, compares = False, False

    def attend(self, rotary, queries, stored):
        _, values = self.keys_and_values(rotary, queries.shape[1], stored)
        num_queries, num_tokens = queries.shape[1], values.shape[1]
        sums = F.pad(values.float().cumsum(1), (0, 0, 0, 0, 1, 0))  # of the first 0, 1, ..., n values
        last = torch.arange(num_tokens - num_queries, num_tokens, device=values.device)
        first = (last - self.window).clamp(min=0)
        return ((sums[:, last + 1] - sums[:, first]) / (last + 1 - first)[:, None, None]).to(values.dtype)

    def weights(self, queries, keys):
        visible = Mask(causal=True, window=self.window).dense(queries.shape[1], keys.shape[1], queries.device)
        rows = visible.to(queries.dtype) / visible.sum(-1, keepdim=True)
        return rows.expand(len(queries), self.config.n_head, -1, -1)


class PreviousAttention(Baseline):
    has_bandwidth, compares = False, False

    def attend(self, rotary, queries, stored):
        _, values = self.keys_and_values(rotary, queries.shape[1], stored)
        return torch.cat([values[:, :1], values], dim=1)[:, -queries.shape[1] - 1 : -1]

    def weights(self, queries, keys):
        tokens = torch.arange(keys.shape[1], device=queries.device)
        rows = torch.zeros(len(tokens), len(tokens), dtype=queries.dtype, device=queries.device)
        rows[tokens, (tokens - 1).clamp(min=0)] = 1
        return rows[-queries.shape[1] :].expand(len(queries), self.config.n_head, -1, -1)


class TiedSoftmaxAttention(Baseline):
    derives_keys = False  # values that are normalised do not say how long the keys were

    @property
    def cached_tensors(self):
        return 2

    def project(self, x, value_embedding, rotary, positions):
        _, (values, *_) = super().project(x, value_embedding, rotary, positions)
        keys = rotary(self.heads(x), positions)
        return keys, (keys, values)

    def keys_and_values(self, rotary, num_queries, stored):
        return Attention.keys_and_values(self, rotary, num_queries, stored)

    def scaled(self, queries):
        """Queries for attention at scale 1 / sqrt(D)."""
        scale = self.config.head_dim**0.5 * torch.exp(-2 * self._log_sigma())
        return queries * scale.to(queries.dtype)[:, None]

    def attend(self, rotary, queries, stored):
        keys, values = self.keys_and_values(rotary, queries.shape[1], stored)
        return dot_product_attention(self.scaled(queries), keys, values, causal=True, window=self.window)

    def weights(self, queries, keys):
        return SoftmaxAttention.weights(self, self.scaled(queries), keys)


class NoAttention(Baseline):
    has_bandwidth, compares, has_output = False, False, False

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        del self.c_proj

    def init_weights(self) -> None: ...

    def forward(self, x, value_embedding, rotary, context):
        return torch.zeros_like(context.select(self, x))


KERNELS = {
    "mean": MeanAttention,
    "previous": PreviousAttention,
    "tied-softmax": TiedSoftmaxAttention,
    "none": NoAttention,
}


def attention_class(config: GPTConfig, layer: int) -> type[Attention]:
    """What a layer is built of: the class of its kind, or of the kernel that stands in its place."""
    kind = config.layer_attention(layer)
    return KERNELS[config.kernel] if kind == "gka" and config.kernel != "gaussian" else Attention.CLASSES[kind]
