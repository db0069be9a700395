"""The layer with the signature of torch.nn.MultiheadAttention, for models that are built around that."""

from typing import Any

import torch
from torch import nn

from gka.api import gaussian_attention, gaussian_weights
from gka.bandwidth import at_least_float32
from gka.layer import GaussianKernelAttention, split_heads, weight_of
from gka.request import Tables
from gka.validation import readable


class GaussianMultiheadAttention(GaussianKernelAttention):
    """`GaussianKernelAttention` in the place of `torch.nn.MultiheadAttention`, as in `nn.TransformerEncoderLayer`:

        layer = nn.TransformerEncoderLayer(256, 4, batch_first=True)
        layer.self_attn = GaussianMultiheadAttention(256, 4, batch_first=True, preset="text")

    Queries, keys and values are the heads of what is given, without projections; `log_sigma` (num_heads), `out_proj`
    and what a preset adds are learned. Weights are not dropped out. torch's fast path of inference, which reads
    projections, is off.

    Args:
      embed_dim, num_heads, bias, batch_first: as in torch; num_heads must divide embed_dim (ValueError otherwise).
      sigma_squared, preset, options: as in `GaussianKernelAttention`, but rotary positions only if rotary is given, as
        models around torch's layer add positions to their tokens. With "image" the patches are a square behind one
        token. What is not the paper's is for self-attention alone.
    """

    # What torch's layers look at before they take their fast path.
    _qkv_same_embed_dim = False
    in_proj_weight = in_proj_bias = None
    out_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        batch_first: bool = False,
        sigma_squared: float | None = None,
        preset: str | None = None,
        rotary: float | Tables | bool = False,
        **options: Any,
    ) -> None:
        additions = dict(rotary=rotary, **options)
        super().__init__(embed_dim, num_heads, preset=preset, bias=bias, sigma_squared=sigma_squared, **additions)
        self.embed_dim, self.batch_first = embed_dim, batch_first
        self.is_paper = preset is None and not any(additions.values())
        self.out_proj = self._modules.pop("proj")  # type: ignore[assignment]  # torch's name

    @property
    def proj(self) -> nn.Linear:  # type: ignore[override]
        """`out_proj`, by the name of `GaussianKernelAttention`."""
        return self.out_proj

    def forward(  # type: ignore[override]
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
        ValueError where it is needed and not given, and for other keys than the query, or values than the keys, in a
        layer that is not in the paper's form.
        """
        x, keys, values = (t if self.batch_first else t.transpose(0, 1) for t in (query, key, value))
        if is_causal and x.shape[1] != keys.shape[1]:
            if attn_mask is None:
                raise ValueError("is_causal=True needs attn_mask where there are not as many keys as queries")
            is_causal = False
        visible = None if is_causal or attn_mask is None else self._as_visible(attn_mask, len(x))
        mask: dict[str, Any] = dict(key_padding_mask=_as_padding(key_padding_mask), attn_mask=visible)
        context = None if key is query else keys
        if value is key:
            mixed = super().forward(x, context, need_weights=need_weights, is_causal=is_causal, **mask)
        elif self.is_paper:
            mixed = self._with_values(x, context, values, need_weights, dict(causal=is_causal, **mask))
        else:
            raise ValueError("values must be the keys, unless the layer is in the paper's form: leave preset out")
        y, weights = mixed if isinstance(mixed, tuple) else (mixed, None)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _with_values(self, x, keys, values, need_weights: bool, mask: dict[str, Any]):
        """`forward` in the paper's form with values that are not the keys: (output, weights) or the output alone."""
        sizes = self.dim, self.num_heads, weight_of(self.out_proj)
        features, values = split_heads("query", x, *sizes), split_heads("value", values, *sizes)
        keys = None if keys is None else split_heads("key", keys, *sizes)
        log_sigma = at_least_float32(self.log_sigma)
        y = self.out_proj(gaussian_attention(features, log_sigma, keys=keys, values=values, **mask).flatten(-2))
        return (y, gaussian_weights(features, log_sigma, keys=keys, **mask)) if need_weights else y

    def _as_visible(self, mask: torch.Tensor, batch: int) -> torch.Tensor:
        """torch's attn_mask, (Tq, Tk) or (B * H, Tq, Tk), as `gaussian_attention` takes it."""
        mask = mask.unflatten(0, (batch, self.num_heads)) if mask.dim() == 3 else mask
        return ~mask if mask.dtype == torch.bool else mask


def _as_padding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """torch's key_padding_mask as bool: its layers hand on a float one, minus infinity for padding."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    hidden = torch.isneginf(mask)
    if readable(mask) and bool((mask.masked_fill(hidden, 0.0) != 0).any()):
        raise ValueError("key_padding_mask must be bool, or hold 0 and minus infinity alone")
    return hidden


def replace_multihead(
    model: nn.Module, sigma_squared: float | None = None, preset: str | None = None, **options: Any
) -> nn.Module:
    """The model, with a new `GaussianMultiheadAttention` in the place of every `torch.nn.MultiheadAttention` in it.

    Projections to queries, keys and values are gone with what they had learned; the output projections stay.
    sigma_squared, preset, options: of the new layers, but cross attention, which is `multihead_attn` of torch's decoder
    layers and what has "cross" in its name, stays in the paper's form. Raises ValueError for layers whose keys and
    values have other widths than the queries, or that add keys of their own, and for a model without such layers.
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
    replaced = {}
    for parent, name, old in places:
        is_cross = "cross" in name.lower() or (isinstance(parent, nn.TransformerDecoderLayer) and name != "self_attn")
        form = dict(preset=None) if is_cross else dict(preset=preset, **options)
        replaced[old] = _in_place_of(name, old, sigma_squared=sigma_squared, **form)
    if not replaced:
        raise ValueError("the model has no torch.nn.MultiheadAttention that could be replaced")
    for parent, name, old in places:
        setattr(parent, name, replaced[old])
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # of its fast path
    return model


def _in_place_of(name: str, old: nn.MultiheadAttention, **options: Any) -> GaussianMultiheadAttention:
    if not old._qkv_same_embed_dim:
        raise ValueError(f"{name} has keys or values of another width, which need projections")
    if old.bias_k is not None or old.add_zero_attn:
        raise ValueError(f"{name} adds keys of its own (add_bias_kv, add_zero_attn), which is not served")
    new = GaussianMultiheadAttention(
        old.embed_dim, old.num_heads, bias=old.out_proj.bias is not None, batch_first=old.batch_first, **options
    )
    new.out_proj = old.out_proj
    return new.to(old.out_proj.weight.device).train(old.training)
