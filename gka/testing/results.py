"""What a route gives for a problem: y and all gradients, of the route under test, of the float64 oracle and of plain
PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from gka.api import EPS
from gka.bandwidth import inverse_variance
from gka.testing.problem import Problem

Optional = torch.Tensor | None
Route = Callable[..., torch.Tensor]  # route(x, log_sigma, keys=..., values=...) -> y


@dataclass
class Result:
    """An output and its gradients; None where there is none: no gradient asked for, or the tensor is the features."""

    y: torch.Tensor
    dx: torch.Tensor | None = None
    dkeys: torch.Tensor | None = None
    dvalues: torch.Tensor | None = None
    dlog_sigma: torch.Tensor | None = None

    def named(self) -> dict[str, torch.Tensor]:
        return {name: t for name, t in vars(self).items() if t is not None}


def run(route: Route, problem: Problem) -> Result:
    """Call the route on fresh leaves and back-propagate grad_y; only y without it."""

    def gradient(t: Optional) -> Optional:
        return None if t is None else t.grad

    leaves = problem.map(lambda t: t.detach().clone().requires_grad_(problem.grad_y is not None))
    seen = leaves.behind_front()
    y = route(seen.x, seen.log_sigma, keys=seen.keys, values=seen.values)
    if problem.grad_y is None:
        return Result(y.detach())
    y.backward(problem.grad_y.to(y.dtype))
    return Result(y.detach(), *map(gradient, (leaves.x, leaves.keys, leaves.values, leaves.log_sigma)))


def oracle(problem: Problem) -> Result:
    """Equations 3, 4 and 7 in float64, on the inputs as rounded to their dtype, with the derivatives that torch takes
    of them: nothing is shared with an implementation but the masks and sigma. With foreign keys rows are softmaxes.
    """
    exact = problem.double()

    def route(x: torch.Tensor, log_sigma: torch.Tensor, *, keys: Optional, values: Optional) -> torch.Tensor:
        q, k = x.transpose(1, 2), (x if keys is None else keys).transpose(1, 2)
        v = k if values is None else values.transpose(1, 2)
        exponent = -0.5 * _squared_distances(q, k) * inverse_variance(log_sigma)[:, None, None]
        visible = exact.mask.dense(q.shape[2], k.shape[2], x.device)
        affinity = exponent.exp() * visible
        weights = affinity / (affinity.sum(-1, keepdim=True) + exact.eps)
        if keys is not None:
            weights = exponent.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2)

    return run(route, exact)


def _squared_distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a_i - b_j|^2 of float64 vectors, (..., Ta, D) and (..., Tb, D) -> (..., Ta, Tb)."""
    if not a.is_cuda:
        return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()

    def of_channel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(-1) - y.unsqueeze(-2)).square()

    # There the derivative of cdist holds D numbers for each pair, and from 2^31 on it writes where it must not
    # (pytorch#193099).
    channels = zip(a.unbind(-1), b.unbind(-1), strict=True)
    return sum((checkpoint(of_channel, x, y, use_reentrant=False) for x, y in channels), a.new_zeros(()))


def plain_attention(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    *,
    keys: Optional = None,
    values: Optional = None,
    visible: Optional = None,
    eps: float = EPS,
) -> torch.Tensor:
    """What one would write in PyTorch from the paper, in x.dtype: |a|^2 + |b|^2 - 2ab, exp, mask, divide (section 3.2).

    visible: (Tq, Tk), 1 where a query may look, bool or x's dtype; None hides nothing.
    """
    q = x.transpose(1, 2)
    k = q if keys is None else keys.transpose(1, 2)
    v = k if values is None else values.transpose(1, 2)
    distance2 = q.square().sum(-1, keepdim=True) + k.square().sum(-1, keepdim=True).mT - 2 * q @ k.mT
    affinity = torch.exp(-0.5 * distance2 * inverse_variance(log_sigma).to(x.dtype)[:, None, None])
    affinity = affinity if visible is None else affinity * visible
    weights = affinity / (affinity.sum(-1, keepdim=True) + eps)
    return (weights @ v).transpose(1, 2)


def plain(problem: Problem) -> Result:
    """`plain_attention` with its gradients, in the problem's dtype."""
    request = problem.request()
    visible = problem.mask.dense(request.num_queries, request.num_keys, problem.x.device)
    return run(partial(plain_attention, visible=visible, eps=problem.eps), problem)
