"""Attention for timm's vision transformers: Gaussian kernel attention, value-less attention (VLT), and a kind by layer.

timm builds a layer as cls(dim, num_heads=..., qkv_bias=..., ...) and calls it as attn(x, attn_mask=..., is_causal=...).
A class here names its row of gka/kinds.py; timm names, accounting and evaluation follow from the two.
Legend: B batch, N tokens, H heads, D head_dim, C = H * D.
"""

import math
from typing import ClassVar

import torch
from timm.layers import Attention, DiffAttention, maybe_add_mask, resolve_self_attn_mask, use_fused_attn
from timm.models import VisionTransformer
from torch import nn

from deit_gka.model.offsets import SpatialOffsets, ValueOffsetProjection
from gka import GaussianKernelAttention, dot_product_attention, gaussian_attention, initial_log_sigma, log_kernel
from gka.bandwidth import at_least_float32


class Softmax(Attention):
    """timm's attention with spatial offsets of the values (offsets.py; "" = none), an option of all our kinds."""

    kind = "softmax"
    SETTINGS = ("spatial_offsets",)

    def __init__(self, dim: int, num_heads: int = 8, qkv_bias: bool = False, spatial_offsets: str = "", **arguments):
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, **arguments)
        self.offsets = SpatialOffsets(spatial_offsets, num_heads) if spatial_offsets else None
        if self.offsets:
            placed = {name: arguments.get(name) for name in ("device", "dtype")}
            self.qkv = ValueOffsetProjection(dim, qkv_bias, self.offsets, num_heads, **placed)


class TimmAttention(nn.Module):
    """Base of our kinds: the call, dropout, and the path that builds W for hooks, masks and attention dropout.

    A subclass has `mix` (fused: the heads' outputs, (B, N, H, D)), `logits` (of W, (B, H, N, N)) and `proj`. Like
    timm's own attention it builds W when `set_fused_attn(False)` was called before the model was built; W then passes
    through `attn_drop`, where timm's AttentionExtract finds it.
    """

    kind: ClassVar[str]
    SETTINGS: ClassVar[tuple[str, ...]] = ()  # arguments of __init__ for which timm's call has no room
    num_heads: int
    offsets: SpatialOffsets | None

    def _init_shared(
        self, attn_drop=0.0, proj_drop=0.0, qk_norm=False, scale_norm=False, spatial_offsets="", qkv_bias=False,
        norm_layer=None,
    ) -> None:  # fmt: skip
        """Take the arguments that every kind has, most of them timm's; qkv_bias and norm_layer have no effect."""
        if qk_norm or scale_norm:
            raise ValueError(f"{type(self).__name__} has no qk_norm or scale_norm: leave both False")
        self.fused_attn = use_fused_attn()
        self.offsets = SpatialOffsets(spatial_offsets, self.num_heads) if spatial_offsets else None
        self.attn_drop, self.proj_drop = nn.Dropout(attn_drop), nn.Dropout(proj_drop)

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """Mix the tokens x, (B, N, C), which are normalised, and project: (B, N, C).

        attn_mask: bool (True = may look) or added to the logits, broadcast to (B, H, N, N); see `softmax`.
        """
        heads = x.unflatten(-1, (self.num_heads, -1))
        if self.fused_attn and not (self.training and self.attn_drop.p):
            y = self.mix(x, heads, attn_mask, is_causal)
        else:
            y = mixed(self.attn_drop(softmax(self.logits(x, heads), attn_mask, is_causal)), self.values(heads))
        return self.proj_drop(self.proj(y.flatten(2)))

    def values(self, heads: torch.Tensor) -> torch.Tensor:
        """The values that W mixes: features, with VLT's bias and after spatial offsets, (B, N, H, D)."""
        bias = getattr(self, "value_bias", None)
        values = heads if bias is None else heads + bias.unflatten(-1, (self.num_heads, -1))
        return values if self.offsets is None else self.offsets(values)


class GKA(TimmAttention, GaussianKernelAttention):
    """Paper section 3: no W_Q, W_K, W_V; a bandwidth per head and W_O are learned. State: log_sigma (H,) float32, proj.

    sigma_squared: start of every head's sigma^2; None = sqrt(D).
    channel_bandwidths: ours, not the paper's: the kernel compares features times exp(log_scale), a learned vector (C,)
    that starts at 0, which gives every channel a bandwidth of its own; the values stay as they are.
    impl: as in `gaussian_attention`; "sdpa" can be exported without an operator of ours.
    """

    kind = "gka"
    SETTINGS = ("sigma_squared", "channel_bandwidths", "impl", "spatial_offsets")

    def __init__(self, dim: int, num_heads: int = 8, proj_bias: bool = True, device=None, dtype=None, **settings):
        kernel = settings.keys() & {"sigma_squared", "channel_bandwidths", "impl"}
        kernel = {name: settings.pop(name) for name in kernel}
        GaussianKernelAttention.__init__(self, dim, num_heads, bias=proj_bias, **kernel)
        self._init_shared(**settings)
        self.to(device=device)
        self.proj.to(dtype=dtype)

    def init_weights(self) -> None:
        """Refill the bandwidths; timm has initialised `proj` before it calls this."""
        with torch.no_grad():
            self.log_sigma.copy_(initial_log_sigma(self.num_heads, self.sigma_squared))
            if self.log_scale is not None:
                self.log_scale.zero_()

    def _log_sigma(self) -> torch.Tensor:
        return at_least_float32(self.log_sigma)

    def mix(self, x, heads, attn_mask, is_causal):
        values = None if self.offsets is None and self.log_scale is None else self.values(heads)
        mask = dict(causal=is_causal, attn_mask=attn_mask)
        return gaussian_attention(self.scaled(heads), self._log_sigma(), values=values, impl=self.impl, **mask)

    def logits(self, x, heads):  # in logs, so that a mask that hides a token from itself leaves something to normalise
        features = self.scaled(heads)
        return log_kernel(features, features, self._log_sigma())


class VLT(TimmAttention):
    """Value-less transformer (paper section 4.4): W_Q and W_K are learned, the values are the features themselves.

    State: qk, value_bias, proj. value_bias keeps the bias that W_V had. It changes nothing that a bias of W_O cannot
    (rows of W sum to 1), but only with it does VLT-Ti have the paper's 5.28M parameters.
    """

    kind = "vlt"
    SETTINGS = ("value_bias", "spatial_offsets")

    def __init__(self, dim: int, num_heads: int = 8, qkv_bias=False, proj_bias=True, value_bias=True, **shared):
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads must divide dim, got dim={dim} and num_heads={num_heads}")
        placed = {name: shared.pop(name, None) for name in ("device", "dtype")}
        self.num_heads = num_heads
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias, **placed)
        self.value_bias = nn.Parameter(torch.zeros(dim, **placed)) if qkv_bias and value_bias else None
        self._init_shared(**shared)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **placed)

    def init_weights(self) -> None:
        if self.value_bias is not None:
            nn.init.zeros_(self.value_bias)

    def reset_parameters(self) -> None:
        """Refill everything, for example after building on the meta device."""
        self.qk.reset_parameters()
        self.proj.reset_parameters()
        self.init_weights()

    def _queries_and_keys(self, x):
        return self.qk(x).unflatten(-1, (2, self.num_heads, -1)).unbind(2)  # (B, N, H, D) each

    def mix(self, x, heads, attn_mask, is_causal):
        queries, keys = self._queries_and_keys(x)
        return mix_dot_product(queries, keys, self.values(heads), attn_mask, is_causal)

    def logits(self, x, heads):
        queries, keys = self._queries_and_keys(x)
        return dot_product_logits(queries, keys)


# The class of every kind.
ATTENTION: dict[str, type[nn.Module]] = {"softmax": Softmax, "gka": GKA, "vlt": VLT}

# Functions, which torch.fx records as one node each (gka/layer.py): it does not know whether there is a mask.
for name in ("gaussian_attention", "mix_dot_product", "softmax", "log_kernel", "at_least_float32"):
    torch.fx.wrap(name)


def mix_dot_product(queries, keys, values, attn_mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
    """The heads' outputs of softmax attention; with a mask, which the baseline does not take, by W."""
    values = values.to(queries.dtype)
    if attn_mask is None:
        return dot_product_attention(queries, keys, values, causal=is_causal)
    return mixed(softmax(dot_product_logits(queries, keys), attn_mask, is_causal), values)


def dot_product_logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bihd,bjhd->bhij", queries, keys) * queries.shape[-1] ** -0.5


def mixed(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """W, (B, H, N, N), times values, (B, N, H, D)."""
    return torch.einsum("bhij,bjhd->bihd", weights.to(values.dtype), values)


def softmax(logits: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
    """W, (B, H, N, N), of logits of that shape. A row whose mask hides everything is 0, as in torch's fused softmax."""
    logits = maybe_add_mask(logits, resolve_self_attn_mask(logits.shape[-1], logits, attn_mask, is_causal))
    hidden = (logits == -math.inf).all(dim=-1, keepdim=True)
    return logits.masked_fill(hidden, 0).softmax(dim=-1).masked_fill(hidden, 0)


def kind_of(layer: nn.Module) -> str:
    """The kind of a built attention layer, ours or timm's."""
    return getattr(layer, "kind", "softmax")


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The self-attention layers of a model, in order, where they are ours or timm's own class for ViTs."""
    return [module for module in model.modules() if isinstance(module, (TimmAttention, Attention, DiffAttention))]


def operators_of(model: nn.Module) -> list[str]:
    """Which implementations of the operator train this model's GKA layers where they are, without repetition."""
    tokens = model.patch_embed.num_patches + model.num_prefix_tokens if isinstance(model, VisionTransformer) else 1
    return sorted({layer.chosen_impl(tokens) for layer in model.modules() if isinstance(layer, GKA)})
