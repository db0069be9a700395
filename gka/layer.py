"""GaussianKernelAttention: the drop-in layer.

Split heads, mix with the kernel, project with W_O (paper section 3.2).
"""

from numbers import Integral
from typing import Any

import torch
from torch import nn

from gka import offsets, validation
from gka.api import gaussian_attention, gaussian_weights, select_impl
from gka.autocast import autocasts
from gka.bandwidth import at_least_float32, initial_log_sigma
from gka.dispatch import check_impl
from gka.masking import document_bounds
from gka.options import Options
from gka.padding_and_masks import in_order, in_place, mask_in_order, tokens_first, weights_in_place

# torch.fx records each call as one node, as its tensors have no shapes and dtypes to look at.
NODES = ["split_heads", "cleared", "tokens_first", "in_order", "mask_in_order", "in_place", "weights_in_place"]
NODES += ["checked_context", "document_starts", "at_least_float32"]
for name in (*NODES, "gaussian_attention", "gaussian_weights"):
    torch.fx.wrap(name)


class GaussianKernelAttention(nn.Module):
    """Projection-free multi-head attention: no W_Q, W_K, W_V; `log_sigma` (num_heads, float32) and the output
    projection are learned, and `log_scale` (dim, float32) if channels have bandwidths.

    Args:
      dim: model width C; num_heads: H, must divide dim (ValueError otherwise). head_dim = dim / num_heads.
      bias: give W_O a bias.
      sigma_squared: starting sigma^2 of every head; None means sqrt(head_dim), the temperature of standard attention.
      causal, window, impl: as in `gaussian_attention`.
      head_norm: RMS-normalise every head first. Norms are then constant and the kernel needs no |x|^2 term (as
      nanochat's QK norm). A token of zeros has no such norm: hide it with key_padding_mask.
      channel_bandwidths: not the paper's. The kernel compares features times exp(log_scale), learned from 0, normalised
      again with head_norm; the values stay as they are. It is a Gaussian with a diagonal metric (automatic relevance
      determination: MacKay 1994, Neal 1996), for tokens whose norm has no weight per channel.
      head_offsets: not the paper's. A letter per head, tiled (`gka.offsets`): with PS half of the heads read the value
      of the token before a match, half that of the token after it. In a batch with padding every token has the one
      before it as its predecessor, whatever lies between them. Take head_norm with it, without which Triton has no
      gradients for heads with S, and sigma_squared = head_dim / 4.

    Input and output: (B, T, dim) in the weights' dtype, or autocast is on; TypeError for another dtype, ValueError for
    another shape. Expects normalised tokens (the paper's: after the block's LayerNorm). `.bfloat16()` and `.half()`
    work, but `log_sigma` is best kept float32: rounded, it learns in steps of 2^-8 or coarser. Keep it and `log_scale`
    out of weight decay; they are 1-D, as the usual rule for biases and norms expects.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        sigma_squared: float | None = None,
        causal: bool = False,
        window: int | None = None,
        head_norm: bool = False,
        channel_bandwidths: bool = False,
        head_offsets: str = "",
        impl: str = "auto",
    ) -> None:
        super().__init__()
        if not all(isinstance(size, Integral) for size in (dim, num_heads)):
            raise TypeError(f"dim and num_heads must be ints, got {type(dim).__name__} and {type(num_heads).__name__}")
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads must divide dim, got dim={dim} and num_heads={num_heads}")
        validation.check_mask(causal, window)
        check_impl(impl)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.sigma_squared = self.head_dim**0.5 if sigma_squared is None else sigma_squared
        self.causal, self.window, self.head_norm, self.impl = causal, window, head_norm, impl
        self.log_sigma = nn.Parameter(initial_log_sigma(num_heads, self.sigma_squared))
        self.log_scale = nn.Parameter(torch.zeros(dim)) if channel_bandwidths else None
        self.head_offsets, self.pairing = head_offsets, offsets.head_offsets(head_offsets, num_heads)
        if (letters := len(head_offsets)) > num_heads:
            raise ValueError(f"head_offsets {head_offsets} has {letters} letters but there are {num_heads} heads")
        self.proj = nn.Linear(dim, dim, bias=bias)

    def reset_parameters(self) -> None:
        """Refill the bandwidths and W_O, for example after building on the meta device."""
        with torch.no_grad():
            self.log_sigma.copy_(initial_log_sigma(self.num_heads, self.sigma_squared))
            if self.log_scale is not None:
                self.log_scale.zero_()
        self.proj.reset_parameters()

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Mix and project x, (B, T, dim), which looks at itself or, in cross attention, at `context`, (B, Tk, dim).

        key_padding_mask, attn_mask: as in `gaussian_attention`; padding of x, or of the context. For padded tokens of x
        W_O's bias comes out. cu_seqlens: as in `gaussian_attention`, for x of (1, N, dim) and self-attention; head
        offsets begin anew in each document. is_causal: for this call, as timm's blocks say it. need_weights: return W
        too, (B, H, T, Tk), which is built in O(T * Tk) memory; with head offsets column j is what is read of slot j
        (`gka.offsets`).
        """
        causal, own_keys = self.causal or is_causal, context is None
        mask: dict[str, Any] = dict(key_padding_mask=key_padding_mask, attn_mask=attn_mask, cu_seqlens=cu_seqlens)
        padding = None if self.pairing is None else key_padding_mask
        is_scaled = self.head_norm or self.channel_bandwidths
        if padding is not None and not own_keys and (causal or self.window is not None):
            raise ValueError("head_offsets with a padded context need a layer that is not causal and has no window")
        if key_padding_mask is not None and (padding is not None or is_scaled):
            tokens = cleared(x, context, mask, self.dim, self.num_heads)
            if padding is not None:  # the tokens come first, so that each follows the one before it
                order, queries = tokens_first(padding), x.shape[1]
                tokens = in_order(tokens, order)
                mask["attn_mask"] = None if attn_mask is None else mask_in_order(attn_mask, order, queries, own_keys)
                # Under a causal mask no token sees padding.
                mask |= dict(key_padding_mask=None, lengths=None if own_keys and causal else (~padding).sum(1))
            x, context = (tokens, None) if own_keys else (x, tokens)
        features, values = self._features_and_values("x", x)
        keys = None
        if context is not None:
            keys, values = self._features_and_values("context", checked_context(context, x, self.dim, cu_seqlens))
        if self.pairing is not None:
            starts = document_starts(features, mask)
            keys, values = self.pairing(features if keys is None else keys, values, starts)
        mask |= dict(keys=keys, causal=causal, window=self.window)
        log_sigma = at_least_float32(self.log_sigma)
        apart = values if self.log_scale is not None or self.pairing is not None else None
        y = gaussian_attention(features, log_sigma, values=apart, constant_norm=self.head_norm, impl=self.impl, **mask)
        weights = gaussian_weights(features, log_sigma, **mask) if need_weights else None
        if padding is not None:
            y = in_place(y, order, padding) if own_keys else y
            weights = None if weights is None else weights_in_place(weights, order, padding, own_keys)
        y = self.proj(y.flatten(-2))
        return y if weights is None else (y, weights)

    def _features_and_values(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._normalised(split_heads(name, x, self.dim, self.num_heads, weight_of(self.proj)))
        return values if self.log_scale is None else self._normalised(self.scaled(values)), values

    def _normalised(self, heads: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(heads, (self.head_dim,)) if self.head_norm else heads

    def scaled(self, heads: torch.Tensor) -> torch.Tensor:
        """heads, (B, T, H, D), with every channel on the scale on which the kernel compares it."""
        if self.log_scale is None:
            return heads
        return heads * self.log_scale.exp().unflatten(-1, (self.num_heads, self.head_dim)).to(heads.dtype)

    def chosen_impl(self, num_tokens: int) -> str:
        """Which implementation trains this layer on `num_tokens` tokens, in its weights' dtype and on their device."""
        x = self.proj.weight.new_empty((1, num_tokens, self.num_heads, self.head_dim), requires_grad=True)
        keys = torch.empty_like(x) if self.pairing is not None and self.pairing.moves_keys else None
        return select_impl(
            x, keys=keys, causal=self.causal, window=self.window, constant_norm=self.head_norm, impl=self.impl
        )

    @property
    def channel_bandwidths(self) -> bool:
        return self.log_scale is not None

    def extra_repr(self) -> str:
        names = ["num_heads", "head_dim", "causal", "window", "head_norm"]
        names += ["channel_bandwidths"] * self.channel_bandwidths + ["head_offsets"] * bool(self.head_offsets)
        return ", ".join(f"{name}={getattr(self, name)}" for name in names).removeprefix("num_")


def weight_of(projection: nn.Module) -> torch.Tensor | None:
    """The weight that multiplies what the projection gets, as it is; None for one that casts or quantises by itself."""
    weight = projection._parameters.get("weight") if isinstance(projection, nn.Linear) else None
    return weight if type(weight) in (torch.Tensor, nn.Parameter) else None


def split_heads(name: str, x: torch.Tensor, dim: int, num_heads: int, weight: torch.Tensor | None) -> torch.Tensor:
    """(B, T, dim) as (B, T, H, D). TypeError or ValueError, with `name`, for an x that `weight` cannot multiply."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape (B, T, dim), got {type(x).__name__}")
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ValueError(f"{name} must have shape (B, T, dim) with dim={dim}, got {tuple(x.shape)}")
    if weight is not None and weight.dtype in validation.FLOATING and x.dtype != weight.dtype:
        casts = autocasts(x.device.type) and torch.float64 not in (x.dtype, weight.dtype)  # float64 stays what it is
        if not (casts and x.dtype in validation.FLOATING):
            raise TypeError(
                f"{name} must have the dtype of the layer's weights, {weight.dtype}, got {x.dtype}: cast it or the "
                "layer with .to(), or use torch.autocast, which leaves float64 alone"
            )
    return x.unflatten(-1, (num_heads, dim // num_heads))


def cleared(x: torch.Tensor, context: torch.Tensor | None, mask: dict, dim: int, num_heads: int) -> torch.Tensor:
    """The context, or x without one, with zeros for padding: a NaN there would reach the gradient of a scale or norm.

    Raises TypeError or ValueError, naming the argument.
    """
    queries = split_heads("x", x, dim, num_heads, None)
    tokens = x if context is None else checked_context(context, x, dim)
    validation.check_padding_and_mask(queries, tokens.shape[1], Options(**mask))
    return tokens.masked_fill(mask["key_padding_mask"][..., None], 0)


def document_starts(features: torch.Tensor, mask: dict) -> torch.Tensor | None:
    """Where the document of every token begins, (T,), from cu_seqlens; None without. Raises TypeError or ValueError."""
    if mask["cu_seqlens"] is None:
        return None
    validation.check_padding_and_mask(features, features.shape[1], Options(**mask))
    return document_bounds(mask["cu_seqlens"], features.shape[1])[0]


def checked_context(
    context: torch.Tensor, x: torch.Tensor, dim: int, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """The context, if it is features beside x, (B, T, dim). TypeError or ValueError otherwise, such as for a mask."""
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens is for self-attention: give no context with it")
    is_tensor = isinstance(context, torch.Tensor)
    has_dtype = is_tensor and context.is_floating_point()
    if has_dtype and context.dim() == 3 and context.shape[0] == x.shape[0] and context.shape[2] == dim:
        return context
    actual = f"{tuple(context.shape)} in {context.dtype}" if is_tensor else type(context).__name__
    raise (ValueError if has_dtype else TypeError)(
        f"context, the second argument, must be features of shape (B, Tk, dim) = ({x.shape[0]}, *, {dim}), "
        f"got {actual}; masks are given by name: key_padding_mask=... or attn_mask=..."
    )
