"""Decoding: the last tokens of growing sequences against a cache of what all their tokens have stored.

Layout everywhere: (B, T, H, D). Legend: B sequences, Tq new tokens, Tk tokens of the cache, H heads, D head_dim.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from gka.api import gaussian_attention
from gka.autocast import autocasts
from gka.dispatch import IMPLEMENTATIONS, check_impl, find
from gka.request import Tables, gaussian_request
from gka.validation import check_features

Pair = tuple[torch.Tensor, torch.Tensor]


def decode_attention(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    values: torch.Tensor,
    *,
    keys: torch.Tensor | None = None,
    rotary: Tables | None = None,
    channel_scales: torch.Tensor | None = None,
    lengths: Sequence[int] | None = None,
    window: int | None = None,
    key_delays: Sequence[int] = (),
    value_delays: Sequence[int] = (),
    constant_norm: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """`gaussian_attention`, causal, of the last Tq tokens of each sequence against a cache (paper section 5.1).

    An implementation that reads all that is asked gets the cache as it is: on CPUs up to 16 queries without gradients,
    in float32 or bfloat16, are one pass over it, and keys are derived in registers. For the others torch's operations
    make keys and values first, and sequences of equal length go through `gaussian_attention` together.

    Args:
      x: queries, (B, Tq, H, D).
      log_sigma: (H,), float32.
      values: (B, Tk, H, D), such as a view of a larger cache.
      keys: (B, Tk, H, D); None: the values or, with `rotary`, what follows from them.
      rotary: tables (cos, sin), (Tk or more, D / 2) each, float32 or bfloat16. The key of token j is then the RMS norm
        of [a cos_j + b sin_j, b cos_j - a sin_j], a and b being the two halves of its value.
      channel_scales: (H, D), float32, with `rotary`: the value is multiplied by it, channel by channel, before it is
        turned into a key. None: by 1.
      lengths: tokens that each sequence has of Tk, B whole numbers from Tq to Tk; None: Tk. What lies behind them is
        not read.
      window: a query sees itself and so many tokens before it; None: all.
      key_delays, value_delays: H whole numbers from 0 to 2^31 - 1; empty: none. Token j of a head stands for the key
        (value) of token j - delay, and of token 0 where there is none.
      constant_norm, impl: as in `gaussian_attention`.

    Returns: y, (B, Tq, H, D) in x.dtype. Raises: TypeError or ValueError naming the argument.
    """
    check_impl(impl)
    if keys is not None and rotary is not None:
        raise ValueError("keys are given or derived by rotary, not both")
    if channel_scales is not None and rotary is None:
        raise ValueError("channel_scales are of keys that are derived by rotary, which is missing")
    options: dict[str, Any] = dict(
        rotary=rotary, channel_scales=channel_scales, cache_lengths=lengths, key_delays=key_delays or None,
        value_delays=value_delays or None,
    )  # fmt: skip
    check_features("values", values)
    whole = any(option is not None for option in options.values())  # they count tokens from the first on
    pair: tuple[Any, Any] = (values, None) if keys is None else (keys, values)
    names = "values" if keys is None else "keys", "values"
    options |= dict(eps=0.0, constant_norm=constant_norm, whole=whole, names=names)
    request = gaussian_request(x, log_sigma, *pair, True, window, **options)
    _check_options(x, values.shape[1], rotary, channel_scales, lengths, key_delays, value_delays)
    if not autocasts(x.device.type) and (name := find(request, impl)[0]):  # autocast rounds after keys are derived
        return IMPLEMENTATIONS[name].gaussian(request)
    same: dict[str, Any] = dict(causal=True, window=window, constant_norm=constant_norm, impl=impl)
    delays = key_delays, value_delays
    return _by_operations(x, log_sigma, values, keys, rotary, channel_scales, lengths, delays, same)


def _by_operations(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    values: torch.Tensor,
    keys: torch.Tensor | None,
    rotary: Tables | None,
    channel_scales: torch.Tensor | None,
    lengths: Sequence[int] | None,
    delays: tuple[Sequence[int], Sequence[int]],
    same: dict[str, Any],
) -> torch.Tensor:
    """`decode_attention` by torch's operations and `gaussian_attention`. same: its options for every call."""
    window, parts = same["window"], []
    for rows, length in _rows_of_equal_length(lengths, values.shape[1]):
        first = 0 if window is None else max(0, length - x.shape[1] - window - max((0, *delays[0], *delays[1])))
        cached_keys = None if keys is None else keys[rows, first:length]
        made = _keys_and_values(cached_keys, values[rows, first:length], rotary, channel_scales, first)
        late_keys, late_values = _delayed(made, *delays)
        parts.append(gaussian_attention(x[rows], log_sigma, keys=late_keys, values=late_values, **same))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_options(
    x: torch.Tensor,
    num_keys: int,
    rotary: Tables | None,
    channel_scales: torch.Tensor | None,
    lengths: Sequence[int] | None,
    key_delays: Sequence[int],
    value_delays: Sequence[int],
) -> None:
    """Raises ValueError naming the argument."""
    batch, num_queries, num_heads, head_dim = x.shape
    for table in rotary or ():
        if head_dim % 2 or table.dim() != 2 or len(table) < num_keys or table.shape[1] * 2 != head_dim:
            expected = f"({num_keys} or more, {head_dim} / 2)"
            raise ValueError(f"rotary must be two tables of {expected} numbers, got {tuple(table.shape)}")
        if table.device != x.device:
            raise ValueError(f"rotary must be on the device of the queries, {x.device}, got {table.device}")
    if channel_scales is not None and (
        tuple(channel_scales.shape) != (num_heads, head_dim) or channel_scales.dtype != torch.float32
    ):
        found = f"{tuple(channel_scales.shape)} in {channel_scales.dtype}"
        raise ValueError(f"channel_scales must be (H, D) = ({num_heads}, {head_dim}) in float32, got {found}")
    if channel_scales is not None and channel_scales.device != x.device:
        raise ValueError(f"channel_scales must be on the device of the queries, {x.device}")
    if lengths is not None and not (len(lengths) == batch and all(num_queries <= n <= num_keys for n in lengths)):
        raise ValueError(f"lengths must be {batch} numbers from {num_queries} to {num_keys}, got {list(lengths)}")
    for name, given in (("key_delays", key_delays), ("value_delays", value_delays)):
        if given and not (len(given) == num_heads and min(given) >= 0 and max(given) < 2**31):
            raise ValueError(f"{name} must be {num_heads} numbers from 0 to 2^31 - 1, one a head, got {list(given)}")


def _rows_of_equal_length(lengths: Sequence[int] | None, num_keys: int) -> list[tuple[slice, int]]:
    """Neighbours of equal length, and that length; without rows one empty part."""
    if not lengths:
        return [(slice(None), num_keys)]
    groups, first = [], 0
    for length, members in groupby(lengths):
        rows = slice(first, first + len(list(members)))
        groups.append((rows, length))
        first = rows.stop
    return groups


def _keys_and_values(
    keys: torch.Tensor | None,
    values: torch.Tensor,
    rotary: Tables | None,
    channel_scales: torch.Tensor | None,
    first: int,
) -> Pair:
    """Both of the tokens from `first` on, (B, n, H, D); one tensor if they are the same."""
    if keys is not None or rotary is None:
        return (values if keys is None else keys), values
    a, b = (values if channel_scales is None else values * channel_scales).chunk(2, dim=-1)
    cos, sin = (table[first : first + values.shape[1], None] for table in rotary)
    turned = torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1).to(values.dtype)
    return F.rms_norm(turned, turned.shape[-1:]), values


def _delayed(pair: Pair, key_delays: Sequence[int], value_delays: Sequence[int]) -> Pair:
    """Keys and values with every head as many tokens later as its delay says; one tensor if they are the same."""

    def later(t: torch.Tensor, delays: Sequence[int]) -> torch.Tensor:
        if not any(delays):
            return t
        places = torch.arange(t.shape[1], device=t.device)[:, None] - torch.tensor(delays, device=t.device)
        return t.gather(1, places.clamp(min=0)[None, :, :, None].expand(t.shape))

    keys = later(pair[0], key_delays)
    is_own = pair[0] is pair[1] and tuple(key_delays) == tuple(value_delays)
    return keys, keys if is_own else later(pair[1], value_delays)
