"""The layer with the signature of torch.nn.MultiheadAttention, for models that are built around that."""

from typing import Any

import torch
from torch import nn

from gka.api import gaussian_attention, gaussian_weights
from gka.bandwidth import at_least_float32, initial_log_sigma
from gka.layer import split_heads, weight_of
from gka.validation import readable


class GaussianMultiheadAttention(nn.Module):
    """`GaussianKernelAttention` in the place of `torch.nn.MultiheadAttention`, as in `nn.TransformerEncoderLayer`:

        layer = nn.TransformerEncoderLayer(256, 4, batch_first=True)
        layer.self_attn = GaussianMultiheadAttention(256, 4, batch_first=True)

    Queries, keys and values are the heads of what is given, without projections; `log_sigma` (num_heads) and `out_proj`
    are learned. Weights are not dropped out. torch's fast path of inference, which reads projections, is off.

    Args:
      embed_dim, num_heads, bias, batch_first: as in torch; num_heads must divide embed_dim (ValueError otherwise).
      sigma_squared: starting sigma^2 of every head; None means sqrt(head_dim).
    """

    # What torch's layers look at before they take their fast path.
    _qkv_same_embed_dim = False
    in_proj_weight = in_proj_bias = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        batch_first: bool = False,
        sigma_squared: float | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim, got {embed_dim=} and {num_heads=}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.batch_first = batch_first
        start = self.head_dim**0.5 if sigma_squared is None else sigma_squared
        self.log_sigma = nn.Parameter(initial_log_sigma(num_heads, start))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output, weights or None), as torch's for batches of three dimensions.

        Masks mean what they mean there: True, or minus infinity, where a query must not look. Float values that are not
        0 or minus infinity are added to the exponents in attn_mask, and refused (ValueError) in key_padding_mask.
        is_causal: attn_mask is the causal one, and need not be given or read where there are as many keys as queries.
        ValueError where it is needed and not given.
        """
        heads = [self._heads(name, t) for name, t in (("query", query), ("key", key), ("value", value))]
        features, keys, values = heads[0], None if key is query else heads[1], None if value is key else heads[2]
        if is_causal and features.shape[1] != heads[1].shape[1]:
            if attn_mask is None:
                raise ValueError("is_causal=True needs attn_mask where there are not as many keys as queries")
            is_causal = False
        padding = None if key_padding_mask is None else _as_padding(key_padding_mask)
        visible = None if is_causal or attn_mask is None else self._as_visible(attn_mask, len(features))
        mask: dict[str, Any] = dict(keys=keys, causal=is_causal, key_padding_mask=padding, attn_mask=visible)
        log_sigma = at_least_float32(self.log_sigma)
        y = self.out_proj(gaussian_attention(features, log_sigma, values=values, **mask).flatten(-2))
        weights = gaussian_weights(features, log_sigma, **mask) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        by_batch = x if self.batch_first else x.transpose(0, 1)
        return split_heads(name, by_batch, self.embed_dim, self.num_heads, weight_of(self.out_proj))

    def _as_visible(self, mask: torch.Tensor, batch: int) -> torch.Tensor:
        """torch's attn_mask, (Tq, Tk) or (B * H, Tq, Tk), as `gaussian_attention` takes it."""
        mask = mask.unflatten(0, (batch, self.num_heads)) if mask.dim() == 3 else mask
        return ~mask if mask.dtype == torch.bool else mask


def _as_padding(mask: torch.Tensor) -> torch.Tensor:
    """torch's key_padding_mask as bool: its layers hand on a float one, minus infinity for padding."""
    if mask.dtype == torch.bool:
        return mask
    hidden = torch.isneginf(mask)
    if readable(mask) and bool((mask.masked_fill(hidden, 0.0) != 0).any()):
        raise ValueError("key_padding_mask must be bool, or hold 0 and minus infinity alone")
    return hidden


def replace_multihead(model: nn.Module, sigma_squared: float | None = None) -> nn.Module:
    """The model, with a new `GaussianMultiheadAttention` in the place of every `torch.nn.MultiheadAttention` in it.

    Projections to queries, keys and values are gone with what they had learned; the output projections stay. Raises
    ValueError for layers whose keys and values have other widths than the queries, or that add keys of their own, and
    for a model without such layers.
    """
    if isinstance(model, nn.MultiheadAttention):
        raise ValueError("the model is a MultiheadAttention itself: build a GaussianMultiheadAttention")
    places = [
        (parent, name, old)
        for parent in model.modules()
        for name, old in parent._modules.items()
        if isinstance(old, nn.MultiheadAttention)
    ]
    # All of them are checked before the model is changed. A layer that stands in two places stays one.
    replaced = {old: _in_place_of(name, old, sigma_squared) for _, name, old in places}
    if not replaced:
        raise ValueError("the model has no torch.nn.MultiheadAttention that could be replaced")
    for parent, name, old in places:
        setattr(parent, name, replaced[old])
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # of its fast path
    return model


def _in_place_of(name: str, old: nn.MultiheadAttention, sigma_squared: float | None) -> GaussianMultiheadAttention:
    if not old._qkv_same_embed_dim:
        raise ValueError(f"{name} has keys or values of another width, which need projections")
    if old.bias_k is not None or old.add_zero_attn:
        raise ValueError(f"{name} adds keys of its own (add_bias_kv, add_zero_attn), which is not served")
    new = GaussianMultiheadAttention(
        old.embed_dim, old.num_heads, bias=old.out_proj.bias is not None, batch_first=old.batch_first,
        sigma_squared=sigma_squared,
    )  # fmt: skip
    new.out_proj = old.out_proj
    return new.to(old.out_proj.weight.device).train(old.training)
