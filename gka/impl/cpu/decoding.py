"""Decoding on a CPU: a few queries against a cache, as a torch operator without gradients (source/decode.cpp).

One call is short, tens of microseconds, so outside torch.compile and other modes the library is called directly.
"""

import ctypes
import functools
from ctypes import c_int64

import torch

from gka.impl.cpu.build import library
from gka.impl.cpu.call import addressable, is_plain, members_of, operator
from gka.impl.cpu.structs import address, pack, tensor
from gka.request import GaussianRequest

DTYPES = (torch.float32, torch.bfloat16)
NORM_EPS = torch.finfo(torch.float32).eps  # of F.rms_norm, whatever the features are


def decode(request: GaussianRequest) -> torch.Tensor:
    """y, (B, Tq, H, D), of a few queries; features and tables are float32 or bfloat16."""
    keys = None if request.own_values else request.keys
    cos, sin = request.rotary or (None, None)
    tensors = request.x, keys, request.value_features, request.log_sigma, cos, sin, request.channel_scales
    numbers = request.cache_lengths or (), request.key_delays or (), request.value_delays or ()
    return (_call if is_plain(*tensors) else attend_cached)(*tensors, *numbers, *request.limits)


def _call(x, keys, values, log_sigma, cos, sin, channel_scales, lengths, key_delays, value_delays, before, after):
    scratch_size, kernel = _functions()
    # As in `call`: an exported program chose its copies by its example.
    x, keys, values = (None if t is None else addressable(t) for t in (x, keys, values))
    cos, sin, scales, log_sigma = (None if t is None else t.contiguous() for t in (cos, sin, channel_scales, log_sigma))
    y = x.new_empty(x.shape)
    arrays = [
        (c_int64 * len(numbers))(*numbers) if numbers else None for numbers in (lengths, key_delays, value_delays)
    ]
    of_lengths, of_key_delays, of_value_delays = (0 if array is None else ctypes.addressof(array) for array in arrays)
    members = members_of(x, values if keys is None else keys, values, log_sigma, before, after) | dict(
        y=tensor(y), cos=address(cos), sin=address(sin), channel_scales=address(scales), lengths=of_lengths,
        key_delays=of_key_delays, value_delays=of_value_delays, half=x.dtype == torch.bfloat16,
        half_tables=cos is not None and cos.dtype == torch.bfloat16, eps=NORM_EPS,
    )  # fmt: skip
    request = pack(members)
    scratch = log_sigma.new_empty(scratch_size(request))
    kernel(request, scratch.data_ptr())
    return y


@functools.cache
def _functions():
    """(the size of a request's scratch, the kernel)."""
    size, kernel = library().gka_scratch_decode, library().gka_decode
    size.argtypes, size.restype = (ctypes.c_char_p,), c_int64
    kernel.argtypes, kernel.restype = (ctypes.c_char_p, ctypes.c_void_p), None
    return size, kernel


# Empty lengths: Tk each; empty delays: none. before, after: how far a query looks, -1 without limit.
attend_cached = operator(
    "cpu_decode",
    "(Tensor x, Tensor? keys, Tensor values, Tensor log_sigma, Tensor? cos, Tensor? sin, Tensor? channel_scales, "
    "SymInt[] lengths, SymInt[] key_delays, SymInt[] value_delays, SymInt before, SymInt after) -> Tensor",
)(_call)


@torch.library.register_fake(attend_cached)
def _(x, *_):
    return x.new_empty(x.shape)
