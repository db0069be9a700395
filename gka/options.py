"""The options of a call of the operator, as one object that the door makes, and the request made of it.

A request is made in three steps: autocast's dtype, all checks (validation.py), and the form that costs least: keys that
no query sees are cut off, conditions of the mask that hide nothing are dropped, and padding on the right is lengths.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gka import validation
from gka.autocast import to_autocast_dtype
from gka.masking import Mask
from gka.padding_and_masks import several_documents, simplest_padding
from gka.request import GaussianRequest, SoftmaxRequest, Tables

EPS = 1e-6


class Options(NamedTuple):  # made several times faster than a frozen dataclass, which a small call would notice
    """The arguments of `gaussian_attention` and `decode_attention` beside features and bandwidths."""

    causal: bool = False
    window: int | None = None
    lengths: torch.Tensor | None = None
    key_padding_mask: torch.Tensor | None = None
    attn_mask: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    constant_norm: bool = False
    eps: float = EPS
    # Of decode_attention alone.
    rotary: Tables | None = None
    channel_scales: torch.Tensor | None = None
    cache_lengths: Sequence[int] | None = None
    key_delays: Sequence[int] | None = None
    value_delays: Sequence[int] | None = None

    @property
    def hides_tokens(self) -> bool:
        """Whether tensors say which keys are hidden."""
        pads = self.lengths is not None or self.key_padding_mask is not None
        return pads or self.attn_mask is not None or self.cu_seqlens is not None

    @property
    def reads_cache(self) -> bool:
        """Whether an option of decoding is set; they count the tokens of a cache from the first."""
        has_tables = self.rotary is not None or self.channel_scales is not None
        has_delays = self.key_delays is not None or self.value_delays is not None
        return has_tables or has_delays or self.cache_lengths is not None


def gaussian_request(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    options: Options,
    *,
    keep_hidden_keys: bool = False,
    names: tuple[str, str] = ("keys", "values"),
) -> GaussianRequest:
    """The request; TypeError or ValueError naming the argument. names: what errors call keys and values."""
    x, keys, values = to_autocast_dtype(x, keys, values)
    validation.check_features_and_mask((x, keys, values), options.causal, options.window, ("x", *names))
    validation.check_log_sigma(log_sigma, x)
    validation.check_eps(options.eps)
    if options.hides_tokens:
        validation.check_padding_and_mask(x, keys.shape[1], options)
    if options.reads_cache:
        validation.check_cache_options(x, keys.shape[1], options)
    lengths, key_padding_mask = simplest_padding(options.lengths, options.key_padding_mask, keys.shape[1])
    learned = x, log_sigma, keys, values, options.attn_mask, *(options.rotary or ()), options.channel_scales
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned)
    eps = options.eps if keys is x and options.attn_mask is None else None  # other row sums may underflow
    keep_hidden_keys = keep_hidden_keys or options.hides_tokens or options.reads_cache
    mask = Mask(options.causal, options.window)
    return GaussianRequest(
        **_without_hidden_keys((x, keys, values), mask, keep_hidden_keys), log_sigma=log_sigma, needs_grad=needs_grad,
        eps=eps, constant_norm=options.constant_norm, lengths=lengths, key_padding_mask=key_padding_mask,
        attn_mask=options.attn_mask, cu_seqlens=several_documents(options.cu_seqlens), rotary=options.rotary,
        channel_scales=options.channel_scales, cache_lengths=options.cache_lengths, key_delays=options.key_delays,
        value_delays=options.value_delays,
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
