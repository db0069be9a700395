"""Padding, attn_mask, documents and tokens that are not finite, for the implementations that are made of torch's
operations, and packing: putting the tokens of each sequence in front of its padding.

A token that is hidden from a query must not touch its row: 0 times NaN is NaN, in products as in gradients. So padding
and tokens that are not finite are replaced by zeros before anything is computed. Afterwards rows that see a token which
is not finite are made NaN, and rows of padded queries or without keys zeros.

Legend: B batch, Tq queries, Tk keys, H heads, D head_dim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from gka.masking import document_bounds
from gka.request import PADDING, GaussianRequest, Request
from gka.validation import readable

Padding = tuple[torch.Tensor | None, torch.Tensor | None]


def simplest_padding(lengths: torch.Tensor | None, key_padding_mask: torch.Tensor | None, num_keys: int) -> Padding:
    """The same padding in the form that costs least, if it can be read: none, or lengths for padding on the right."""
    if lengths is not None and readable(lengths) and bool((lengths == num_keys).all()):
        return None, None
    mask = key_padding_mask
    if mask is not None and readable(mask) and not bool((mask[:, :-1] > mask[:, 1:]).any()):
        return ((~mask).sum(1) if mask.any() else None), None
    return lengths, mask


def several_documents(cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """cu_seqlens, or None if it can be read and all tokens are of one document: it has two numbers, 0 and N."""
    is_one = cu_seqlens is not None and readable(cu_seqlens) and len(set(cu_seqlens.tolist())) == 2
    return None if is_one else cu_seqlens


def rows_of_equal_length(lengths: Sequence[int]) -> list[tuple[slice, int]]:
    """(Neighbours of equal length, that length), in order."""
    parts, first = [], 0
    for length, members in groupby(lengths):
        parts.append((slice(first, first := first + len(list(members))), length))
    return parts


def padding(request: Request) -> torch.Tensor | None:
    """Which keys are padding, (B, Tk) bool; None without any."""
    if request.lengths is not None:
        return torch.arange(request.num_keys, device=request.x.device) >= request.lengths[:, None]
    return request.key_padding_mask


def visible(request: Request) -> torch.Tensor:
    """Which keys a query sees, bool, (Tq, Tk) or broadcastable to (B, H, Tq, Tk)."""
    seen = request.mask.dense(request.num_queries, request.num_keys, request.x.device)
    if request.cu_seqlens is not None:
        starts, ends = document_bounds(request.cu_seqlens, request.num_keys)
        places = torch.arange(request.num_keys, device=request.x.device)
        seen = seen & (places >= starts[:, None]) & (places < ends[:, None])
    if (hidden := padding(request)) is not None:
        seen = seen & ~hidden[:, None, None, :]
    if (attn_mask := request.attn_mask) is not None:
        seen = seen & (attn_mask if attn_mask.dtype == torch.bool else ~torch.isneginf(attn_mask))
    return seen


def bias(request: Request, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """What a float attn_mask adds to the exponents, 0 for keys that are not `seen`; None without one."""
    attn_mask = request.attn_mask  # numbers below the range of `dtype` become its lowest: a row of them still has keys
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return None
    return attn_mask.to(dtype).clamp(min=torch.finfo(dtype).min).masked_fill(~seen, 0.0)


def without_padding(request: GaussianRequest) -> GaussianRequest:
    """The request with zeros in the place of padded features, which then have gradients of 0."""
    hidden = padding(request)
    if hidden is None:
        return request
    return _changed(request, lambda t: torch.where(hidden[:, :, None, None], 0.0, t))


def without_nonfinite(request: GaussianRequest) -> tuple[GaussianRequest, torch.Tensor | None]:
    """(The request with zeros in the place of tokens that are not finite; which rows see one, (B, Tq, H, 1) bool.)

    The second is None, and the request unchanged, where a key is hidden from all queries or none, and on CPUs where all
    tokens are finite. Elsewhere this reads each tensor twice and writes it once, whether or not a token is bad: a
    kernel multiplies hidden keys of a visible tile by 0, and asking the device first would stall every call.
    """
    if set(request.hiding) <= PADDING:
        return request, None
    tensors = {name: t for name in ("x", "keys", "values") if (t := getattr(request, name)) is not None}
    if all(readable(t) and math.isfinite(t.detach().sum().item()) for t in tensors.values()):
        return request, None
    bad = {name: _not_finite(t) for name, t in tensors.items()}
    if all(readable(where) and not where.any() for where in bad.values()):
        return request, None
    cleared: dict[str, Any] = {name: torch.where(where[..., None], 0.0, tensors[name]) for name, where in bad.items()}
    of_keys = bad["x"] if request.own_keys else bad["keys"]
    of_keys = of_keys | bad["values"] if "values" in bad else of_keys
    rows = _sees_some(request, of_keys) | bad["x"]
    if request.own_keys and (hidden := padding(request)) is not None:
        rows = rows & ~hidden[:, :, None]  # padded rows are zeros whatever they see
    return replace(request, **cleared), rows[..., None]


def with_zeros_and_nan(request: GaussianRequest, y: torch.Tensor, nan_rows: torch.Tensor | None) -> torch.Tensor:
    """y with NaN in the rows that `without_nonfinite` names, and zeros for padded queries and those without keys."""
    if nan_rows is not None:
        y = y + torch.where(nan_rows, torch.nan, 0.0).to(y.dtype)  # one number a row, so that y is read once
    hidden = padding(request)
    if request.attn_mask is not None or (hidden is not None and not request.own_keys):  # else a token sees itself
        seen = visible(request)
        empty = ~seen[(None,) * (4 - seen.dim())].any(-1, keepdim=True)
        y = torch.where(empty.transpose(1, 2), 0.0, y)
    if request.own_keys and hidden is not None:
        y = torch.where(hidden[:, :, None, None], 0.0, y)
    return y


def can_pack(request: GaussianRequest) -> bool:
    """Whether the packed request has the same result. Under a mask's conditions queries are aligned by place."""
    return request.own_keys or not request.mask.conditions


def must_pack(request: GaussianRequest) -> bool:
    """Whether padding may lie within a window, which counts tokens: packed, it counts them for every implementation."""
    counts = request.mask.conditions not in ([], ["causal"])
    return request.key_padding_mask is not None and request.own_keys and counts


def tokens_first(key_padding_mask: torch.Tensor) -> torch.Tensor:
    """The order of places, (B, T), in which the tokens of each sequence come first."""
    return key_padding_mask.to(torch.int8).argsort(dim=1, stable=True)


def in_order(t: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """t, (B, T, ...), with the places of each sequence in that order. Copies whole rows, as gather would not."""
    first = torch.arange(len(t), device=t.device)[:, None] * t.shape[1]
    return t.flatten(0, 1).index_select(0, (first + order).flatten()).view(t.shape)


def in_place(t: torch.Tensor, order: torch.Tensor, key_padding_mask: torch.Tensor) -> torch.Tensor:
    """Reverses `in_order` and puts zeros where there is padding."""
    hidden = key_padding_mask.view(*key_padding_mask.shape, *(1,) * (t.dim() - 2))
    return in_order(t, order.argsort(dim=1)).masked_fill(hidden, 0)


def mask_in_order(mask: torch.Tensor, order: torch.Tensor, num_queries: int, own_keys: bool) -> torch.Tensor:
    """An attn_mask for keys, and queries if they are the keys, in that order: (B, 1 or H, Tq, Tk)."""
    mask = mask[(None,) * (4 - mask.dim())].expand(len(order), -1, num_queries, order.shape[1])
    mask = mask.gather(3, order[:, None, None].expand(mask.shape))
    return mask.gather(2, order[:, None, :, None].expand(mask.shape)) if own_keys else mask


def weights_in_place(
    weights: torch.Tensor, order: torch.Tensor, key_padding_mask: torch.Tensor, own_keys: bool
) -> torch.Tensor:
    """W, (B, H, Tq, Tk), of packed keys, and packed queries if they are the keys, for the original places."""
    weights = in_place(weights.transpose(1, 3), order, key_padding_mask).transpose(1, 2)  # (B, Tq, Tk, H)
    weights = in_place(weights, order, key_padding_mask) if own_keys else weights
    return weights.permute(0, 3, 1, 2)


def pack(request: GaussianRequest) -> tuple[GaussianRequest, torch.Tensor]:
    """(The request with the tokens first and `lengths` for the padding behind them; the order of its keys, (B, Tk).)"""
    assert request.key_padding_mask is not None
    order, attn_mask = tokens_first(request.key_padding_mask), request.attn_mask
    if attn_mask is not None:
        attn_mask = mask_in_order(attn_mask, order, request.num_queries, request.own_keys)
    lengths = (~request.key_padding_mask).sum(1)
    packed = _changed(request, lambda t: in_order(t, order))
    return replace(packed, lengths=lengths, key_padding_mask=None, attn_mask=attn_mask), order


def _changed(request: GaussianRequest, function: Callable) -> GaussianRequest:
    """The request with the function of all tensors that padding is of: keys, values, and queries that are keys."""
    names = ("x", "keys", "values") if request.own_keys else ("keys", "values")
    tensors = {name: getattr(request, name) for name in names}
    return replace(request, **{name: function(t) for name, t in tensors.items() if t is not None})


def _not_finite(t: torch.Tensor) -> torch.Tensor:
    """Which tokens have a channel that is NaN or infinite, (B, T, H), in one pass."""
    largest = torch.linalg.vector_norm(t.detach(), torch.inf, dim=3)  # traced with B = 0, torch takes no dim of -1
    return largest - largest != 0


def _sees_some(request: GaussianRequest, keys: torch.Tensor) -> torch.Tensor:
    """Which rows see one of these `keys`, (B, Tk, H) -> (B, Tq, H)."""
    if request.attn_mask is not None or not request.mask.is_reach:
        return (visible(request).float() @ keys.transpose(1, 2)[..., None].float())[..., 0].transpose(1, 2) > 0
    if (hidden := padding(request)) is not None:
        keys = keys & ~hidden[:, :, None]
    num_keys, (before, after) = request.num_keys, request.mask.reach
    counts = F.pad(keys.cumsum(1, dtype=torch.int32), (0, 0, 1, 0))  # of those before each place
    i = torch.arange(num_keys - request.num_queries, num_keys, device=keys.device)
    first = torch.zeros_like(i) if before is None else (i - before).clamp(min=0)
    end = torch.full_like(i, num_keys) if after is None else (i + after + 1).clamp(max=num_keys)
    if request.cu_seqlens is not None:
        starts, ends = document_bounds(request.cu_seqlens, num_keys)
        first, end = torch.maximum(first, starts), torch.minimum(end, ends)
    return counts[:, end] > counts[:, first]
