"""The fused Triton implementation as torch operators: exact, eps included, deterministic, O(T * D) memory
(README.md).

The custom operators `gka::attend` and `gka::attend_backward` are opaque to torch.compile, which needs no graph break
for them. launch.py chooses the kernels; Triton itself is imported with it, when the first of them is launched.
"""

import importlib.util
import os

import torch

from gka.bandwidth import LOG_SIGMA_BOUND
from gka.request import GaussianRequest, Serves

INSTALLED = importlib.util.find_spec("triton") is not None
LARGEST_OFFSET = 2**31
SERVES = Serves(
    options=frozenset({"causal", "window", "lengths", "cu_seqlens"}),
    applies_eps=True,
    fused_on=("cuda",),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    max_head_dim=128,
)


def unavailable(request: GaussianRequest) -> str | None:
    """Why the kernels cannot serve this request, or None if they can."""
    if obstacle := _missing(request.x.device):
        return obstacle
    for features in (request.x, request.key_features):
        if features.shape[1] * features.shape[2] * features.shape[3] >= LARGEST_OFFSET:
            return f"the Triton kernels take fewer than 2^31 numbers per sequence, got {tuple(features.shape)}"
    if not request.own_keys and request.needs_grad and not request.constant_norm:
        return "the Triton kernels have gradients for foreign keys only with constant_norm"
    return None


def _missing(device: torch.device) -> str | None:
    """What keeps Triton from running on this device. Its interpreter (TRITON_INTERPRET=1, for tests) runs on CPUs."""
    if not INSTALLED:
        return "the triton package is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 is set, and the interpreter takes CPU tensors"
    if device.type != "cuda" or torch.version.hip:
        return f"the Triton kernels run on NVIDIA GPUs, got {device.type}"
    # A graph cannot ask for the capability, nor fake tensors on a machine without a GPU; there the launch asks.
    can_ask = torch.cuda.is_available() and not torch.compiler.is_compiling()
    if can_ask and torch.cuda.get_device_capability(device) < (8, 0):
        return "the Triton kernels need compute capability 8.0 (A100, RTX 30) or newer"
    return None


def gaussian(request: GaussianRequest) -> torch.Tensor:
    """y, (B, Tq, H, D) in x.dtype; exponents are kept in float32."""
    *tensors, before, after = request.operands(_addressable)
    lengths, starts = (None if t is None else t.contiguous() for t in (request.lengths, request.cu_seqlens))
    return attend(*tensors, lengths, before, after, request.constant_norm, request.eps or 0.0, starts)[0]


def _addressable(t: torch.Tensor) -> torch.Tensor:
    """`t`, copied only if its channels lie apart or 32 bits do not reach from a head's first token to its last."""
    return t if t.stride(-1) == 1 and t.shape[1] * t.stride(1) < LARGEST_OFFSET else t.contiguous()


def output_like(x: torch.Tensor, keys: torch.Tensor | None, constant_norm: bool):
    """(y, level, norm) of `attend`, not yet written."""
    batch, length, heads, _ = x.shape
    level = x.new_empty((batch, heads, length), dtype=torch.float32)
    norm = x.new_empty((0,) if constant_norm or keys is not None else level.shape, dtype=torch.float32)
    return x.new_empty(x.shape), level, norm


def gradients_like(x, keys, values, log_sigma) -> list[torch.Tensor]:
    """What `attend_backward` returns, not yet written."""
    gradients = [t.new_empty(t.shape) for t in (keys, values) if t is not None]
    return [x.new_empty(x.shape), torch.empty_like(log_sigma), *gradients]


@torch.library.custom_op(
    "gka::attend",
    mutates_args=(),
    schema="(Tensor x, Tensor? keys, Tensor? values, Tensor log_sigma, Tensor? lengths, SymInt before, SymInt after, "
    "bool constant_norm, float eps, Tensor? cu_seqlens=None) -> (Tensor, Tensor, Tensor)",
)
def attend(x, keys, values, log_sigma, lengths, before, after, constant_norm, eps, cu_seqlens=None):
    """(y, level, norm): y (B, Tq, H, D); log2 of the row sums (B, H, Tq); squared norms (B, H, T), empty if keys are
    foreign or norms constant.

    keys None: x. values None: the keys. lengths: (B,) tokens of each row of keys, None: all. before, after:
    how far a query looks, -1 without limit. cu_seqlens: (documents + 1,) int32, contiguous, where the documents of the
    only row begin, and T.
    """
    from gka.impl.triton.launch import forward

    results = output_like(x, keys, constant_norm)
    with torch.cuda.device_of(x):
        features = (x, keys, values, log_sigma, lengths, cu_seqlens)
        forward(*features, before, after, constant_norm, eps, LOG_SIGMA_BOUND, results)
    return results


@attend.register_fake
def _(x, keys, values, log_sigma, lengths, before, after, constant_norm, eps, cu_seqlens=None):
    return output_like(x, keys, constant_norm)


@torch.library.custom_op(
    "gka::attend_backward",
    mutates_args=(),
    schema="(Tensor grad_y, Tensor x, Tensor? keys, Tensor? values, Tensor log_sigma, Tensor? lengths, Tensor y, "
    "Tensor level, Tensor norm, SymInt before, SymInt after, bool constant_norm, Tensor? cu_seqlens=None) -> Tensor[]",
)
def attend_backward(
    grad_y, x, keys, values, log_sigma, lengths, y, level, norm, before, after, constant_norm, cu_seqlens=None
):
    """[dx, dlog_sigma] and, if they are not x, dkeys, dvalues."""
    from gka.impl.triton.launch import backward

    gradients = gradients_like(x, keys, values, log_sigma)
    features = (x, keys, values, log_sigma, lengths, cu_seqlens)
    with torch.cuda.device_of(x):
        backward(grad_y, *features, y, level, norm, before, after, constant_norm, LOG_SIGMA_BOUND, gradients)
    return gradients


@attend_backward.register_fake
def _(grad_y, x, keys, values, log_sigma, *_):
    return gradients_like(x, keys, values, log_sigma)


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:5], *output, inputs[9])
    ctx.limits = inputs[5:8]  # before, after, constant_norm


def _differentiate(ctx, grad_y, grad_level, grad_norm):
    if grad_y is None:
        return (None,) * 10
    *saved, cu_seqlens = ctx.saved_tensors
    dx, dlog_sigma, *gradients = attend_backward(grad_y, *saved, *ctx.limits, cu_seqlens)
    gradients = iter(gradients)
    dkeys, dvalues = (None if t is None else next(gradients) for t in saved[1:3])
    return dx, dkeys, dvalues, dlog_sigma, *[None] * 6


def _refuse(ctx, *grads):
    raise NotImplementedError('impl="triton" has no second derivatives; use impl="reference" for double backward')


attend.register_autograd(_differentiate, setup_context=_save)
attend_backward.register_autograd(_refuse)
