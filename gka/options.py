"""The request that the door makes of a call.

It is made in three steps: autocast's dtype, all checks (validation.py), and the form that costs least: keys that no
query sees are cut off, conditions of the mask that hide nothing are dropped, and padding on the right is lengths.
"""

from typing import Any

import torch

from gka import validation
from gka.autocast import to_autocast_dtype
from gka.masking import Mask
from gka.padding_and_masks import several_documents, simplest_padding
from gka.request import GaussianRequest, SoftmaxRequest

EPS = 1e-6


def gaussian_request(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    *,
    causal: bool = False,
    window: int | None = None,
    lengths: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    constant_norm: bool = False,
    eps: float = EPS,
    keep_hidden_keys: bool = False,
    names: tuple[str, str] = ("keys", "values"),
    **of_decoding: Any,
) -> GaussianRequest:
    """The request for the arguments of `gaussian_attention`; TypeError or ValueError naming the argument.

    names: what errors call keys and values. of_decoding: the other options of `GaussianRequest`, those that are set;
    they count the tokens of a cache from the first.
    """
    x, keys, values = to_autocast_dtype(x, keys, values)
    validation.check_features_and_mask((x, keys, values), causal, window, ("x", *names))
    validation.check_log_sigma(log_sigma, x)
    validation.check_eps(eps)
    hiding = lengths, key_padding_mask, attn_mask, cu_seqlens
    hides_tokens = any(t is not None for t in hiding)
    if hides_tokens:
        validation.check_padding_and_mask(x, keys.shape[1], *hiding)
    if of_decoding:
        validation.check_cache_options(x, keys.shape[1], **of_decoding)
    lengths, key_padding_mask = simplest_padding(lengths, key_padding_mask, keys.shape[1])
    rotary, channel_scales = of_decoding.get("rotary") or (), of_decoding.get("channel_scales")
    learned = x, log_sigma, keys, values, attn_mask, *rotary, channel_scales
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned)
    eps_of_rows = eps if keys is x and attn_mask is None else None  # other row sums may underflow
    keep_hidden_keys = keep_hidden_keys or hides_tokens or bool(of_decoding)
    tensors = _without_hidden_keys((x, keys, values), Mask(causal, window), keep_hidden_keys)
    return GaussianRequest(
        **tensors, log_sigma=log_sigma, needs_grad=needs_grad, eps=eps_of_rows, constant_norm=constant_norm,
        lengths=lengths, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
        cu_seqlens=several_documents(cu_seqlens), **of_decoding,
    )  # fmt: skip


def softmax_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int | None,
    cu_seqlens: torch.Tensor | None,
    scale: float | None,
) -> SoftmaxRequest:
    """The request for the arguments of `dot_product_attention`. Raises TypeError or ValueError naming the argument."""
    q, k, v = to_autocast_dtype(q, k, v)
    validation.check_features_and_mask((q, k, v), causal, window, names=("q", "k", "v"))
    if cu_seqlens is not None:
        validation.check_cu_seqlens(cu_seqlens, q, k.shape[1])
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    tensors = _without_hidden_keys((q, k, v), Mask(causal, window))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return SoftmaxRequest(**tensors, cu_seqlens=several_documents(cu_seqlens), needs_grad=needs_grad, scale=scale)


def _without_hidden_keys(features: validation.Three, mask: Mask, keep_hidden_keys: bool = False) -> dict[str, Any]:
    """Fields of a request, without keys that no query sees (decoding in a window) and conditions that hide nothing."""
    x, keys, values = features
    own_keys, own_values = keys is x, values is keys
    first = 0 if keep_hidden_keys else mask.first_visible_key(x.shape[1], keys.shape[1])
    if first > 0:  # so keys are not x
        keys, values = keys[:, first:], values[:, first:]
    mask = mask.simplify(x.shape[1], keys.shape[1])
    # dual_level, jvp, jacfwd and hessian; tensors that carry a tangent under another transform do not show it.
    forward_mode = torch.autograd.forward_ad._current_level >= 0 or None
    tensors = dict(keys=None if own_keys else keys, values=None if own_values else values)
    return dict(x=x, mask=mask, forward_mode=forward_mode, **tensors)
