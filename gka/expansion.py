"""What the softmax implementations compute where norms vary: S_ij = -|x_i - k_j|^2 / (2 sigma^2) as x_i.k_j / sigma^2 + a_i + b_j (gka/README.md)."""

import warnings
from typing import NamedTuple

import torch

from gka.bandwidth import inverse_variance
from gka.masking import Mask
from gka.validation import readable

# S is known to machine epsilon times |x|^2 / sigma^2. Beyond this, the coarsest epsilon of all dtypes, the computing dtype has lost its point.
COARSEST = torch.finfo(torch.bfloat16).eps
LOST = (
    "gaussian_attention: the features are so long, measured in sigma, that |x|^2 / sigma^2 rounds by more than bfloat16's epsilon, about 1 %, and "
    "gradients may be off by more; normalise the heads or pass float64 features, or use impl='reference', which takes differences first"
)


class Expansion(NamedTuple):
    """The arguments in at least float32; what was one tensor still is one.

    scaled: x / sigma^2, (B, Tq, H, D). keys, values: (B, Tk, H, D). a: (B, Tq, H). b: (B, Tk, H). offset: what y lacks, (B, 1, H, D), or None.
    """

    scaled: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    offset: torch.Tensor | None


def expand(x, keys, values, log_sigma, mask: Mask) -> Expansion:
    """x_i.k_j / sigma^2 + a_i + b_j for arguments as in `reference.gaussian`. Warns where rounding is most of what is left.

    a_i cancels in W but not in rounded gradients: without it they contain sum_j G_ij, which should be 0, times x_i / sigma^2.
    """
    own_keys, own_values = keys is x, values is keys
    compute = torch.promote_types(x.dtype, torch.float32)
    x = x.to(compute)
    keys = x if own_keys else keys.to(compute)
    values = keys if own_values else values.to(compute)
    offset = None
    if not mask.causal:
        # Distances do not see a common shift; removing it avoids cancellation. Not when causal: rounding would leak the future.
        # Detached, because the gradient through it is exactly zero.
        mean = keys.mean(dim=1, keepdim=True).detach()
        centred = keys - mean
        x, keys = centred if own_keys else x - mean, centred
        if own_values:
            values, offset = centred, mean
    inverse = inverse_variance(log_sigma).to(compute)
    b = -0.5 * torch.linalg.vecdot(keys, keys) * inverse
    a = b if own_keys else -0.5 * torch.linalg.vecdot(x, x) * inverse
    _warn_if_lost(a, b)
    return Expansion(x * inverse[:, None], keys, values, a, b, offset)


def _warn_if_lost(a, b) -> None:
    """Once per calling line (Python's rule for equal warnings), on CPU tensors, as everything that reads a tensor's values."""
    if not (readable(a) and readable(b)):
        return
    largest = -2 * min(a.detach().min().item(), b.detach().min().item())
    if torch.finfo(a.dtype).eps * (1 + largest) > COARSEST:
        warnings.warn(LOST, UserWarning, stacklevel=5)
