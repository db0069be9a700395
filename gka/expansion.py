"""The kernel's exponent as a dot product and two terms of norms, for the softmax implementations (docs/mathematics.md):

S_ij = -|x_i - k_j|^2 / (2 sigma^2) = x_i.k_j / sigma^2 + a_i + b_j
"""

import warnings
from typing import NamedTuple

import torch

from gka.bandwidth import inverse_variance
from gka.padding_and_masks import padding
from gka.request import GaussianRequest
from gka.validation import readable

# S is known to machine epsilon times |x|^2 / sigma^2. Beyond this, the coarsest epsilon of all dtypes,
# nothing is gained from the computing dtype.
COARSEST = torch.finfo(torch.bfloat16).eps
LOST = (
    "gaussian_attention: the features are so long, measured in sigma, that |x|^2 / sigma^2 rounds by more than "
    "bfloat16's epsilon, about 1 %, and gradients may be off by more; normalise the heads or pass float64 features, "
    "or use impl='reference', which takes differences first"
)


def extended(features: torch.Tensor, channels: list) -> torch.Tensor:
    """Features with more channels, each (B, T, H) or a number; on CUDA zeros make the width a multiple of 8, as fused
    kernels want it.
    """
    # Numbers are filled in on the device: a copy from the CPU would stall, and cannot be captured in a CUDA graph.
    shape = features.shape[:-1]
    zeros = -(features.shape[-1] + len(channels)) % 8 if features.is_cuda else 0
    added = [t if isinstance(t, torch.Tensor) else features.new_full(shape, t) for t in channels]
    return torch.cat([features, torch.stack(added, dim=-1), features.new_zeros(*shape, zeros)], dim=-1)


def of_constant_norm(request: GaussianRequest, widest: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / sigma^2, the keys), both in x.dtype, (B, T, H, D), where the norms of keys cancel.

    In half precision the gradient of sigma needs one: sum_ij dS_ij S_ij is small only because a row of dS adds up to 0,
    but for rounding, so S_ii = |x|^2 / sigma^2 is subtracted in a channel of x, unless that makes it wider than
    `widest`.
    """
    inverse, x = inverse_variance(request.log_sigma), request.x
    scaled = (x * inverse[:, None]).to(x.dtype)
    learns_sigma = request.needs_grad and request.log_sigma.requires_grad
    fits = widest is None or request.head_dim < widest
    if not (learns_sigma and x.dtype.itemsize == 2 and fits):
        return scaled, request.key_features
    diagonal = (-norm2(x.detach()) * inverse).clamp(min=torch.finfo(x.dtype).min)
    return extended(scaled, [diagonal.to(x.dtype)]), extended(request.key_features, [1.0])


def norm2(x: torch.Tensor) -> torch.Tensor:
    """|x|^2 of half precision, (B, T, H) in float32, without a copy of x in float32."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square()


class Expansion(NamedTuple):
    """The arguments in at least float32."""

    scaled: torch.Tensor  # x / sigma^2, (B, Tq, H, D)
    keys: torch.Tensor  # (B, Tk, H, D)
    values: torch.Tensor | None  # (B, Tk, H, D), or None: the keys
    a: torch.Tensor  # (B, Tq, H)
    b: torch.Tensor  # (B, Tk, H)
    offset: torch.Tensor | None  # what must be added to y, (B, 1, H, D)


def expand(request: GaussianRequest) -> Expansion:
    """x_i.k_j / sigma^2 + a_i + b_j. Warns where rounding is most of what is left.

    a_i cancels in W but not in rounded gradients: without it they contain x_i / sigma^2 times sum_j G_ij, which should
    be 0.
    """
    compute = torch.promote_types(request.x.dtype, torch.float32)
    x = request.x.to(compute)
    keys = x if request.keys is None else request.keys.to(compute)
    values = None if request.values is None else request.values.to(compute)
    offset = None
    if not request.mask.causal and request.attn_mask is None and request.cu_seqlens is None:
        # Distances do not see a common shift; removing it avoids cancellation. Not when causal: rounding would leak the
        # future; nor with a mask or documents, which may hide a token from everyone or from most. Detached, because
        # the gradient through it is exactly zero.
        mean = _mean(keys, padding(request)).detach()
        keys = keys - mean
        x = keys if request.own_keys else x - mean
        offset = mean if values is None else None
    inverse = inverse_variance(request.log_sigma).to(compute)
    b = -0.5 * torch.linalg.vecdot(keys, keys) * inverse
    a = b if request.own_keys else -0.5 * torch.linalg.vecdot(x, x) * inverse
    if readable(a) and readable(b):  # on CPU tensors
        warn_if_lost(-2 * min(a.detach().min().item(), b.detach().min().item()), compute, stacklevel=6)
    return Expansion(x * inverse[:, None], keys, values, a, b, offset)


def _mean(keys: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Of the tokens of each row, (B, 1, H, D); padded ones are zeros."""
    if hidden is None:
        return keys.mean(dim=1, keepdim=True)
    return keys.sum(dim=1, keepdim=True) / (~hidden).sum(1).clamp(min=1)[:, None, None, None]


def warn_if_lost(largest: float, dtype: torch.dtype, stacklevel: int = 5) -> None:
    """Warn where rounding in `dtype` is most of what is left of exponents of size `largest`, a |x|^2 / sigma^2; once
    per line that calls the operator (Python's rule for equal warnings), which `stacklevel` reaches.
    """
    if torch.finfo(dtype).eps * (1 + largest) > COARSEST:
        warnings.warn(LOST, UserWarning, stacklevel=stacklevel)
