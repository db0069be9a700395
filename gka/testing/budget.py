"""The error budget (docs/accuracy.md, Error model): how far y and each gradient may be from float64, and whether a
route keeps to it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from gka.api import EPS
from gka.bandwidth import inverse_variance
from gka.impl import reference
from gka.kernel import log_kernel, squared_distances
from gka.testing.problem import Problem
from gka.testing.results import Route, oracle, plain, run

LARGEST_FLOOR = 0.1  # in half precision the worst case of log_sigma's gradient, which cancels, would allow anything
ZERO = 1e-5  # the largest number allowed where the exact gradient is 0
Tensors = Mapping[str, torch.Tensor]


def check(route: Route, problem: Problem, **options: Any) -> None:
    """Raises AssertionError, with the name and the numbers, if y or a gradient of the route is outside the budget.

    Options as `judge`.
    """
    if reason := judge(route, problem, **options):
        raise AssertionError(reason)


def judge(
    route: Route, problem: Problem, *, slack: float = 0.0, constant_norm: bool = False, by_terms: bool = False
) -> str | None:
    """Why route(x, log_sigma, keys=keys, values=values) is wrong, or None.

    slack: what an eps that the route adds or drops is worth, relative to y.
    constant_norm: x are normalised features, whose norms are constant only up to the rounding of x.
    by_terms: add the floors up term by term (`floors`; self-attention without front only), also where gradients are
    exactly 0.
    """
    want, by_plain, got = oracle(problem).named(), plain(problem).named(), run(route, problem).named()
    if got["y"].dtype != problem.x.dtype:
        return f"y is {got['y'].dtype}, expected {problem.x.dtype}"
    if by_terms and problem.grad_y is not None:
        return disagreement(got, want, by_plain, floors(problem), absolute=True)
    limits = coarse_floors(problem.behind_front(), slack=slack, constant_norm=constant_norm)
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


def coarse_floors(problem: Problem, *, slack: float = 0.0, constant_norm: bool = False) -> dict[str, float]:
    """The rounding floor of y and of each gradient, relative to its norm. Options as `judge`.

    In half precision the exponents are float32, so that only the rounding of inputs and outputs is left, unless norms
    were rounded to be constant.
    """
    if problem.x.dtype.itemsize == 2 and not constant_norm:
        floor = of_y = torch.finfo(problem.x.dtype).eps
    else:
        floor, of_y = exponent_ulp(problem), output_floor(problem)
    limits: dict[str, float] = {"y": slack + of_y}
    if problem.grad_y is not None:
        floor = slack + floor
        # x enters as query, as key and as norm: three roundings.
        limits |= {
            "dx": 3 * floor,
            "dkeys": 3 * floor,
            "dvalues": floor,
            "dlog_sigma": min(LARGEST_FLOOR, floor * log_sigma_condition(problem)),
        }
    return limits


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error against the float64 oracle."""
    return ((got.double() - want).norm() / want.norm()).item()


def exponent_ulp(problem: Problem) -> float:
    """The rounding floor of gradients: eps of the dtype times (1 + the largest |x|^2 / sigma^2), keys included."""
    inverse = inverse_variance(problem.log_sigma.double())
    features = (problem.x, problem.request().key_features)
    largest = max((t.double().square().sum(-1) * inverse).max().item() for t in features)
    return torch.finfo(problem.x.dtype).eps * (1 + largest)


def output_floor(problem: Problem) -> float:
    """The rounding floor of y, relative to y in norm: eps of the dtype times (1 + |sum_j W_ij r_ij |v_j - y_i|| / |y|).

    Exponents off by delta_ij move y_i by sum_j W_ij delta_ij (v_j - y_i); and |delta_ij| <= eps r_ij, for the score
    x_i.k_j / sigma^2 - |k_j|^2 / (2 sigma^2) is known to eps r_ij = eps (|x_i| |k_j| + |k_j|^2 / 2) / sigma^2. Peaked
    rows have little to move.
    """
    exact = problem.double().request()
    y, weights = reference.output_and_weights(exact)
    norm_x, norm_k = (t.norm(dim=-1).mT[..., None] for t in (exact.x, exact.key_features))  # (B, H, T, 1)
    size = (norm_x * norm_k.mT + 0.5 * norm_k.mT.square()) * inverse_variance(exact.log_sigma)[:, None, None]
    moved = (weights * size * _distances(y.transpose(1, 2), exact.value_features.transpose(1, 2))).sum(-1)
    return torch.finfo(problem.x.dtype).eps * (1 + moved.norm() / y.norm()).item()


def log_sigma_condition(problem: Problem) -> float:
    """How much dlog_sigma = -2 sum dS S cancels: sum |dS S| over |sum dS S|, in norm over heads.

    Its floor grows by this factor. The problem needs grad_y.
    """
    assert problem.grad_y is not None
    exact = problem.double().request(EPS)
    y, weights = reference.output_and_weights(exact)
    v, g, y = (t.transpose(1, 2) for t in (exact.value_features, problem.grad_y.double(), y))
    exponents = log_kernel(exact.x, exact.key_features, exact.log_sigma)
    terms = weights * (g @ v.mT - (g * y).sum(-1, keepdim=True)) * exponents
    return (terms.abs().sum((0, 2, 3)).norm() / terms.sum((0, 2, 3)).norm()).item()


def floors(problem: Problem) -> dict[str, float]:
    """The rounding floor of y and of each gradient in norm, term by term (docs/accuracy.md, Error model), for
    self-attention with grad_y, computed in float32, or in x.dtype if that is wider: centred where nothing is causal,
    S_ij the sum of three terms of size r_ij, results rounded to x.dtype.
    """
    eps = torch.finfo(torch.promote_types(problem.x.dtype, torch.float32)).eps
    assert problem.grad_y is not None
    exact = problem.double().request()
    if not exact.mask.causal:
        exact = replace(exact, x=exact.x - exact.x.mean(1, keepdim=True))
    y, w = reference.output_and_weights(exact)
    q, g, v, y = (t.transpose(1, 2) for t in (exact.x, problem.grad_y.double(), exact.value_features, y))
    norm, norm_g, norm_v = (t.norm(dim=-1, keepdim=True) for t in (q, g, v))
    exponents, inverse = log_kernel(exact.x, exact.x, exact.log_sigma), inverse_variance(exact.log_sigma)[:, None, None]

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
        "dlog_sigma": 2 * (w * factor * r + off_g * (exponents.abs() + eps * r)).sum((0, 2, 3)),
    }
    if problem.values is None:
        terms["dx"] = terms["dx"] + terms["dvalues"]
    stored = {name: torch.finfo(torch.float32 if name == "dlog_sigma" else problem.x.dtype) for name in terms}
    return {
        name: eps * terms[name].norm().item()
        + stored[name].eps * want.norm().item()
        + stored[name].smallest_normal * stored[name].eps * want.numel() ** 0.5
        for name, want in oracle(replace(problem, eps=0.0)).named().items()
    }


def _distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return squared_distances(a, b).sqrt()
