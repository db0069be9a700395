"""The fused CPU kernel as torch operators: exact, eps included, true norms, deterministic, O(T * D) memory
for each thread (gka/impl/cpu/README.md).

The operators are opaque to torch.compile, which needs no graph break for them. A call that nothing traces or transforms
goes past them, straight to the library: for small tensors the way there costs as much as the kernel.
"""

from dataclasses import replace

import torch

from gka.expansion import warn_if_lost
from gka.impl.cpu import build, call, decoding
from gka.impl.cpu.call import addressable, is_plain, operator
from gka.masking import Mask
from gka.request import GaussianRequest, Serves

HALF = (torch.bfloat16, torch.float16)
DECODING = ("rotary", "channel_scales", "cache_lengths", "key_delays", "value_delays")  # read by its kernel alone
DECODE_QUERIES = 16  # up to here a request without gradients is bound by reading the keys
SERVES = Serves(
    options=frozenset({"causal", "window", "lengths", "cu_seqlens", *DECODING}),
    applies_eps=True,
    fused_on=("cpu",),
    dtypes=(torch.float32, *HALF),
    max_head_dim=128,
)


def unavailable(request: GaussianRequest) -> str | None:
    """Why the kernel cannot serve this request, or None if it can."""
    x = request.x
    if x.device.type != "cpu":
        return f"the CPU kernel takes CPU tensors, got {x.device.type}"
    if (requested := _options_of_decoding(request)) and (limit := _limit_of_decoding(request)):
        return f"the CPU kernel serves {', '.join(requested)} {limit} only"
    pads = request.lengths is not None or request.key_padding_mask is not None
    if pads and not request.own_keys and request.mask != Mask():
        return "the CPU kernel serves padded keys that are not the queries without causal and window only"
    if torch.jit.is_tracing():
        return "torch.jit.trace would write an operator into its graph that other programs do not have"
    if not torch.compiler.is_compiling() and _is_transformed():
        return "the CPU kernel serves vmap alone of torch.func's transforms"
    return build.obstacle()


def _options_of_decoding(request: GaussianRequest) -> list[str]:
    return [option for option in request.requested if option in DECODING]


def _limit_of_decoding(request: GaussianRequest) -> str | None:
    """What the decoding kernel serves, if this request goes beyond it."""
    if request.needs_grad:
        return "without gradients"
    if request.num_queries > DECODE_QUERIES:
        return f"for at most {DECODE_QUERIES} queries"
    if request.x.dtype not in decoding.DTYPES:
        return "in float32 or bfloat16"
    if request.rotary and not (request.rotary[0].dtype == request.rotary[1].dtype in decoding.DTYPES):
        return "with tables in one dtype, float32 or bfloat16"
    if not all(t.stride(-1) == 1 for t in (request.x, request.key_features, request.value_features)):
        return "of features whose channels lie side by side"  # or a copy would read what is behind a sequence's end
    return None


def _is_transformed() -> bool:
    """Whether torch.func takes a derivative."""
    interpreters = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() != torch._C._functorch.TransformType.Vmap for interpreter in interpreters)


def gaussian(request: GaussianRequest) -> torch.Tensor:
    """y, (B, Tq, H, D) in x.dtype. The norms are computed, constant or not.

    Half precision is computed in float32, except bfloat16 where the processor multiplies it (AMX, AVX512-BF16), and in
    decoding.
    """
    from_cache = not request.own_keys and request.lengths is None and request.cu_seqlens is None
    few = from_cache and request.num_queries <= DECODE_QUERIES and not request.needs_grad
    decodes = few or bool(_options_of_decoding(request))
    dtype = request.x.dtype
    single = dtype in HALF and not (dtype == torch.bfloat16 and (decodes or call.has_bfloat16()))
    request = _single(request) if single else request
    if decodes:
        y = decoding.decode(request)
        return y.to(dtype) if single else y
    x, keys, values, log_sigma, *limits = request.operands(addressable)
    tensors = x, keys, values, log_sigma, request.lengths, request.cu_seqlens
    centred = not request.mask.causal  # rounding would leak the future
    arguments = (*tensors, *limits, centred, request.eps or 0.0, request.needs_grad)
    if is_plain(*tensors):
        y, *_, largest = (_Attend.apply if request.needs_grad else call.forward)(*arguments)
        if not request.constant_norm:
            warn_if_lost(largest, torch.float32)
    else:
        y = attend(*arguments)[0]
    return y.to(dtype) if single else y


def _single(request: GaussianRequest) -> GaussianRequest:
    """The request in float32."""
    keys, values = (None if t is None else t.float() for t in (request.keys, request.values))
    return replace(request, x=request.x.float(), keys=keys, values=values)


@operator(
    "cpu_attend",
    "(Tensor x, Tensor? keys, Tensor? values, Tensor log_sigma, Tensor? lengths, Tensor? cu_seqlens, SymInt before, "
    "SymInt after, bool centred, float eps, bool differentiable) -> (Tensor, Tensor, Tensor)",
)
def attend(*inputs):
    """(y, row_state, residual): y (B, Tq, H, D); what the backward pass needs of each row (B, H, Tq); in bfloat16, if
    differentiable, what rounding took from y, else nothing.

    keys None: x. values None: the keys. lengths: (B,) tokens of each row, None: all. cu_seqlens: (documents + 1,)
    int32, the documents of one row of tokens, None: one. before, after: how far a query
    looks, -1 without limit. centred: subtract the mean of the keys first.
    """
    return call.forward(*inputs)[:3]


@torch.library.register_fake(attend)
def _(x, *inputs):
    return call.output_like(x, inputs[-1])


@operator(
    "cpu_attend_backward",
    "(Tensor grad_y, Tensor x, Tensor? keys, Tensor? values, Tensor log_sigma, Tensor? lengths, Tensor? cu_seqlens, "
    "Tensor y, Tensor row_state, Tensor residual, SymInt before, SymInt after, bool centred, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def attend_backward(*inputs):
    """(dx, dlog_sigma, dkeys, dvalues), the last two empty if they are x's. A list could not be batched."""
    return _without_none(inputs[1], call.backward(*inputs))


@torch.library.register_fake(attend_backward)
def _(grad_y, x, keys, values, log_sigma, *_):
    return _without_none(x, call.gradients_like(x, keys, values, log_sigma))


def _without_none(x, gradients):
    return tuple(x.new_empty(0) if t is None else t for t in gradients)


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:3])  # row_state and residual
    ctx.save_for_backward(*inputs[:6], *output[:3])
    ctx.options = inputs[6:10]  # before, after, centred, eps


def _differentiate(ctx, grad_y, *_):
    if grad_y is None:
        return (None,) * 11
    saved = ctx.saved_tensors
    batched = torch._C._functorch.is_legacy_batchedtensor(grad_y)  # is_grads_batched=True: torch loops over operators
    plain = is_plain(grad_y, *saved) and not batched and not torch.is_grad_enabled()
    route = call.backward if plain else attend_backward
    dx, dlog_sigma, *gradients = route(grad_y, *saved, *ctx.options)
    dkeys, dvalues = (None if t is None else gradient for t, gradient in zip(saved[1:3], gradients, strict=True))
    return dx, dkeys, dvalues, dlog_sigma, *[None] * 7


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
