"""What a request hides beside its causal mask and window, as torch's operations take it; and keeping it from results.

A token that is hidden from a query must not touch its row: 0 times NaN is NaN, in products as in gradients. So padding,
and tokens that are not finite, are replaced by zeros before anything is computed, and the rows that do see a token
which is not finite are made NaN afterwards.

Legend: B batch, Tq queries, Tk keys, H heads, D head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from gka.request import HIDING, GaussianRequest, Request
from gka.validation import readable


def padding(request: Request) -> torch.Tensor | None:
    """Which keys are padding, (B, Tk) bool; None without any."""
    if request.lengths is not None:
        return torch.arange(request.num_keys, device=request.x.device) >= request.lengths[:, None]
    return request.key_padding_mask


def visible(request: Request) -> torch.Tensor:
    """Which keys a query sees, bool, (Tq, Tk) or broadcastable to (B, H, Tq, Tk)."""
    seen = request.mask.dense(request.num_queries, request.num_keys, request.x.device)
    if (hidden := padding(request)) is not None:
        seen = seen & ~hidden[:, None, None, :]
    if (given := request.attn_mask) is not None:
        seen = seen & (given if given.dtype == torch.bool else ~torch.isneginf(given))
    return seen


def bias(request: Request, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """What a float attn_mask adds to the exponents, 0 for keys that are not `seen`; None without one.

    Numbers below the range of `dtype` are its lowest, so that a row of them is not a row without keys.
    """
    given = request.attn_mask
    if given is None or given.dtype == torch.bool:
        return None
    return given.to(dtype).clamp(min=torch.finfo(dtype).min).masked_fill(~seen, 0.0)


def without_padding(request: GaussianRequest) -> GaussianRequest:
    """The request with zeros in the place of padded features, which then have gradients of 0."""
    hidden = padding(request)
    if hidden is None:
        return request

    names = ("x", "keys", "values") if request.own_keys else ("keys", "values")
    return _changed(request, names, lambda t: t.masked_fill(hidden[:, :, None, None], 0.0))


def finite(request: GaussianRequest) -> tuple[GaussianRequest, torch.Tensor | None]:
    """(The request with zeros in the place of tokens that are not finite; which rows see one, (B, Tq, H, 1) bool.)

    The second is None, and the request as it is, where no query misses a key, or all tokens are known to be finite.
    """
    if not set(request.asks) & HIDING:
        return request, None
    tensors = {name: t for name in ("x", "keys", "values") if (t := getattr(request, name)) is not None}
    if all(readable(t) and math.isfinite(t.detach().sum().item()) for t in tensors.values()):
        return request, None
    bad = {name: _not_finite(t) for name, t in tensors.items()}
    if all(readable(where) and not where.any() for where in bad.values()):
        return request, None
    cleared = {name: getattr(request, name).masked_fill(where[..., None], 0.0) for name, where in bad.items()}
    of_keys = bad["x"] if request.own_keys else bad["keys"]
    of_keys = of_keys | bad["values"] if "values" in bad else of_keys
    rows = _sees_some(request, of_keys) | bad["x"]
    if request.own_keys and (hidden := padding(request)) is not None:
        rows = rows & ~hidden[:, :, None]  # padded rows are zeros whatever they see
    return replace(request, **cleared), rows[..., None]


def finished(request: GaussianRequest, y: torch.Tensor, spoilt: torch.Tensor | None) -> torch.Tensor:
    """y with NaN in the rows that are `spoilt`, and zeros in those of padded queries and those that see no key."""
    if spoilt is not None:
        y = y + torch.zeros_like(y).masked_fill(spoilt, float("nan"))
    hidden = padding(request)
    if hidden is not None or request.attn_mask is not None:
        seen = visible(request)
        empty = ~seen[(None,) * (4 - seen.dim())].any(-1, keepdim=True)
        y = y.masked_fill(empty.transpose(1, 2), 0.0)
    if request.own_keys and hidden is not None:
        y = y.masked_fill(hidden[:, :, None, None], 0.0)
    return y


def can_pack(request: GaussianRequest) -> bool:
    """Whether attention of the tokens alone, one after another without the padding between them, is the same."""
    return request.mask.window is None and (request.own_keys or not request.mask.causal)


def pack(request: GaussianRequest) -> tuple[GaussianRequest, torch.Tensor]:
    """(The request with every row's tokens in front and `lengths` for its padding; the order of its keys, (B, Tk).)"""
    assert request.key_padding_mask is not None
    order = request.key_padding_mask.to(torch.int8).argsort(dim=1, stable=True)

    names = ("x", "keys", "values") if request.own_keys else ("keys", "values")
    packed = _changed(request, names, lambda t: t.gather(1, order[:, :, None, None].expand(t.shape)))
    return replace(packed, lengths=(~request.key_padding_mask).sum(1), key_padding_mask=None), order


def unpack(y: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """y of packed queries in their own places."""
    return torch.zeros_like(y).scatter(1, order[:, :, None, None].expand(y.shape), y)


def _changed(request: GaussianRequest, names: tuple[str, ...], function: Callable) -> GaussianRequest:
    """The request with the function of those of its tensors that are there."""
    tensors = {name: getattr(request, name) for name in names}
    return replace(request, **{name: function(t) for name, t in tensors.items() if t is not None})


def _not_finite(t: torch.Tensor) -> torch.Tensor:
    return ~t.detach().isfinite().all(-1)


def _sees_some(request: GaussianRequest, keys: torch.Tensor) -> torch.Tensor:
    """Which rows see one of these `keys`, (B, Tk, H) -> (B, Tq, H)."""
    if request.attn_mask is not None:
        return (visible(request).float() @ keys.transpose(1, 2)[..., None].float())[..., 0].transpose(1, 2) > 0
    if (hidden := padding(request)) is not None:
        keys = keys & ~hidden[:, :, None]
    num_keys, (before, after) = request.num_keys, request.mask.reach
    counts = F.pad(keys.cumsum(1), (0, 0, 1, 0))  # of those before each place
    i = torch.arange(num_keys - request.num_queries, num_keys, device=keys.device)
    first = torch.zeros_like(i) if before is None else (i - before).clamp(min=0)
    end = torch.full_like(i, num_keys) if after is None else (i + after + 1).clamp(max=num_keys)
    return counts[:, end] > counts[:, first]
