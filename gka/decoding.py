"""Decoding: the last tokens of growing sequences against a cache of what all their tokens have stored.

Layout everywhere: (B, T, H, D). Legend: B sequences, Tq new tokens, Tk tokens of the cache, H heads, D head_dim.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gka.api import gaussian_attention
from gka.autocast import autocasts
from gka.dispatch import IMPLEMENTATIONS, check_impl, find
from gka.options import Options, gaussian_request
from gka.padding_and_masks import rows_of_equal_length
from gka.parts import rotate
from gka.request import Tables
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

    On CPUs up to 16 queries without gradients, in float32 or bfloat16, are one pass over the cache, which derives keys
    in registers. Otherwise torch's operations make keys and values first, and sequences of equal length go through
    `gaussian_attention` together.

    Args:
      x: queries, (B, Tq, H, D).
      log_sigma: (H,), float32.
      values: (B, Tk, H, D), such as a view of a larger cache.
      keys: (B, Tk, H, D); None: the values or, with `rotary`, keys derived from them.
      rotary: tables (cos, sin), (Tk or more, D / 2) each, float32 or bfloat16. The key of token j is then the RMS norm
        of [a cos_j + b sin_j, b cos_j - a sin_j], a and b being the two halves of its value.
      channel_scales: (H, D), float32, with `rotary`: multiplies the value, channel by channel, before it becomes a key.
        None: 1.
      lengths: how many tokens each sequence has, B whole numbers from Tq to Tk; None: Tk. The rest of the cache is not
        read.
      window: how many tokens before itself a query sees; None: all.
      key_delays, value_delays: H whole numbers from 0 to 2^31 - 1; empty: 0. The key (value) at place j of a head is
        that of token j - delay, or of token 0 if there is none.
      constant_norm, impl: as in `gaussian_attention`.

    Returns: y, (B, Tq, H, D) in x.dtype. Raises: TypeError or ValueError naming the argument.
    """
    check_impl(impl)
    if keys is not None and rotary is not None:
        raise ValueError("keys are given or derived by rotary, not both")
    if channel_scales is not None and rotary is None:
        raise ValueError("channel_scales are of keys that are derived by rotary, which is missing")
    check_features("values", values)
    options = Options(
        causal=True, window=window, constant_norm=constant_norm, eps=0.0, rotary=rotary, channel_scales=channel_scales,
        cache_lengths=lengths, key_delays=key_delays or None, value_delays=value_delays or None,
    )  # fmt: skip
    pair, name_of_keys = ((values, None), "values") if keys is None else ((keys, values), "keys")
    request = gaussian_request(x, log_sigma, pair[0], pair[1], options, names=(name_of_keys, "values"))
    if not autocasts(x.device.type) and (name := find(request, impl)[0]):  # autocast rounds after keys are derived
        return IMPLEMENTATIONS[name].gaussian(request)
    return _by_operations(x, log_sigma, values, keys, options, impl)


def _by_operations(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    values: torch.Tensor,
    keys: torch.Tensor | None,
    options: Options,
    impl: str,
) -> torch.Tensor:
    """`decode_attention` by torch's operations, and `gaussian_attention` for sequences of equal length."""
    parts = []
    delays = (options.key_delays or (), options.value_delays or ())
    lengths = options.cache_lengths
    for rows, length in rows_of_equal_length(lengths) if lengths else [(slice(None), values.shape[1])]:
        first = 0  # the first token that is read
        if options.window is not None:
            first = max(0, length - x.shape[1] - options.window - max((0, *delays[0], *delays[1])))
        cached_keys = None if keys is None else keys[rows, first:length]
        made = _keys_and_values(cached_keys, values[rows, first:length], options, first)
        late_keys, late_values = _delayed(made, *delays)
        y = gaussian_attention(
            x[rows], log_sigma, keys=late_keys, values=late_values, causal=True, window=options.window,
            constant_norm=options.constant_norm, impl=impl,
        )  # fmt: skip
        parts.append(y)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _keys_and_values(keys: torch.Tensor | None, values: torch.Tensor, options: Options, first: int) -> Pair:
    """Both of the tokens from `first` on, (B, n, H, D); one tensor if they are the same."""
    if keys is not None or options.rotary is None:
        return (values if keys is None else keys), values
    scaled = values if options.channel_scales is None else values * options.channel_scales
    cos, sin = (table[first : first + values.shape[1], None] for table in options.rotary)
    rotated = rotate(scaled, cos, sin).to(values.dtype)
    return F.rms_norm(rotated, rotated.shape[-1:]), values


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
