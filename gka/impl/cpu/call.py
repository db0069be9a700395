"""From tensors to calls of the library: source/request.h as ctypes, and one function for each phase."""

import ctypes
import functools
import logging
import math
import os
from ctypes import POINTER, addressof, c_float, c_int32, c_int64, c_void_p, pointer
from itertools import groupby

import torch

from gka.bandwidth import LOG_SIGMA_BOUND
from gka.hiding import finished, finite
from gka.impl.cpu.build import library
from gka.masking import Mask
from gka.request import GaussianRequest

FORWARD, BACKWARD = range(2)
PHASES = ("forward", "backward")
LOG = logging.getLogger("gka")
_process = os.getpid()


class Tensor(ctypes.Structure):
    """GkaTensor: where the numbers are, and how far apart two sequences, tokens and heads."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("token", c_int64), ("head", c_int64))


class Arguments(ctypes.Structure):
    """GkaRequest; what a phase does not read stays 0."""

    _fields_ = (
        *((name, Tensor) for name in ("x", "keys", "values", "y", "grad_y", "dx", "dkeys", "dvalues", "rest")),
        *((name, c_void_p) for name in ("log_sigma", "level", "largest", "dlog_sigma", "scratch")),
        *((name, c_int64) for name in ("batch", "num_queries", "num_keys", "num_heads", "head_dim", "before", "after")),
        *((name, c_float) for name in ("eps", "bound")),
        *((name, c_int32) for name in ("own_keys", "own_values", "centred", "threads")),
    )


def forward(
    x, keys, values, log_sigma, lengths, before: int, after: int, centred: bool, eps: float, differentiable: bool
):
    """What `op.attend` returns, and the largest |x|^2 / sigma^2, a float."""
    options = before, after, centred, eps, differentiable
    y, level, rest, largest = _forward(x, keys, values, log_sigma, lengths, *options)
    if _hides(before, after) and not _is_finite(level if values is None and lengths is None else y):
        request = _request(x, keys, values, log_sigma, lengths, before, after)
        clean, spoilt = finite(request)
        if spoilt is not None:
            y, level, rest, largest = _forward(clean.x, clean.keys, clean.values, log_sigma, lengths, *options)
            y = finished(request, y, spoilt)
    return y, level, rest, largest


def backward(
    grad_y, x, keys, values, log_sigma, lengths, y, level, rest, before: int, after: int, centred: bool, eps: float
):
    """(dx, dlog_sigma, dkeys, dvalues), the last two None if they are x's."""
    options = before, after, centred, eps
    gradients = _backward(grad_y, x, keys, values, log_sigma, lengths, y, level, rest, *options)
    if _hides(before, after) and not _is_finite(gradients[0]):
        clean, spoilt = finite(_request(x, keys, values, log_sigma, lengths, before, after))
        # Where a row is NaN and counts, so are the gradients of all that it sees.
        if spoilt is not None and not grad_y.masked_select(spoilt).any():
            y = y.masked_fill(spoilt, 0.0)
            features = clean.x, clean.keys, clean.values
            gradients = _backward(grad_y, *features, log_sigma, lengths, y, level, rest, *options)
    return gradients


def _hides(before: int, after: int) -> bool:
    """Whether tokens are hidden that a kernel reads: those beyond a length it does not."""
    return before >= 0 or after >= 0


def _is_finite(t) -> bool:
    """Whether all numbers are; now and then False although they are, where their sum is not."""
    return math.isfinite(t.sum().item())


def _request(x, keys, values, log_sigma, lengths, before: int, after: int) -> GaussianRequest:
    mask = Mask(causal=after == 0, window=None if before < 0 else before)
    return GaussianRequest(
        x=x, keys=keys, values=values, lengths=lengths, mask=mask, needs_grad=False, log_sigma=log_sigma, eps=None,
        constant_norm=False,
    )  # fmt: skip


def _forward(x, keys, values, log_sigma, lengths, before, after, centred, eps, differentiable):
    y, level, rest = output_like(x, differentiable)
    if lengths is not None:
        y.zero_()
    largest = _call(
        FORWARD, x, keys, values, log_sigma, lengths, before, after, level, y=_tensor(y), rest=_tensor(rest),
        centred=centred, eps=eps,
    )  # fmt: skip
    return y, level, rest, largest


def _backward(grad_y, x, keys, values, log_sigma, lengths, y, level, rest, before, after, centred, eps):
    grad_y, gradients = addressable(grad_y), gradients_like(x, keys, values, log_sigma)
    dx, dlog_sigma, dkeys, dvalues = gradients
    of_parts = dlog_sigma[None]
    if lengths is not None:
        of_parts = log_sigma.new_empty((max(1, len(x)), len(log_sigma)))
        for t in gradients:
            if t is not None:
                t.zero_()
    others = {name: _tensor(t) for name, t in (("dkeys", dkeys), ("dvalues", dvalues)) if t is not None}
    _call(
        BACKWARD, x, keys, values, log_sigma, lengths, before, after, level, of_parts, y=_tensor(y),
        grad_y=_tensor(grad_y), rest=_tensor(rest), dx=_tensor(dx), centred=centred, eps=eps, **others,
    )  # fmt: skip
    if lengths is not None:
        for part in of_parts[: len(_parts(x, keys, lengths))]:
            dlog_sigma += part
    return gradients


def _parts(x, keys, lengths):
    """(first of neighbouring rows of equal length, how many, that length) of all rows that have tokens."""
    parts, first, given = [], 0, lengths.tolist()
    most = (x if keys is None else keys).shape[1]
    if not all(0 <= length <= most for length in given):  # graphs and transforms come here unchecked
        raise ValueError(f"lengths must be from 0 to the number of keys, {most}, got {given}")
    for length, members in groupby(given):
        rows = len(list(members))
        if length:
            parts.append((first, rows, length))
        first += rows
    return parts


def addressable(t: torch.Tensor) -> torch.Tensor:
    """`t`, copied only if its channels lie apart."""
    return t if t.stride(-1) == 1 else t.contiguous()


def output_like(x, differentiable: bool):
    """(y, level, rest) of `op.attend`, not yet written."""
    batch, length, heads, _ = x.shape
    rest = x.new_empty(x.shape if differentiable and x.dtype == torch.bfloat16 else (0, 0, 0, 0))
    single = x.dtype == torch.float32
    rows = (batch, heads, length, 2) if single else (batch, heads, length)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float64 if single else torch.float32), rest


def gradients_like(x, keys, values, log_sigma):
    """What `backward` returns, not yet written."""
    return tuple(None if t is None else t.new_empty(t.shape) for t in (x, log_sigma, keys, values))


def _call(phase: int, x, keys, values, log_sigma, lengths, before, after, level, dlog_sigma=None, **fields) -> float:
    """Run a phase, with lengths for each part of the batch; dlog_sigma has a row for each. Returns the largest
    |x|^2 / sigma^2 of a forward pass.
    """
    scratch_size, kernel = _functions(x.dtype, phase)
    # An exported program comes here with the strides of today's tensors and the copies that its example needed.
    x, keys, values = (None if t is None else addressable(t) for t in (x, keys, values))
    log_sigma, largest = log_sigma.contiguous(), c_float()
    batch, num_queries, num_heads, head_dim = x.shape
    features = _tensor(x)
    own_keys, own_values = keys is None, values is None
    key_features = features if own_keys else _tensor(keys)
    request = Arguments(
        x=features, keys=key_features, values=key_features if own_values else _tensor(values), level=level.data_ptr(),
        dlog_sigma=None if dlog_sigma is None else dlog_sigma.data_ptr(), largest=addressof(largest),
        log_sigma=log_sigma.data_ptr(), batch=batch, num_queries=num_queries,
        num_keys=num_queries if own_keys else keys.shape[1], num_heads=num_heads, head_dim=head_dim, before=before,
        after=after, bound=LOG_SIGMA_BOUND, own_keys=own_keys, own_values=own_values, threads=num_threads(), **fields,
    )  # fmt: skip
    address, number, scratch = pointer(request), 0.0, None
    for _ in (None,) if lengths is None else _each_part(request, _parts(x, keys, lengths), x.element_size(), level):
        size = scratch_size(address, phase)
        if scratch is None or scratch.numel() < size:
            scratch = x.new_empty(size, dtype=torch.float32)
            request.scratch = scratch.data_ptr()
        kernel(address)
        number = max(number, largest.value)
    return number


def _each_part(request: Arguments, parts, size: int, level):
    """Make the request, of a whole batch with numbers of `size` bytes, that of each part in turn."""
    given = (getattr(request, field[0]) for field in Arguments._fields_ if field[1] is Tensor)
    starts = [(t, t.data, t.batch * size) for t in given if t.data]
    of_query = level.element_size() * level.shape[1] * (2 if level.dim() == 4 else 1)
    for first, rows, length in parts:
        for t, start, step in starts:
            t.data = start + first * step
        request.batch, request.num_keys = rows, length
        if request.own_keys:
            request.num_queries = length
        yield
        request.level += rows * request.num_queries * of_query  # one part after another
        if request.dlog_sigma:
            request.dlog_sigma += request.num_heads * ctypes.sizeof(c_float)


def has_bfloat16() -> bool:
    """Whether this machine has the kernels in bfloat16 (AMX or AVX512-BF16). Says so once if it has not."""
    return bool(bfloat16_products())


has_bfloat16._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as build.obstacle; not seen under a cache


@functools.cache
def bfloat16_products() -> int:
    """How this machine multiplies bfloat16: 2 by AMX, 1 by AVX512-BF16, 0 not at all."""
    products = library().gka_ready_bfloat16(1)
    if not products:
        LOG.warning("gka: no AMX or AVX512-BF16 here, the CPU kernel computes bfloat16 features in float32")
    return products


@functools.cache
def _functions(dtype: torch.dtype, phase: int):
    """(the size of a request's scratch, the kernel) for features of a dtype.

    A program that was exported elsewhere comes here without `op.gaussian`'s choice. Raises RuntimeError if the
    processor lacks what the kernel needs.
    """
    if dtype == torch.bfloat16 and not has_bfloat16():
        raise RuntimeError("the CPU kernel needs AMX or AVX512-BF16 for bfloat16 features; convert them to float32")
    suffix = str(dtype).removeprefix("torch.")
    size, kernel = (getattr(library(), f"gka_{name}_{suffix}") for name in ("scratch", PHASES[phase]))
    size.argtypes, size.restype = (POINTER(Arguments), c_int32), c_int64
    kernel.argtypes, kernel.restype = (POINTER(Arguments),), None
    return size, kernel


def _tensor(t: torch.Tensor) -> Tensor:
    return Tensor(t.data_ptr(), *t.stride()[:3])


def num_threads() -> int:
    """torch's number, and 1 in a forked process, which has lost the threads that OpenMP would wait for."""
    return torch.get_num_threads() if os.getpid() == _process else 1
