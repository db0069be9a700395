"""Decoding on a CPU: a few queries against a cache, as a torch operator without gradients (source/decode.h).

One call is short, tens of microseconds, so outside torch.compile and other modes the library is called directly.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int64

import torch

from gka.bandwidth import LOG_SIGMA_BOUND
from gka.impl.cpu.build import library
from gka.impl.cpu.call import addressable, num_threads
from gka.impl.cpu.registering import is_plain, operator
from gka.impl.cpu.structs import DECODE, address, tensor

DTYPES = (torch.float32, torch.bfloat16)
NORM_EPS = torch.finfo(torch.float32).eps  # of F.rms_norm, whatever the features are


def decode(
    x: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor,
    log_sigma: torch.Tensor,
    rotary: Sequence[torch.Tensor] = (),
    channel_scales: torch.Tensor | None = None,
    lengths: Sequence[int] = (),
    key_delays: Sequence[int] = (),
    value_delays: Sequence[int] = (),
    before: int = -1,
    after: int = -1,
) -> torch.Tensor:
    """y, (B, Tq, H, D), of a few queries; see `gka.decode_attention`. keys None: the values or, with rotary (cos, sin)
    of D / 2 channels, the values turned and normalised, after channel_scales (H, D), float32, if they are given. Empty
    lengths: Tk each; empty delays: none. before, after: how far a query looks, -1 without limit. Features are float32
    or bfloat16, tables too; channels lie side by side.
    """
    cos, sin = rotary or (None, None)
    run = _call if is_plain(x, keys, values, log_sigma, cos, sin, channel_scales) else attend_cached
    return run(x, keys, values, log_sigma, cos, sin, channel_scales, lengths, key_delays, value_delays, before, after)


def _call(
    x, keys, values, log_sigma, cos, sin, channel_scales, lengths, key_delays, value_delays, before, after
) -> torch.Tensor:
    scratch_size, kernel = _functions()
    # As in `call`: an exported program chose its copies by its example.
    x, keys, values = (None if t is None else addressable(t) for t in (x, keys, values))
    cos, sin, scales, log_sigma = (None if t is None else t.contiguous() for t in (cos, sin, channel_scales, log_sigma))
    y = x.new_empty(x.shape)
    batch, num_queries, num_heads, head_dim = x.shape
    arrays = [
        (c_int64 * len(numbers))(*numbers) if numbers else None for numbers in (lengths, key_delays, value_delays)
    ]
    of_lengths, of_key_delays, of_value_delays = (0 if array is None else ctypes.addressof(array) for array in arrays)
    members = dict(
        x=tensor(x), keys=tensor(values if keys is None else keys), values=tensor(values), y=tensor(y),
        cos=address(cos), sin=address(sin), channel_scales=address(scales), lengths=of_lengths,
        key_delays=of_key_delays, value_delays=of_value_delays, log_sigma=log_sigma.data_ptr(), batch=batch,
        num_queries=num_queries, num_keys=values.shape[1], num_heads=num_heads, head_dim=head_dim, before=before,
        after=after, half=x.dtype == torch.bfloat16, half_tables=cos is not None and cos.dtype == torch.bfloat16,
        threads=num_threads(), bound=LOG_SIGMA_BOUND, eps=NORM_EPS,
    )  # fmt: skip
    request = DECODE.pack(members)
    scratch = log_sigma.new_empty(scratch_size(request))
    kernel(request, scratch.data_ptr())
    return y


@functools.cache
def _functions():
    """(the size of a request's scratch, the kernel)."""
    size, kernel = library().gka_decode_scratch, library().gka_decode
    size.argtypes, size.restype = (ctypes.c_char_p,), c_int64
    kernel.argtypes, kernel.restype = (ctypes.c_char_p, ctypes.c_void_p), None
    return size, kernel


@operator("cpu_decode")
def attend_cached(
    x: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor,
    log_sigma: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    channel_scales: torch.Tensor | None,
    lengths: Sequence[int],
    key_delays: Sequence[int],
    value_delays: Sequence[int],
    before: int,
    after: int,
) -> torch.Tensor:
    return _call(x, keys, values, log_sigma, cos, sin, channel_scales, lengths, key_delays, value_delays, before, after)


@torch.library.register_fake(attend_cached)
def _(x, keys, values, log_sigma, cos, sin, channel_scales, lengths, key_delays, value_delays, before, after):
    return x.new_empty(x.shape)
