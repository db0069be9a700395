"""Gaussian kernel attention and value-less attention (VLT) for timm's `attn_layer`. Adding a kind is a class and a line in ATTENTION.

timm builds the class as cls(dim, num_heads=..., qkv_bias=..., ...) and calls it as attn(x, attn_mask=..., is_causal=...).
Legend: B batch, N tokens, H heads, D head_dim, C = H * D.
"""

import functools

import torch
from timm.layers import maybe_add_mask, resolve_self_attn_mask, use_fused_attn
from timm.models import VisionTransformer
from torch import nn

from gka import (
    GaussianKernelAttention,
    dot_product_attention,
    gaussian_attention,
    initial_log_sigma,
    log_kernel,
    without_autocast,
)


class TimmAttention(nn.Module):
    """What both kinds share: the call, dropout, and the explicit path that builds W for hooks, masks and attention dropout.

    A subclass gives `mix` (fused: the heads' outputs, (B, N, H, D)), `weights` (W, (B, H, N, N)) and `values` ((B, N, H, D)), and has a `proj`.
    Like timm's own attention it builds W when `timm.layers.set_fused_attn(False)` was called before the model was built; W then passes
    through `attn_drop`, where timm's AttentionExtract finds it.
    """

    num_heads: int

    def _init_dropout(self, attn_drop: float, proj_drop: float, qk_norm: bool, scale_norm: bool) -> None:
        if qk_norm or scale_norm:
            raise ValueError(f"{type(self).__name__} has no qk_norm or scale_norm: leave both False")
        self.fused_attn = use_fused_attn()
        self.attn_drop, self.proj_drop = nn.Dropout(attn_drop), nn.Dropout(proj_drop)

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """x: the normalised tokens, (B, N, C). attn_mask: bool (True = may look) or added to the logits, broadcast to (B, H, N, N)."""
        heads = x.unflatten(-1, (self.num_heads, -1))
        if self.fused_attn and attn_mask is None and not (self.training and self.attn_drop.p):
            y = self.mix(x, heads, is_causal)
        else:
            weights = self.attn_drop(self.weights(x, heads, attn_mask, is_causal))
            values = self.values(heads)
            y = torch.einsum("bhij,bjhd->bihd", weights.to(values.dtype), values)
        return self.proj_drop(self.proj(y.flatten(2)))


class GKA(TimmAttention, GaussianKernelAttention):
    """Paper section 3: no W_Q, W_K, W_V; one bandwidth per head and W_O are learned. State: log_sigma (H,) float32, proj.

    Class attributes are the settings timm's constructor call has no room for; `with_settings` makes a subclass with others.
    """

    sigma_squared_start: float | None = None  # None: sqrt(D)
    operator: str = "auto"  # the `impl` of gaussian_attention; "sdpa" exports without an operator of ours

    def __init__(self, dim: int, num_heads: int = 8, qkv_bias: bool = False, qk_norm: bool = False, scale_norm: bool = False,
                 proj_bias: bool = True, attn_drop: float = 0.0, proj_drop: float = 0.0, norm_layer=None, device=None, dtype=None, **later):  # fmt: skip
        GaussianKernelAttention.__init__(
            self, dim, num_heads, bias=proj_bias, sigma_squared=self.sigma_squared_start, impl=self.operator
        )
        self._init_dropout(attn_drop, proj_drop, qk_norm, scale_norm)
        self.to(device=device)
        self.proj.to(dtype=dtype)

    def init_weights(self) -> None:
        """Refill the bandwidths; timm has initialised `proj` before it calls this."""
        with torch.no_grad():
            self.log_sigma.copy_(initial_log_sigma(self.num_heads, self.sigma_squared))

    def _log_sigma(self) -> torch.Tensor:
        return self.log_sigma.to(torch.promote_types(self.log_sigma.dtype, torch.float32))

    def values(self, heads):
        return heads

    def mix(self, x, heads, is_causal):
        return gaussian_attention(heads, self._log_sigma(), causal=is_causal, impl=self.impl)

    def weights(self, x, heads, attn_mask, is_causal):
        # In logs, so that a mask that hides a token from itself leaves something to normalise.
        with without_autocast(x.device.type):
            heads = heads.to(torch.promote_types(heads.dtype, torch.float32)).transpose(1, 2)
            logits = log_kernel(heads, heads, self._log_sigma())
        return maybe_add_mask(logits, resolve_self_attn_mask(x.shape[1], logits, attn_mask, is_causal)).softmax(dim=-1)


class VLT(TimmAttention):
    """Value-less transformer (paper section 4.4): W_Q and W_K are learned, the values are the features themselves. State: qk, value_bias, proj.

    value_bias adds the bias that W_V had. It changes nothing a W_O bias cannot (rows of W sum to 1), but only with it does VLT-Ti have the
    paper's 5.28M parameters.
    """

    keep_value_bias: bool = True

    def __init__(self, dim: int, num_heads: int = 8, qkv_bias: bool = False, qk_norm: bool = False, scale_norm: bool = False,
                 proj_bias: bool = True, attn_drop: float = 0.0, proj_drop: float = 0.0, norm_layer=None, device=None, dtype=None, **later):  # fmt: skip
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads must divide dim, got dim={dim} and num_heads={num_heads}")
        placed = dict(device=device, dtype=dtype)
        self.num_heads = num_heads
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias, **placed)
        self.value_bias = nn.Parameter(torch.zeros(dim, **placed)) if qkv_bias and self.keep_value_bias else None
        self._init_dropout(attn_drop, proj_drop, qk_norm, scale_norm)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **placed)

    def init_weights(self) -> None:
        if self.value_bias is not None:
            nn.init.zeros_(self.value_bias)

    def reset_parameters(self) -> None:
        """Refill everything, for example after building on the meta device."""
        self.qk.reset_parameters()
        self.proj.reset_parameters()
        self.init_weights()

    def values(self, heads):
        return heads if self.value_bias is None else heads + self.value_bias.unflatten(-1, (self.num_heads, -1))

    def _queries_and_keys(self, x):
        return self.qk(x).unflatten(-1, (2, self.num_heads, -1)).unbind(2)  # (B, N, H, D) each

    def mix(self, x, heads, is_causal):
        queries, keys = self._queries_and_keys(x)
        return dot_product_attention(queries, keys, self.values(heads).to(queries.dtype), causal=is_causal)

    def weights(self, x, heads, attn_mask, is_causal):
        queries, keys = self._queries_and_keys(x)
        logits = torch.einsum("bihd,bjhd->bhij", queries, keys) * queries.shape[-1] ** -0.5
        return maybe_add_mask(logits, resolve_self_attn_mask(x.shape[1], logits, attn_mask, is_causal)).softmax(dim=-1)


def operators_of(model: nn.Module) -> list[str]:
    """Which implementations of the operator train this timm model's GKA layers where they are, without repetition."""
    tokens = model.patch_embed.num_patches + model.num_prefix_tokens if isinstance(model, VisionTransformer) else 1
    return sorted({layer.chosen_impl(tokens) for layer in model.modules() if isinstance(layer, GKA)})


ATTENTION = {"gka": GKA, "vlt": VLT}


def with_settings(kind: str, **settings) -> type[TimmAttention]:
    """The class of `kind` with other class attributes; timm takes a class, but neither a partial nor a function. Its layers can be pickled."""
    return _class_with(kind, tuple(sorted(settings.items()))) if settings else ATTENTION[kind]


@functools.cache
def _class_with(kind: str, settings: tuple) -> type[TimmAttention]:
    base = ATTENTION[kind]
    return type(
        base.__name__,
        (base,),
        {**dict(settings), "__reduce__": lambda layer: (_empty_layer, (kind, settings), layer.__dict__)},
    )


def _empty_layer(kind: str, settings: tuple) -> TimmAttention:
    cls = _class_with(kind, settings)
    return cls.__new__(cls)
