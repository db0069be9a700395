"""The kernel's exponent, log K_ij of the paper's equation 3, from differences, so that nothing cancels.

Right in value and in derivatives of every order, also where two tokens are equal.
"""

from typing import Any, cast

import torch
from torch.autograd import Function

from gka import validation
from gka.bandwidth import inverse_variance


def log_kernel(queries: torch.Tensor, keys: torch.Tensor, log_sigma: torch.Tensor) -> torch.Tensor:
    """log K_ij = -|q_i - k_j|^2 / (2 sigma_h^2) (paper eq. 3) without cancellation; exactly 0 where q_i = k_j.

    queries: (B, Tq, H, D) and keys: (B, Tk, H, D), in one dtype; half precision is computed in float32. log_sigma:
    (H,), float32 (float64 beside such features). Returns (B, H, Tq, Tk) in the computing dtype. Raises TypeError or
    ValueError as `gaussian_attention`, naming the argument.
    """
    validation.check_features("queries", queries)
    validation.check_features("keys", keys, like=queries)
    validation.check_log_sigma(log_sigma, queries)
    dtype = torch.promote_types(queries.dtype, torch.float32)
    q, k = (t.to(dtype).transpose(1, 2) for t in (queries, keys))  # (B, H, T, D)
    return -0.5 * squared_distances(q, k) * inverse_variance(log_sigma).to(dtype)[:, None, None]


def squared_distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a_i - b_j|^2 from the differences: (..., Ta, D), (..., Tb, D) -> (..., Ta, Tb).

    Has derivatives of any order, in reverse and forward mode, and every transform of torch.func. The value and first
    derivatives take O(Ta * Tb) memory; graphs for second ones and torch.func keep the differences, D times that;
    compiled code what the compiler chooses.
    """
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        # Nested forward mode and tracing want torch's own operations.
        return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1)
    return _SquaredDistances.apply(a, b)


class _SquaredDistances(Function):
    """torch.cdist with derivatives: its own lack the forward mode, and second ones are 0 between equal tokens."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """2 sum_j g_ij (a_i - b_j) and 2 sum_i g_ij (b_j - a_i), of torch's operations, which have derivatives."""
        a, b = ctx.saved_tensors
        grad = 2 * grad
        rows, columns = grad.new_empty(a.shape), grad.new_empty(b.shape)
        for channel in range(a.shape[-1]):
            pulls = grad * _difference(a, b, channel)
            rows[..., channel], columns[..., channel] = pulls.sum(-1), -pulls.sum(-2)
        return rows, columns

    @staticmethod
    def jvp(ctx: Any, da: torch.Tensor, db: torch.Tensor) -> torch.Tensor:
        """2 (a_i - b_j).(da_i - db_j)."""
        a, b = ctx.saved_tensors
        pulls = (_difference(a, b, channel) * _difference(da, db, channel) for channel in range(a.shape[-1]))
        return 2 * cast(torch.Tensor, sum(pulls))


def _difference(a: torch.Tensor, b: torch.Tensor, channel: int) -> torch.Tensor:
    """a_i - b_j in one channel, (..., Ta, Tb)."""
    return a[..., channel].unsqueeze(-1) - b[..., channel].unsqueeze(-2)
