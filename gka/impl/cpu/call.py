"""From tensors to calls of the library: source/request.h as ctypes, and one function for each phase."""

import ctypes
import functools
import logging
import os
from ctypes import POINTER, addressof, c_float, c_int32, c_int64, c_void_p, pointer

import torch

from gka.bandwidth import LOG_SIGMA_BOUND
from gka.impl.cpu.build import library

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


def forward(x, keys, values, log_sigma, before: int, after: int, centred: bool, eps: float, differentiable: bool):
    """What `op.attend` returns, and the largest |x|^2 / sigma^2, a float."""
    (y, level, rest), largest = output_like(x, differentiable), c_float()
    _call(
        FORWARD, x, keys, values, log_sigma, before, after, y=_tensor(y), level=level.data_ptr(),
        largest=addressof(largest), rest=_tensor(rest), centred=centred, eps=eps,
    )  # fmt: skip
    return y, level, rest, largest.value


def backward(grad_y, x, keys, values, log_sigma, y, level, rest, before: int, after: int, centred: bool, eps: float):
    """(dx, dlog_sigma, dkeys, dvalues), the last two None if they are x's."""
    grad_y, gradients = addressable(grad_y), gradients_like(x, keys, values, log_sigma)
    dx, dlog_sigma, dkeys, dvalues = gradients
    others = {name: _tensor(t) for name, t in (("dkeys", dkeys), ("dvalues", dvalues)) if t is not None}
    _call(
        BACKWARD, x, keys, values, log_sigma, before, after, y=_tensor(y), level=level.data_ptr(),
        grad_y=_tensor(grad_y), rest=_tensor(rest), dx=_tensor(dx), dlog_sigma=dlog_sigma.data_ptr(), centred=centred,
        eps=eps, **others,
    )  # fmt: skip
    return gradients


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


def _call(phase: int, x, keys, values, log_sigma, before: int, after: int, **fields) -> None:
    scratch_size, kernel = _functions(x.dtype, phase)
    # An exported program comes here with the strides of today's tensors and the copies that its example needed.
    x, keys, values = (None if t is None else addressable(t) for t in (x, keys, values))
    log_sigma = log_sigma.contiguous()
    batch, num_queries, num_heads, head_dim = x.shape
    features = _tensor(x)
    own_keys, own_values = keys is None, values is None
    key_features = features if own_keys else _tensor(keys)
    request = Arguments(
        x=features, keys=key_features, values=key_features if own_values else _tensor(values),
        log_sigma=log_sigma.data_ptr(), batch=batch, num_queries=num_queries,
        num_keys=num_queries if own_keys else keys.shape[1], num_heads=num_heads, head_dim=head_dim, before=before,
        after=after, bound=LOG_SIGMA_BOUND, own_keys=own_keys, own_values=own_values, threads=num_threads(), **fields,
    )  # fmt: skip
    address = pointer(request)
    scratch = x.new_empty(scratch_size(address, phase), dtype=torch.float32)
    request.scratch = scratch.data_ptr()
    kernel(address)


def has_bfloat16() -> bool:
    """Whether this machine has the kernels in bfloat16 (AMX). Says so once if it has not."""
    return _has_tiles()


has_bfloat16._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as build.obstacle; not seen under a cache


@functools.cache
def _has_tiles() -> bool:
    ready = bool(library().gka_ready_bfloat16())
    if not ready:
        LOG.warning("gka: no AMX here, the CPU kernel computes bfloat16 features in float32")
    return ready


@functools.cache
def _functions(dtype: torch.dtype, phase: int):
    """(the size of a request's scratch, the kernel) for features of a dtype.

    A program that was exported elsewhere comes here without `op.gaussian`'s choice. Raises RuntimeError if the
    processor lacks what the kernel needs.
    """
    if dtype == torch.bfloat16 and not has_bfloat16():
        raise RuntimeError("the CPU kernel needs a processor with AMX for bfloat16 features; convert them to float32")
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
