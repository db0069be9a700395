"""The error budget (gka/README.md, Error model): how far y and each gradient may be from float64, and whether a
route keeps to it.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from gka.api import EPS
from gka.bandwidth import inverse_variance
from gka.kernel import log_kernel, squared_distances
from gka.masking import Mask
from gka.testing.results import FULL, Front, Optional, Route, definition, oracle, plain, run

LARGEST_FLOOR = 0.1  # in half precision the worst case of log_sigma's gradient, which cancels, would allow anything
ZERO = 1e-5  # the largest number allowed where the exact gradient is 0
Tensors = Mapping[str, torch.Tensor]


def check(
    route: Route,
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    values: Optional = None,
    grad_y: Optional = None,
    mask: Mask = FULL,
    **options: Any,
) -> None:
    """Raises AssertionError, with the name and the numbers, if y or a gradient of the route is outside the budget.

    Arguments as `judge`.
    """
    if reason := judge(route, x, log_sigma, values, grad_y, mask, **options):
        raise AssertionError(reason)


def judge(
    route: Route,
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    values: Optional = None,
    grad_y: Optional = None,
    mask: Mask = FULL,
    *,
    keys: Optional = None,
    front: Front | None = None,
    eps: float = 0.0,
    slack: float = 0.0,
    constant_norm: bool = False,
    by_terms: bool = False,
) -> str | None:
    """Why route(x, log_sigma, keys=keys, values=values) is wrong, or None. Without grad_y only y is looked at.

    front: applied to x and keys before every route, such as the norm that makes heads constant; gradients are taken in
    front of it.
    eps: what the oracle adds to the row sum. slack: what an eps that the route adds or drops is worth, relative to y.
    constant_norm: x are normalised features, whose norms are constant only up to the rounding of x.
    by_terms: add the floors up term by term (`floors`; self-attention without front only), also where gradients are
    exactly 0.
    """
    tensors = x, log_sigma, values, grad_y
    want = oracle(*tensors, mask, eps, keys=keys, front=front).named()
    by_plain = plain(*tensors, mask, eps, keys=keys, front=front).named()
    got = run(route, *tensors, keys=keys, front=front).named()
    if got["y"].dtype != x.dtype:
        return f"y is {got['y'].dtype}, expected {x.dtype}"
    if by_terms and grad_y is not None:
        return disagreement(got, want, by_plain, floors(x, log_sigma, values, grad_y, mask), absolute=True)
    if front is not None:
        x, keys = front(x), None if keys is None else front(keys)
    limits = coarse_floors(x, log_sigma, values, grad_y, mask, keys=keys, slack=slack, constant_norm=constant_norm)
    return disagreement(got, want, by_plain, limits)


def disagreement(
    got: Tensors, want: Tensors, by_plain: Tensors, floors: Mapping[str, float], absolute: bool = False
) -> str | None:
    """Why `got` is not what float64 (`want`) says, or None. Allowed is twice the error of plain PyTorch, where that is
    finite, plus a floor.

    floors: relative to the norm of `want`, or, if absolute, norms themselves.
    """
    for name, value in got.items():
        exact = want[name].double()
        size, off = exact.norm().item(), (value.double() - exact).norm().item()
        by_plain_off = 2 * (by_plain[name].double() - exact).norm().item()
        limit = floors[name] * (1 if absolute else size) + (by_plain_off if math.isfinite(by_plain_off) else 0.0)
        if size == 0 and not absolute:
            if not value.abs().max() <= ZERO:
                return f"{name} is up to {value.abs().max():.1e}, expected 0"
        elif not off <= limit:  # NaN too
            unit = size or 1.0
            return f"{name} is off by {off / unit:.1e} of its norm, allowed are {limit / unit:.1e}"
    return None


def coarse_floors(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    values: Optional = None,
    grad_y: Optional = None,
    mask: Mask = FULL,
    *,
    keys: Optional = None,
    slack: float = 0.0,
    constant_norm: bool = False,
) -> dict[str, float]:
    """The rounding floor of y and of each gradient, relative to its norm. Arguments as `judge`.

    In half precision the exponents are float32, so that only the rounding of inputs and outputs is left, unless norms
    were rounded to be constant.
    """
    if x.dtype.itemsize == 2 and not constant_norm:
        floor = of_y = torch.finfo(x.dtype).eps
    else:
        floor = exponent_ulp(x if keys is None else torch.cat([x, keys], dim=1), log_sigma)
        of_y = output_floor(x, log_sigma, values, mask, keys)
    limits: dict[str, float] = {"y": slack + of_y}
    if grad_y is not None:
        floor = slack + floor
        condition = log_sigma_condition(x, log_sigma, values, grad_y, mask, keys)
        # x enters as query, as key and as norm: three roundings.
        limits |= {
            "dx": 3 * floor,
            "dkeys": 3 * floor,
            "dvalues": floor,
            "dlog_sigma": min(LARGEST_FLOOR, floor * condition),
        }
    return limits


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error against the float64 oracle."""
    return ((got.double() - want).norm() / want.norm()).item()


def exponent_ulp(x: torch.Tensor, log_sigma: torch.Tensor) -> float:
    """The rounding floor of gradients: eps of the dtype times (1 + the largest |x|^2 / sigma^2)."""
    largest = (x.double().square().sum(-1) * inverse_variance(log_sigma.double())).max().item()
    return torch.finfo(x.dtype).eps * (1 + largest)


def output_floor(
    x: torch.Tensor, log_sigma: torch.Tensor, values: Optional = None, mask: Mask = FULL, keys: Optional = None
) -> float:
    """The rounding floor of y, relative to y in norm: eps of the dtype times (1 + |sum_j W_ij r_ij |v_j - y_i|| / |y|).

    Exponents off by delta_ij move y_i by sum_j W_ij delta_ij (v_j - y_i); and |delta_ij| <= eps r_ij, for the score
    x_i.k_j / sigma^2 - |k_j|^2 / (2 sigma^2) is known to eps r_ij = eps (|x_i| |k_j| + |k_j|^2 / 2) / sigma^2. Peaked
    rows have little to move.
    """
    eps = torch.finfo(x.dtype).eps
    x, keys, values, log_sigma = _doubles(x, keys, values, log_sigma)
    y, weights = definition(x, log_sigma, keys, values, mask, None)
    norm_x, norm_k = (t.norm(dim=-1).transpose(1, 2)[..., None] for t in (x, keys))  # (B, H, T, 1)
    size = (norm_x * norm_k.mT + 0.5 * norm_k.mT.square()) * inverse_variance(log_sigma)[:, None, None]
    moved = (weights * size * _distances(y.transpose(1, 2), values.transpose(1, 2))).sum(-1)
    return eps * (1 + moved.norm() / y.norm()).item()


def log_sigma_condition(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    values: Optional,
    grad_y: torch.Tensor,
    mask: Mask = FULL,
    keys: Optional = None,
) -> float:
    """How much dlog_sigma = -2 sum dS S cancels: sum |dS S| over |sum dS S|, in norm over heads.

    Its floor grows by this factor.
    """
    eps = EPS if keys is None else None
    x, keys, values, log_sigma = _doubles(x, keys, values, log_sigma)
    y, weights = definition(x, log_sigma, keys, values, mask, eps)
    q, k, g, v = (t.transpose(1, 2) for t in (x, keys, grad_y.double(), values))
    terms = weights * (g @ v.mT - (g * y.transpose(1, 2)).sum(-1, keepdim=True)) * log_kernel(q, k, log_sigma)
    return (terms.abs().sum((0, 2, 3)).norm() / terms.sum((0, 2, 3)).norm()).item()


def floors(
    x: torch.Tensor, log_sigma: torch.Tensor, values: Optional, grad_y: torch.Tensor, mask: Mask = FULL
) -> dict[str, float]:
    """The rounding floor of y and of each gradient in norm, term by term (gka/README.md, Error model), for
    self-attention computed in float32, or in x.dtype if that is wider: centred where nothing is causal, S_ij the sum of
    three terms of size r_ij, results rounded to x.dtype.
    """
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    want = oracle(x, log_sigma, values, grad_y, mask, eps=0.0)
    q, g = (t.double().transpose(1, 2) for t in (x, grad_y))
    q = q if mask.causal else q - q.mean(2, keepdim=True)
    v = q if values is None else values.double().transpose(1, 2)
    log_sigma, inverse = log_sigma.double(), inverse_variance(log_sigma.double())[:, None, None]
    y, w = definition(q.transpose(1, 2), log_sigma, None, v.transpose(1, 2), mask, None)
    y, (norm, norm_g, norm_v) = y.transpose(1, 2), (t.norm(dim=-1, keepdim=True) for t in (q, g, v))

    r = 0.5 * inverse * (norm + norm.mT).square()  # |dS_ij| <= eps r_ij
    # |dW_ij| <= eps off_w_ij, as dW_ij = W_ij (dS_ij - sum_l W_il dS_il)
    off_w = w * (1 + r * (1 - 2 * w) + (w * r).sum(-1, keepdim=True))
    off_y = y.norm(dim=-1, keepdim=True) + (w * r * _distances(y, v)).sum(-1, keepdim=True)
    factor = (g @ v.mT - (g * y).sum(-1, keepdim=True)).abs()
    off_g = off_w * factor + w * norm_g * (norm_v.mT + off_y)
    pulls = off_g * _distances(q, q) + (w * factor + eps * off_g) * (norm + norm.mT)
    terms = {
        "y": off_y[..., 0],
        "dx": (inverse * (pulls + pulls.mT)).sum(-1),
        "dvalues": (off_w * norm_g).sum(-2),
        "dlog_sigma": 2 * (w * factor * r + off_g * (log_kernel(q, q, log_sigma).abs() + eps * r)).sum((0, 2, 3)),
    }
    if values is None:
        terms["dx"] = terms["dx"] + terms["dvalues"]
    stored = {name: torch.finfo(torch.float32 if name == "dlog_sigma" else x.dtype) for name in terms}
    return {
        name: eps * terms[name].norm().item()
        + stored[name].eps * exact.norm().item()
        + stored[name].smallest_normal * stored[name].eps * exact.numel() ** 0.5
        for name, exact in want.named().items()
    }


def _doubles(
    x: torch.Tensor, keys: Optional, values: Optional, log_sigma: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float64, with keys and values that are given elsewhere put in their places."""
    x, log_sigma = x.double(), log_sigma.double()
    keys = x if keys is None else keys.double()
    return x, keys, keys if values is None else values.double(), log_sigma


def _distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return squared_distances(a, b).sqrt()
