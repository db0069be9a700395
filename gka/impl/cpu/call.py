"""From tensors to calls of the library in source/request.h, one function for each phase; when such a call must be seen
as a torch operator, and how that is registered.
"""

import ctypes
import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from gka.bandwidth import LOG_SIGMA_BOUND
from gka.impl.cpu.build import library
from gka.impl.cpu.structs import NOTHING, TENSORS, address, pack, tensor
from gka.masking import Mask
from gka.padding_and_masks import rows_of_equal_length, with_zeros_and_nan, without_nonfinite
from gka.request import GaussianRequest
from gka.validation import check_boundaries

FORWARD, BACKWARD = range(2)
PHASES = ("forward", "backward")
PLAIN = (torch.Tensor, torch.nn.Parameter)
REVISION = 6  # part of the operators' names: torch keeps compiled programs, and finds them again by names and arguments
LOG = logging.getLogger("gka")
_process = os.getpid()


class Inputs(NamedTuple):
    """The arguments of `op.attend`, in its order."""

    x: torch.Tensor
    keys: torch.Tensor | None
    values: torch.Tensor | None
    log_sigma: torch.Tensor
    lengths: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    before: int
    after: int
    centred: bool
    eps: float
    differentiable: bool = True

    @property
    def hides_tokens(self) -> bool:
        """Whether tokens are hidden that a kernel reads: those beyond a length it does not."""
        return self.before >= 0 or self.after >= 0

    def request(self) -> GaussianRequest:
        """For `without_nonfinite`."""
        mask = Mask(causal=self.after == 0, window=None if self.before < 0 else self.before)
        return GaussianRequest(
            x=self.x, keys=self.keys, values=self.values, lengths=self.lengths, cu_seqlens=self.cu_seqlens, mask=mask,
            needs_grad=False, log_sigma=self.log_sigma, eps=None, constant_norm=False,
        )  # fmt: skip

    def rows_with_tokens(self) -> list[tuple[slice, int]]:
        """Neighbours of equal length, and that length. ValueError for one that graphs and transforms let through."""
        assert self.lengths is not None
        numbers = self.lengths.tolist()
        most = (self.x if self.keys is None else self.keys).shape[1]
        if not all(0 <= length <= most for length in numbers):
            raise ValueError(f"lengths must be from 0 to the number of keys, {most}, got {numbers}")
        return [part for part in rows_of_equal_length(numbers) if part[1]]


def forward(*arguments):
    """What `op.attend` returns, and the largest |x|^2 / sigma^2, a float."""
    inputs = Inputs(*arguments)
    results = _forward(inputs)
    # The state of a row of own keys shows it as y does, in fewer numbers; that of foreign keys is the largest exponent.
    shows_nan = results[1] if inputs.keys is None and inputs.values is None and inputs.lengths is None else results[0]
    if inputs.hides_tokens and not _is_finite(shows_nan):
        request = inputs.request()
        clean, nan_rows = without_nonfinite(request)
        if nan_rows is not None:
            y, *state = _forward(inputs._replace(x=clean.x, keys=clean.keys, values=clean.values))
            return with_zeros_and_nan(request, y, nan_rows), *state
    return results


def backward(grad_y, x, keys, values, log_sigma, lengths, cu_seqlens, y, row_state, residual, *limits):
    """(dx, dlog_sigma, dkeys, dvalues), the last two None if they are x's. limits: before, after, centred, eps."""
    inputs = Inputs(x, keys, values, log_sigma, lengths, cu_seqlens, *limits)
    gradients = _backward(inputs, grad_y, y, row_state, residual)
    if inputs.hides_tokens and not _is_finite(gradients[0]):
        clean, nan_rows = without_nonfinite(inputs.request())
        # Where a row is NaN and counts, so are the gradients of all that it sees.
        if nan_rows is not None and not grad_y.masked_select(nan_rows).any():
            inputs = inputs._replace(x=clean.x, keys=clean.keys, values=clean.values)
            gradients = _backward(inputs, grad_y, y.masked_fill(nan_rows, 0.0), row_state, residual)
    return gradients


def _is_finite(t) -> bool:
    """Whether all numbers are; now and then False although they are, where their sum is not."""
    return math.isfinite(t.sum().item())


def _forward(inputs: Inputs):
    y, row_state, residual = output_like(inputs.x, inputs.differentiable)
    if inputs.lengths is not None:
        y.zero_()
    return y, row_state, residual, _call(FORWARD, inputs, row_state, dict(y=y, residual=residual))


def _backward(inputs: Inputs, grad_y, y, row_state, residual):
    gradients = dx, dlog_sigma, dkeys, dvalues = gradients_like(*inputs[:4])
    tensors = dict(y=y, residual=residual, grad_y=addressable(grad_y), dx=dx, dkeys=dkeys, dvalues=dvalues)
    if inputs.lengths is None:
        _call(BACKWARD, inputs, row_state, tensors, dlog_sigma)
        return gradients
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()
    dlog_sigma_of_parts = dlog_sigma.new_empty((len(inputs.rows_with_tokens()), len(dlog_sigma)))
    _call(BACKWARD, inputs, row_state, tensors, dlog_sigma_of_parts)
    for part in dlog_sigma_of_parts:
        dlog_sigma += part
    return gradients


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


def _call(phase: int, inputs: Inputs, row_state, tensors: dict, dlog_sigma=None) -> float:
    """Run a phase. Returns the largest |x|^2 / sigma^2 of a forward pass. dlog_sigma: (H,), with lengths (parts, H)."""
    scratch_size, kernel = _functions(inputs.x.dtype, phase)
    # An exported program comes here with the strides of today's tensors and the copies that its example needed.
    x = addressable(inputs.x)
    log_sigma = inputs.log_sigma.contiguous()
    keys, values = (None if t is None else addressable(t) for t in (inputs.keys, inputs.values))
    members = members_of(x, keys, values, log_sigma, inputs.before, inputs.after)
    state = dict(row_state=row_state.data_ptr(), dlog_sigma=address(dlog_sigma))
    members |= dict(state, eps=inputs.eps, centred=inputs.centred)
    if inputs.cu_seqlens is not None:
        cu_seqlens = inputs.cu_seqlens.contiguous()
        check_boundaries(cu_seqlens.tolist(), x.shape[1])  # which graphs and transforms let through
        members |= dict(cu_seqlens=cu_seqlens.data_ptr(), batch=len(cu_seqlens) - 1)
    members |= {name: tensor(t) for name, t in tensors.items() if t is not None}
    parts: Iterable[dict] = (members,)
    largest, scratch = 0.0, None
    if inputs.lengths is not None:
        parts = _parts(members, inputs.rows_with_tokens(), x.element_size(), row_state)
    for part in parts:
        request = pack(part)
        size = scratch_size(request, phase)
        if scratch is None or scratch.numel() < size:
            scratch = x.new_empty(size, dtype=torch.float32)
        largest = max(largest, kernel(request, scratch.data_ptr()) or 0.0)
    return largest


def members_of(x, keys, values, log_sigma, before: int, after: int) -> dict:
    """The members of a GkaRequest that every phase reads, the others 0. keys None: x. values None: the keys."""
    batch, num_queries, num_heads, head_dim = x.shape
    features = tensor(x)
    key_features = features if keys is None else tensor(keys)
    return dict(
        NOTHING, x=features, keys=key_features, values=key_features if values is None else tensor(values),
        log_sigma=log_sigma.data_ptr(), batch=batch, num_queries=num_queries,
        num_keys=num_queries if keys is None else keys.shape[1], num_heads=num_heads, head_dim=head_dim, before=before,
        after=after, bound=LOG_SIGMA_BOUND, own_keys=keys is None, own_values=values is None, threads=num_threads(),
    )  # fmt: skip


def _parts(members: dict, rows_of_equal_length, size: int, row_state) -> Iterator[dict]:
    """The members for each part of a batch, in which numbers have `size` bytes and the rows' states have no gaps."""
    of_query = row_state.element_size() * row_state.shape[1] * (2 if row_state.dim() == 4 else 1)
    states, dlog_sigma = members["row_state"], members["dlog_sigma"]
    tensors = [(name, *members[name]) for name in TENSORS if members[name][0]]  # null pointers stay so
    for rows, length in rows_of_equal_length:
        batch = rows.stop - rows.start
        part: dict[str, Any] = members | dict(batch=batch, num_keys=length, row_state=states, dlog_sigma=dlog_sigma)
        for name, data, batch_stride, token_stride, head_stride in tensors:
            part[name] = (data + rows.start * batch_stride * size, batch_stride, token_stride, head_stride)
        if members["own_keys"]:
            part["num_queries"] = length
        yield part
        states += batch * part["num_queries"] * of_query
        if dlog_sigma:
            dlog_sigma += members["num_heads"] * ctypes.sizeof(ctypes.c_float)


@functools.cache
def _has_bfloat16() -> bool:
    has_products = bool(library().gka_ready_bfloat16(1))
    if not has_products:
        LOG.warning("gka: no AMX or AVX512-BF16 here, the CPU kernel computes bfloat16 features in float32")
    return has_products


def has_bfloat16() -> bool:
    """Whether this machine has the kernels in bfloat16 (AMX or AVX512-BF16). Says so once if it has not."""
    return _has_bfloat16()


has_bfloat16._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as build.obstacle; not seen under a cache


@functools.cache
def _functions(dtype: torch.dtype, phase: int):
    """(The size of a request's scratch, the kernel). RuntimeError for a program exported on another machine."""
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


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether these are numbers in memory, and nothing traces, fakes or transforms what is done with them."""
    watched = (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )
    return not watched and all(t is None or (type(t) in PLAIN and not t.is_neg()) for t in tensors)


def operator(name: str, schema: str) -> Callable:
    """Register a function as operator gka::name_vN, for CPU tensors: torch.library.custom_op without its checks, which
    take as long as a small kernel.

    Whoever changes what an operator takes or gives back raises `REVISION`: a program that was compiled before would go
    on to expect what it was.
    """
    name = f"{name}_v{REVISION}"
    torch.library.define(f"gka::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))

    def register(function: Callable):
        torch.library.impl(f"gka::{name}", "CPU", function)
        return getattr(torch.ops.gka, name).default

    return register
