"""Layers of the study: attention that meets the token before in another way, or has no Gaussian kernel.

`kernel` stands in the place of the Gaussian kernel in gka layers, to learn what the kernel itself is worth; everything
else of the layer stays. v are the values that the layer would mix, N(i) the tokens that query i sees.

    mean           y_i = the mean of v_j over N(i): all affinities are equal. No bandwidths.
    previous       y_i = v_i-1 (v_0 for the first token). No bandwidths.
    tied-softmax   y_i = sum_j softmax_j(z_i . z_j / sigma^2) v_j over N(i), with z the rotated block input of the head:
                   dot-product attention with query = key, without projections and with a learned scale for each head.
                   On features of constant norm that is the Gaussian kernel itself, so z is not normalised.
    others         the Gaussian kernel over N(i) without slot i itself; 0 for the first token.
    none           no attention: the block is its MLP. No W_O, no bandwidths.
"""

import torch
import torch.nn.functional as F

from gka import dot_product_attention, gaussian_attention
from gka.masking import Mask
from nanochat_gka.model.attention import ADAMW_PARTS, Attention, GKAAttention, SoftmaxAttention, VLTAttention
from runs.study.forms.mixing import Canon, KVShift, PartialOffset, TokenShift, ValueShare

# What they learn is as slow as the residual scalars.
ADAMW_PARTS |= {"pairing": ("scalar_lr", 0.01), "blend": ("scalar_lr", 0.01)}


# What stands in the place of the kernel


class Kernel(GKAAttention):
    """A gka layer with another kernel."""

    def operator(self, dtype):
        return None

    def attend_cached(self, rotary, queries, stored, lengths):
        return Attention.attend_cached(self, rotary, queries, stored, lengths)


class MeanAttention(Kernel):
    has_bandwidth, attention_flops = False, 0

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


class PreviousAttention(Kernel):
    has_bandwidth, attention_flops = False, 0

    def attend(self, rotary, queries, stored):
        _, values = self.keys_and_values(rotary, queries.shape[1], stored)
        return torch.cat([values[:, :1], values], dim=1)[:, -queries.shape[1] - 1 : -1]

    def weights(self, queries, keys):
        tokens = torch.arange(keys.shape[1], device=queries.device)
        rows = torch.zeros(len(tokens), len(tokens), dtype=queries.dtype, device=queries.device)
        rows[tokens, (tokens - 1).clamp(min=0)] = 1
        return rows[-queries.shape[1] :].expand(len(queries), self.config.n_head, -1, -1)


class TiedSoftmaxAttention(Kernel):
    derives_keys = False  # values that are normalised do not say how long the keys were
    cached_tensors = 2
    is_drawn = False

    def project(self, x, value_embedding, rotary, positions):
        _, (values, *_) = super().project(x, value_embedding, rotary, positions)
        keys = rotary(self.heads(x), positions)
        return keys, (keys, values)

    def keys_and_values(self, rotary, num_queries, stored):
        return Attention.keys_and_values(self, rotary, num_queries, stored)

    def sharpened(self, queries):
        """Queries for attention at scale 1 / sqrt(D)."""
        scale = self.config.head_dim**0.5 * torch.exp(-2 * self._log_sigma())
        return queries * scale.to(queries.dtype)[:, None]

    def attend(self, rotary, queries, stored):
        keys, values = self.keys_and_values(rotary, queries.shape[1], stored)
        return dot_product_attention(self.sharpened(queries), keys, values, causal=True, window=self.window)

    def weights(self, queries, keys):
        return SoftmaxAttention.weights(self, self.sharpened(queries), keys)


class OthersAttention(Kernel):
    is_drawn = False

    def attend(self, rotary, queries, stored):
        keys, values = self.keys_and_values(rotary, queries.shape[1], stored)
        num_queries, num_keys = queries.shape[1], keys.shape[1]
        visible = Mask(causal=True, window=self.window).dense(num_queries, num_keys, queries.device)
        others = visible.tril(num_keys - num_queries - 1)
        return gaussian_attention(queries, self._log_sigma(), keys=keys, values=values, attn_mask=others)


class NoAttention(Kernel):
    has_bandwidth, attention_flops = False, 0
    is_drawn = False

    def __init__(self, config, layer):
        super().__init__(config, layer)
        del self.c_proj

    def init_weights(self) -> None:
        """It has none."""

    def project(self, x, value_embedding, rotary, positions):
        heads = self.heads(x)
        return heads, (heads,)

    def attend(self, rotary, queries, stored):
        return torch.zeros_like(queries)

    def forward(self, x, value_embedding, rotary, context):
        return self.mix(x, value_embedding, rotary, context).flatten(2)


KERNELS = {
    "gaussian": GKAAttention,
    "mean": MeanAttention,
    "previous": PreviousAttention,
    "tied-softmax": TiedSoftmaxAttention,
    "others": OthersAttention,
    "none": NoAttention,
}


# Another way to meet the token before


class Mixed(Attention):
    """A layer with a `mixing`: a pairing of keys and values, or a blend of its input.

    With a blend, a token's queries and keys need the inputs of those before it. A cache therefore holds the layer's
    inputs, and embeddings of values, as (B, n, H, D) each; every pass projects all of them again.
    """

    def __init__(self, config, layer):
        super().__init__(config, layer)
        blends = {"token-shift": lambda: TokenShift(config.n_embd, layer / config.n_layer)}
        blends["canon"] = lambda: Canon(config.n_embd)
        self.blend = blends.get(config.layer_mixing(layer), lambda: None)()

    def make_pairing(self):
        mixing = self.config.layer_mixing(self.layer)
        if mixing == "kv-shift":
            return KVShift(self.config.n_head)
        if mixing == "value-share":
            return ValueShare(self.config.n_head, self.config.head_dim, super().make_pairing())
        return PartialOffset(self.config.head_dim) if mixing == "partial" else None

    def init_weights(self):
        super().init_weights()
        (self.blend or self.pairing).init_weights()

    @property
    def activation_widths(self):
        own = (self.blend or self.pairing).activation_widths
        return super().activation_widths - (self.pairing is not None) + own

    @property
    def attention_flops(self):
        """A share of KV shift meets all channels of its head."""
        shares = 4 if isinstance(self.pairing, KVShift) else 0
        return super().attention_flops + 6 * shares * (self.config.n_embd - self.config.n_head)

    @property
    def is_drawn(self):
        return super().is_drawn and self.pairing is None  # else a slot is of two tokens

    @property
    def cached_tensors(self):
        return super().cached_tensors if self.blend is None else 1 + (self.ve_gate is not None)

    @property
    def derives_keys(self):
        return super().derives_keys and self.blend is None

    def mix(self, x, value_embedding, rotary, context):
        if self.blend is None:
            return super().mix(x, value_embedding, rotary, context)
        stored = tuple(self.heads(tensor) for tensor in (x, value_embedding) if tensor is not None)
        return context.attend(self, rotary, stored[0], stored)

    def attend(self, rotary, queries, stored):
        if self.blend is None:
            return super().attend(rotary, queries, stored)
        x, *embedding = (tensor.flatten(2) for tensor in stored)
        num_queries, num_tokens = queries.shape[1], x.shape[1]
        everyone, stored = self.project(self.blend(x), *(embedding or [None]), rotary, slice(0, num_tokens))
        last = everyone if num_queries == num_tokens else everyone[:, num_tokens - num_queries :]
        return super().attend(rotary, last, stored)

    def attend_cached(self, rotary, queries, stored, lengths):
        return Attention.attend_cached(self, rotary, queries, stored, lengths)

    def slots(self, x, value_embedding, rotary):
        return super().slots(x if self.blend is None else self.blend(x), value_embedding, rotary)


class MixedSoftmax(Mixed, SoftmaxAttention): ...


class MixedVLT(Mixed, VLTAttention): ...


class MixedGKA(Mixed, GKAAttention): ...


class MixedMean(Mixed, MeanAttention): ...


class MixedPrevious(Mixed, PreviousAttention): ...


class MixedTiedSoftmax(Mixed, TiedSoftmaxAttention): ...


class MixedOthers(Mixed, OthersAttention): ...


MIXED = (MixedSoftmax, MixedVLT, MixedGKA, MixedMean, MixedPrevious, MixedTiedSoftmax, MixedOthers)


def varied(config, layer: int, kind: type[Attention]) -> type[Attention]:
    """The class of a layer of a `config.StudyShape`, of the class of its kind."""
    if kind is GKAAttention:
        kind = KERNELS[config.kernel]
    if config.layer_mixing(layer) == "none":
        return kind
    return next(mixed for mixed in MIXED if mixed.__bases__[1] is kind)
