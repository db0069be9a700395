"""The fused CPU kernel as torch operators: exact, eps included, true norms, deterministic, O(T * D) memory
for each thread (gka/README.md, The CPU kernel).

The operators are opaque to torch.compile, which needs no graph break for them. A call that nothing traces or transforms
goes past them, straight to the library: for small tensors the way there costs as much as the kernel.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from gka.expansion import warn_if_lost
from gka.impl.cpu import build, call, decoding
from gka.impl.cpu.call import addressable
from gka.impl.cpu.registering import is_plain, operator
from gka.request import GaussianRequest

MAX_HEAD_DIM = 128
HALF = (torch.bfloat16, torch.float16)
DECODE_QUERIES = 16  # up to here a request without gradients is bound by reading the keys


def unavailable(request: GaussianRequest) -> str | None:
    """Why the kernel cannot serve this request, or None if it can."""
    x = request.x
    if x.device.type != "cpu":
        return f"the CPU kernel takes CPU tensors, got {x.device.type}"
    if x.dtype not in (torch.float32, *HALF):
        return f"the CPU kernel takes float32, bfloat16 or float16, got {x.dtype}"
    if request.head_dim > MAX_HEAD_DIM:
        return f"the CPU kernel needs head_dim <= {MAX_HEAD_DIM}, got {request.head_dim}"
    if torch.jit.is_tracing():
        return "torch.jit.trace would write an operator into its graph that other programs do not have"
    if not torch.compiler.is_compiling() and _is_transformed():
        return "the CPU kernel has no forward mode, and of torch.func's transforms vmap alone"
    return build.obstacle()


def say_once(request: GaussianRequest, obstacle: str) -> None:
    """Log that `auto` takes sdpa for CPU tensors, once for each reason. A missing library says so by itself."""
    if request.x.device.type == "cpu" and not torch.compiler.is_compiling() and not build.has_said(obstacle):
        _said(obstacle)


@functools.cache
def _said(obstacle: str) -> None:
    build.LOG.warning('gka: impl="auto" takes sdpa: %s', obstacle)


def _is_transformed() -> bool:
    """Whether a forward-mode derivative is being taken, which torch would silently call 0, or a torch.func one."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    interpreters = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() != torch._C._functorch.TransformType.Vmap for interpreter in interpreters)


def gaussian(request: GaussianRequest) -> torch.Tensor:
    """y, (B, Tq, H, D) in x.dtype. The norms are computed, constant or not.

    Half precision is computed in float32, except bfloat16 where the processor has AMX, and in decoding.
    """
    decodes = not request.own_keys and request.num_queries <= DECODE_QUERIES and not request.needs_grad
    has_kernel = request.x.dtype == torch.bfloat16 and (decodes or call.has_bfloat16())
    if request.x.dtype in HALF and not has_kernel:
        return gaussian(_single(request)).to(request.x.dtype)
    before, after = (-1 if limit is None else limit for limit in request.mask.reach)
    keys = None if request.keys is None else addressable(request.keys)
    values = None if request.values is None else addressable(request.values)
    x, log_sigma = addressable(request.x), request.log_sigma.contiguous()
    if keys is not None and decodes:
        keys, values = (None, keys) if values is None else (keys, values)
        return decoding.decode(x, keys, values, log_sigma, before=before, after=after)
    centred = not request.mask.causal  # rounding would leak the future
    eps = 0.0 if request.eps is None else request.eps
    arguments = (x, keys, values, log_sigma, before, after, centred, eps, request.needs_grad)
    if not is_plain(x, keys, values, log_sigma):
        return attend(*arguments)[0]
    y, *_, largest = (_Attend.apply if request.needs_grad else call.forward)(*arguments)
    if not request.constant_norm:
        warn_if_lost(largest, torch.float32)
    return y


def can_decode(x: torch.Tensor, log_sigma: torch.Tensor, cached: Sequence[torch.Tensor], tables) -> bool:
    """Whether `decoding.decode` can serve queries x against a cache of `cached` tensors."""
    features = (x, *cached)
    return (
        x.device.type == "cpu"
        and x.dtype in decoding.DTYPES
        and x.shape[0] > 0
        and x.shape[1] <= DECODE_QUERIES
        and x.shape[3] <= MAX_HEAD_DIM
        and log_sigma.dtype == torch.float32
        and all(t.stride(-1) == 1 for t in (*features, log_sigma))
        and all(t.device.type == "cpu" and t.dtype in decoding.DTYPES and t.is_contiguous() for t in tables)
        and len({t.dtype for t in tables}) <= 1
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in (*features, *tables, log_sigma)))
        and not torch.is_autocast_enabled("cpu")
        and not torch.jit.is_tracing()
        and (torch.compiler.is_compiling() or not _is_transformed())
        and build.obstacle() is None
    )


def _single(request: GaussianRequest) -> GaussianRequest:
    """The request in float32."""
    keys, values = (None if t is None else t.float() for t in (request.keys, request.values))
    return replace(request, x=request.x.float(), keys=keys, values=values)


@operator("cpu_attend")
def attend(
    x: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    log_sigma: torch.Tensor,
    before: int,
    after: int,
    centred: bool,
    eps: float,
    differentiable: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, level, rest): y (B, Tq, H, D); what the backward pass needs of each row (B, H, Tq); in bfloat16, if
    differentiable, what rounding took from y, else nothing.

    keys None: x. values None: the keys. before, after: how far a query looks, -1 without limit. centred: subtract the
    mean of the keys first.
    """
    y, level, rest, _ = call.forward(x, keys, values, log_sigma, before, after, centred, eps, differentiable)
    return y, level, rest


@torch.library.register_fake(attend)
def _(x, keys, values, log_sigma, before, after, centred, eps, differentiable):
    return call.output_like(x, differentiable)


@operator("cpu_attend_backward")
def attend_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    log_sigma: torch.Tensor,
    y: torch.Tensor,
    level: torch.Tensor,
    rest: torch.Tensor,
    before: int,
    after: int,
    centred: bool,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dlog_sigma, dkeys, dvalues), the last two empty if they are x's. A list could not be batched."""
    options = (before, after, centred, eps)
    return _without_none(x, call.backward(grad_y, x, keys, values, log_sigma, y, level, rest, *options))


@torch.library.register_fake(attend_backward)
def _(grad_y, x, keys, values, log_sigma, y, level, rest, before, after, centred, eps):
    return _without_none(x, call.gradients_like(x, keys, values, log_sigma))


def _without_none(x, gradients):
    return tuple(x.new_empty(0) if t is None else t for t in gradients)


def _save(ctx, inputs, output):
    x, keys, values, log_sigma, *options, _ = inputs
    y, level, rest, *_ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(level, rest)
    ctx.save_for_backward(x, keys, values, log_sigma, y, level, rest)
    ctx.options = options  # before, after, centred, eps


def _differentiate(ctx, grad_y, *_):
    if grad_y is None:
        return (None,) * 9
    saved = ctx.saved_tensors
    batched = torch._C._functorch.is_legacy_batchedtensor(grad_y)  # is_grads_batched=True: torch loops over operators
    plain = is_plain(grad_y, *saved) and not batched and not torch.is_grad_enabled()
    route = call.backward if plain else attend_backward
    dx, dlog_sigma, *others = route(grad_y, *saved, *ctx.options)
    dkeys, dvalues = (None if t is None else gradient for t, gradient in zip(saved[1:3], others, strict=True))
    return dx, dkeys, dvalues, dlog_sigma, None, None, None, None, None


def _refuse(ctx, *grads):
    raise NotImplementedError('impl="cpu" has no second derivatives; use impl="reference" for double backward')


torch.library.register_autograd(attend, _differentiate, setup_context=_save)
torch.library.register_autograd(attend_backward, _refuse)


class _Attend(torch.autograd.Function):
    """`attend` on plain tensors, which tells the largest |x|^2 / sigma^2 too."""

    @staticmethod
    def forward(ctx, *inputs):
        output = call.forward(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)
