"""The fused CPU kernel as torch operators: exact, eps included, true norms, deterministic, O(T * D) memory
(gka/README.md, The CPU kernel).

The operators are opaque to torch.compile, which needs no graph break for them. A call that nothing traces or transforms
goes past them, straight to the library: for small tensors the way there costs as much as the kernel.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from gka.expansion import warn_if_lost
from gka.impl.cpu import build, call
from gka.impl.cpu.call import addressable
from gka.request import GaussianRequest

MAX_HEAD_DIM = 128
HALF = (torch.bfloat16, torch.float16)
PLAIN = (torch.Tensor, torch.nn.Parameter)
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


def _is_transformed() -> bool:
    """Whether a forward-mode derivative is being taken, which torch would silently call 0, or a torch.func one."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    interpreters = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() != torch._C._functorch.TransformType.Vmap for interpreter in interpreters)


def gaussian(request: GaussianRequest) -> torch.Tensor:
    """y, (B, Tq, H, D) in x.dtype. The norms are computed, constant or not.

    Half precision is computed in float32, but for bfloat16 self-attention where the processor has AMX.
    """
    if request.x.dtype in HALF and not (request.x.dtype == torch.bfloat16 and request.own_keys and call.has_bfloat16()):
        return gaussian(_single(request)).to(request.x.dtype)
    before, after = (-1 if limit is None else limit for limit in request.mask.reach)
    keys = None if request.keys is None else addressable(request.keys)
    values = None if request.values is None else addressable(request.values)
    x, log_sigma = addressable(request.x), request.log_sigma.contiguous()
    if keys is not None and request.num_queries <= DECODE_QUERIES and not request.needs_grad:
        return decode(x, keys, values, log_sigma, before, after)
    centred = not request.mask.causal  # rounding would leak the future
    eps = 0.0 if request.eps is None else request.eps
    arguments = (x, keys, values, log_sigma, before, after, centred, eps, request.needs_grad)
    if not _is_plain(x, keys, values, log_sigma):
        return attend(*arguments)[0]
    y, *_, largest = (_Attend.apply if request.needs_grad else call.forward)(*arguments)
    if not request.constant_norm:
        warn_if_lost(largest, torch.float32)
    return y


def _single(request: GaussianRequest) -> GaussianRequest:
    """The request in float32."""
    keys, values = (None if t is None else t.float() for t in (request.keys, request.values))
    return replace(request, x=request.x.float(), keys=keys, values=values)


def _is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether these are numbers in memory, and nothing traces, fakes or transforms what is done with them."""
    watched = (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )
    return not watched and all(t is None or (type(t) in PLAIN and not t.is_neg()) for t in tensors)


def _operator(name: str) -> Callable:
    """Register a function as operator gka::name, for CPU tensors: torch.library.custom_op without its checks, which
    take as long as a small kernel.
    """

    def register(function: Callable):
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(f"gka::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"gka::{name}", "CPU", function)
        return getattr(torch.ops.gka, name).default

    return register


@_operator("cpu_attend")
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


@torch.library.register_fake("gka::cpu_attend")
def _(x, keys, values, log_sigma, before, after, centred, eps, differentiable):
    return call.output_like(x, differentiable)


@_operator("cpu_attend_backward")
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
) -> list[torch.Tensor]:
    """[dx, dlog_sigma] and, if they are not x, dkeys, dvalues."""
    return call.backward(grad_y, x, keys, values, log_sigma, y, level, rest, before, after, centred)


@torch.library.register_fake("gka::cpu_attend_backward")
def _(grad_y, x, keys, values, log_sigma, y, level, rest, before, after, centred):
    return call.gradients_like(x, keys, values, log_sigma)


@_operator("cpu_decode")
def decode(
    x: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    log_sigma: torch.Tensor,
    before: int,
    after: int,
) -> torch.Tensor:
    """y, (B, Tq, H, D), of a few queries; arguments as `attend`. It has no gradients."""
    return call.decode(x, keys, values, log_sigma, before, after)


@torch.library.register_fake("gka::cpu_decode")
def _(x, keys, values, log_sigma, before, after):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    x, keys, values, log_sigma, before, after, centred, *_ = inputs
    y, level, rest, *_ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(level, rest)
    ctx.save_for_backward(x, keys, values, log_sigma, y, level, rest)
    ctx.options = (before, after, centred)


def _differentiate(ctx, grad_y, *_):
    if grad_y is None:
        return (None,) * 9
    saved = ctx.saved_tensors
    route = call.backward if _is_plain(grad_y, *saved) and not torch.is_grad_enabled() else attend_backward
    dx, dlog_sigma, *others = route(grad_y, *saved, *ctx.options)
    others = iter(others)
    dkeys, dvalues = (None if t is None else next(others) for t in saved[1:3])
    return dx, dkeys, dvalues, dlog_sigma, None, None, None, None, None


def _refuse(ctx, *grads):
    raise NotImplementedError('impl="cpu" has no second derivatives; use impl="reference" for double backward')


torch.library.register_autograd("gka::cpu_attend", _differentiate, setup_context=_save)
torch.library.register_autograd("gka::cpu_attend_backward", _refuse)


class _Attend(torch.autograd.Function):
    """`attend` on plain tensors, which tells the largest |x|^2 / sigma^2 too."""

    @staticmethod
    def forward(ctx, *inputs):
        output = call.forward(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)
