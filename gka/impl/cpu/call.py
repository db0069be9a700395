"""From tensors to calls of the library in source/request.h, one function for each phase."""

import ctypes
import functools
import logging
import math
import os
from collections.abc import Iterable, Iterator
from itertools import groupby

import torch

from gka.bandwidth import LOG_SIGMA_BOUND
from gka.impl.cpu.build import library
from gka.impl.cpu.structs import NO_TENSOR, REQUEST, address, tensor
from gka.masking import Mask
from gka.padding_and_masks import with_zeros_and_nan, without_nonfinite
from gka.request import GaussianRequest

FORWARD, BACKWARD = range(2)
PHASES = ("forward", "backward")
NO_TENSORS = dict.fromkeys(REQUEST.tensors, NO_TENSOR)
LOG = logging.getLogger("gka")
_process = os.getpid()


def forward(
    x, keys, values, log_sigma, lengths, before: int, after: int, centred: bool, eps: float, differentiable: bool
):
    """What `op.attend` returns, and the largest |x|^2 / sigma^2, a float."""
    options = before, after, centred, eps, differentiable
    y, row_state, residual, largest = _forward(x, keys, values, log_sigma, lengths, *options)
    if _hides(before, after) and not _is_finite(row_state if values is None and lengths is None else y):
        request = _request(x, keys, values, log_sigma, lengths, before, after)
        clean, nan_rows = without_nonfinite(request)
        if nan_rows is not None:
            y, row_state, residual, largest = _forward(clean.x, clean.keys, clean.values, log_sigma, lengths, *options)
            y = with_zeros_and_nan(request, y, nan_rows)
    return y, row_state, residual, largest


def backward(
    grad_y,
    x,
    keys,
    values,
    log_sigma,
    lengths,
    y,
    row_state,
    residual,
    before: int,
    after: int,
    centred: bool,
    eps: float,
):
    """(dx, dlog_sigma, dkeys, dvalues), the last two None if they are x's."""
    options = before, after, centred, eps
    gradients = _backward(grad_y, x, keys, values, log_sigma, lengths, y, row_state, residual, *options)
    if _hides(before, after) and not _is_finite(gradients[0]):
        clean, nan_rows = without_nonfinite(_request(x, keys, values, log_sigma, lengths, before, after))
        # Where a row is NaN and counts, so are the gradients of all that it sees.
        if nan_rows is not None and not grad_y.masked_select(nan_rows).any():
            y = y.masked_fill(nan_rows, 0.0)
            features = clean.x, clean.keys, clean.values
            gradients = _backward(grad_y, *features, log_sigma, lengths, y, row_state, residual, *options)
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
    y, row_state, residual = output_like(x, differentiable)
    if lengths is not None:
        y.zero_()
    tensors = dict(y=y, residual=residual)
    largest = _call(FORWARD, x, keys, values, log_sigma, lengths, before, after, centred, eps, row_state, tensors)
    return y, row_state, residual, largest


def _backward(grad_y, x, keys, values, log_sigma, lengths, y, row_state, residual, before, after, centred, eps):
    gradients = dx, dlog_sigma, dkeys, dvalues = gradients_like(x, keys, values, log_sigma)
    tensors = dict(y=y, residual=residual, grad_y=addressable(grad_y), dx=dx, dkeys=dkeys, dvalues=dvalues)
    arguments = x, keys, values, log_sigma, lengths, before, after, centred, eps, row_state, tensors
    if lengths is None:
        _call(BACKWARD, *arguments, dlog_sigma)
        return gradients
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()
    dlog_sigma_of_parts = log_sigma.new_empty((len(_rows_of_equal_length(x, keys, lengths)), len(log_sigma)))
    _call(BACKWARD, *arguments, dlog_sigma_of_parts)
    for part in dlog_sigma_of_parts:
        dlog_sigma += part
    return gradients


def _rows_of_equal_length(x, keys, lengths) -> list[tuple[int, int, int]]:
    """(first row, number of rows, length) of neighbours of equal length; rows without tokens are left out."""
    parts, first, numbers = [], 0, lengths.tolist()
    most = (x if keys is None else keys).shape[1]
    if not all(0 <= length <= most for length in numbers):  # graphs and transforms come here unchecked
        raise ValueError(f"lengths must be from 0 to the number of keys, {most}, got {numbers}")
    for length, members in groupby(numbers):
        rows = len(list(members))
        if length:
            parts.append((first, rows, length))
        first += rows
    return parts


def addressable(t: torch.Tensor) -> torch.Tensor:
    """`t`, copied only if its channels lie apart."""
    return t if t.stride(-1) == 1 else t.contiguous()


def output_like(x, differentiable: bool):
    """(y, row_state, residual) of `op.attend`, not yet written."""
    batch, length, heads, _ = x.shape
    residual = x.new_empty(x.shape if differentiable and x.dtype == torch.bfloat16 else (0, 0, 0, 0))
    single = x.dtype == torch.float32
    rows = (batch, heads, length, 2) if single else (batch, heads, length)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float64 if single else torch.float32), residual


def gradients_like(x, keys, values, log_sigma):
    """What `backward` returns, not yet written."""
    return tuple(None if t is None else t.new_empty(t.shape) for t in (x, log_sigma, keys, values))


def _call(
    phase: int, x, keys, values, log_sigma, lengths, before, after, centred, eps, row_state, tensors, dlog_sigma=None
) -> float:
    """Run a phase, with lengths for one part of the batch after another. Returns the largest |x|^2 / sigma^2 of a
    forward pass.

    tensors: those that the phase reads or writes beside x, keys and values. dlog_sigma: (H,), with lengths (parts, H).
    """
    scratch_size, kernel = _functions(x.dtype, phase)
    # An exported program comes here with the strides of today's tensors and the copies that its example needed.
    x, keys, values = (None if t is None else addressable(t) for t in (x, keys, values))
    log_sigma = log_sigma.contiguous()
    batch, num_queries, num_heads, head_dim = x.shape
    features = tensor(x)
    key_features = features if keys is None else tensor(keys)
    members = dict(
        NO_TENSORS, x=features, keys=key_features, values=key_features if values is None else tensor(values),
        log_sigma=log_sigma.data_ptr(), row_state=row_state.data_ptr(), dlog_sigma=address(dlog_sigma), batch=batch,
        num_queries=num_queries, num_keys=num_queries if keys is None else keys.shape[1], num_heads=num_heads,
        head_dim=head_dim, before=before, after=after, eps=eps, bound=LOG_SIGMA_BOUND, own_keys=keys is None,
        own_values=values is None, centred=centred, threads=num_threads(),
    )  # fmt: skip
    members |= {name: tensor(t) for name, t in tensors.items() if t is not None}
    parts: Iterable[dict] = (members,)
    largest, scratch = 0.0, None
    if lengths is not None:
        parts = _parts(members, _rows_of_equal_length(x, keys, lengths), x.element_size(), row_state)
    for part in parts:
        request = REQUEST.pack(part)
        size = scratch_size(request, phase)
        if scratch is None or scratch.numel() < size:
            scratch = x.new_empty(size, dtype=torch.float32)
        largest = max(largest, kernel(request, scratch.data_ptr()) or 0.0)
    return largest


def _parts(members: dict, rows_of_equal_length, size: int, row_state) -> Iterator[dict]:
    """The members for each part of a batch whose numbers have `size` bytes; the states of its queries follow one
    another.
    """
    of_query = row_state.element_size() * row_state.shape[1] * (2 if row_state.dim() == 4 else 1)
    states, dlog_sigma = members["row_state"], members["dlog_sigma"]
    tensors = [(name, *members[name]) for name in REQUEST.tensors if members[name][0]]  # null pointers stay so
    for first, rows, length in rows_of_equal_length:
        part = members | dict(batch=rows, num_keys=length, row_state=states, dlog_sigma=dlog_sigma)
        for name, data, batch_stride, token_stride, head_stride in tensors:
            part[name] = (data + first * batch_stride * size, batch_stride, token_stride, head_stride)
        if members["own_keys"]:
            part["num_queries"] = length
        yield part
        states += rows * part["num_queries"] * of_query
        if dlog_sigma:
            dlog_sigma += members["num_heads"] * ctypes.sizeof(ctypes.c_float)


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
    size.argtypes, size.restype = (ctypes.c_char_p, ctypes.c_int32), ctypes.c_int64
    kernel.argtypes, kernel.restype = (ctypes.c_char_p, ctypes.c_void_p), (ctypes.c_float, None)[phase]
    return size, kernel


def num_threads() -> int:
    """torch's number, and 1 in a forked process, which has lost the threads that OpenMP would wait for."""
    return torch.get_num_threads() if os.getpid() == _process else 1
