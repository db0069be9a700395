"""Gaussian kernel attention through torch's scaled_dot_product_attention: exact, never builds N x N.

The kernel's exponent is a dot product of features with two more channels (docs/mathematics.md):

    S_ij = -|x_i - k_j|^2 / (2 sigma^2) = [x_i / sigma^2, -|x_i|^2 / (2 sigma^2), 1] . [k_j, 1, -|k_j|^2 / (2 sigma^2)]

Heads of constant norm need neither: plain attention with q = x / sigma^2. In half precision the gradient of sigma does:
sum_ij dS_ij S_ij is small only because a row of dS adds up to 0, but for rounding, so S_ii = |x|^2 / sigma^2 is
subtracted in a channel of x. `eps` is ignored: since K_ii = 1 it changes y by at most a relative 1e-6. In forward mode
the product is made of torch's operations that are not fused, which have derivatives of every order.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gka.bandwidth import inverse_variance
from gka.expansion import expand
from gka.padding_and_masks import bias, visible, with_zeros_and_nan, without_nonfinite, without_padding
from gka.request import PADDING_AND_MASKS, GaussianRequest, Request, Serves, SoftmaxRequest

MOST_PACKED = 2**14
SERVES = Serves(
    options=frozenset({"causal", "window", *PADDING_AND_MASKS, "forward_mode"}),
    applies_eps=False,
    fused_on=("cuda", "cpu"),
)


def unavailable(request: Request) -> str | None:
    """Why a dense mask would be too large, or None: else SDPA serves every request on every device."""
    if request.cu_seqlens is None or request.num_keys <= MOST_PACKED:
        return None
    return (
        f"sdpa makes a dense mask of cu_seqlens, for at most {MOST_PACKED} tokens, got {request.num_keys}: "
        "split the call between documents, or give a padded batch with lengths"
    )


def dot_product(request: SoftmaxRequest) -> torch.Tensor:
    """softmax(scale * q.k + mask) v, (B, Tq, H, D)."""
    return _attend(request.x, request.key_features, request.value_features, request, request.scale)


def gaussian(request: GaussianRequest) -> torch.Tensor:
    """y, (B, Tq, H, D) in x.dtype.

    With constant norms x / sigma^2 is rounded to x.dtype; without, half precision is computed in float32.
    """
    original, (request, nan_rows) = request, without_nonfinite(without_padding(request))
    x, log_sigma, offset = request.x, request.log_sigma, None
    is_half, learns_sigma = x.dtype.itemsize == 2, request.needs_grad and log_sigma.requires_grad
    padding = -(request.head_dim + 2) % 8 if x.is_cuda else 0  # fused CUDA kernels want multiples of 8
    if request.constant_norm:
        inverse, keys, values = inverse_variance(log_sigma), request.key_features, request.values
        scaled = (x * inverse[:, None]).to(x.dtype)
        if not (is_half and learns_sigma):
            y = _attend(scaled, keys, request.value_features, request, 1.0)
            return with_zeros_and_nan(original, y, nan_rows)
        diagonal = -torch.linalg.vecdot(x.float(), x.float()).detach() * inverse
        diagonal = diagonal.clamp(min=torch.finfo(x.dtype).min).to(x.dtype)  # one number in a row, so y stays
        q, k = _extend(scaled, diagonal, 0.0, padding), _extend(keys, 1.0, 0.0, padding)
    else:
        scaled, keys, values, a, b, offset = expand(request)
        q, k = _extend(scaled, a, 1.0, padding), _extend(keys, 1.0, b, padding)
    # Values are as wide as keys: with unequal head sizes torch falls back to N x N.
    v = k if values is None else F.pad(values, (0, k.shape[-1] - request.head_dim))
    y = _attend(q, k, v, request, 1.0)[..., : request.head_dim]
    return with_zeros_and_nan(original, (y if offset is None else y + offset).to(x.dtype), nan_rows)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request, scale: float) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    attn_mask, is_causal = _mask(request, q.dtype)
    # torch's fused kernels have first derivatives in reverse mode, and no others.
    with sdpa_kernel(SDPBackend.MATH) if request.forward_mode else contextlib.nullcontext():
        y = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale)
    if not torch.compiler.is_compiling() and y.grad_fn is not None and y.grad_fn.name().startswith("ScaledDotProduct"):
        for t in (q, k, v):
            if t.requires_grad:
                t.register_hook(_once)
    return y.transpose(1, 2)


def _mask(request: Request, dtype: torch.dtype) -> tuple[torch.Tensor | None, bool]:
    """What torch's function takes as attn_mask and is_causal."""
    hiding = request.hiding
    if not hiding or (hiding == ["causal"] and request.num_queries == request.num_keys):
        return None, bool(hiding)
    seen = visible(request)
    if {*request.mask.conditions, "cu_seqlens"}.issuperset(hiding):  # which leave every row a key
        return seen, False
    added = bias(request, seen, dtype)
    seen = seen | ~seen.any(-1, keepdim=True)  # rows without keys get all; `with_zeros_and_nan` clears them
    return seen if added is None else torch.where(seen, added, float("-inf")), False


def _once(grad: torch.Tensor) -> torch.Tensor:
    return _Once.apply(grad) if grad.requires_grad else grad


class _Once(torch.autograd.Function):
    """The gradient of what goes into a fused kernel, as it is. Its own derivative says that there is none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        raise NotImplementedError(
            'impl="sdpa" has no second derivatives where torch takes a fused kernel; use impl="reference" for double '
            "backward, or torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def _extend(features: torch.Tensor, first, second, padding: int) -> torch.Tensor:
    """Features with two more channels, each (B, T, H) or a number, and `padding` zeros."""
    # Numbers are filled in on the device: a copy from the CPU would stall, and cannot be captured in a CUDA graph.
    shape = features.shape[:-1]
    channels = [t if isinstance(t, torch.Tensor) else features.new_full(shape, t) for t in (first, second)]
    return F.pad(torch.cat([features, torch.stack(channels, dim=-1)], dim=-1), (0, padding))
