"""What tests, benchmarks and tuning share: seeded features, the float64 oracle with all gradients, plain PyTorch, and
the error budget.

    check(partial(gaussian_attention, impl="sdpa"), Problem.seeded("normal", (2, 197, 3, 64)))

raises if the output or a gradient is further from float64 than the budget allows; `judge` returns the reason. A route
is called as route(x, log_sigma, keys=keys, values=values), like `gaussian_attention`.

The budget of a fast path is derived, never tuned: twice the error that plain PyTorch makes in the same dtype on the
same inputs, plus what one unit in the last place of the exponents and of dot products is worth (docs/accuracy.md, Error
model). Everything is measured against float64 of the same rounded inputs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gka.api import EPS
from gka.bandwidth import inverse_variance
from gka.impl import reference
from gka.kernel import log_kernel, squared_distances
from gka.masking import Mask
from gka.request import GaussianRequest

KINDS = ("normal", "unit_norm", "clusters", "x10", "x50", "+50")
FULL = Mask()
Shape = tuple[int, int, int, int]


def make_features(kind: str, shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """(B, T, H, D) features of a kind.

    normal: as LayerNorm leaves them. unit_norm: RMS-normalised per head. clusters: 8 tight ones. xN, +N: one outlier
    channel, scaled by N or offset by N. all+N: every channel offset by N. Raises ValueError for another kind.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "unit_norm":
        x = x / x.square().mean(-1, keepdim=True).sqrt()
    elif kind == "clusters":
        centres = torch.randn(8, shape[-1], generator=generator, dtype=torch.float64)
        x = centres[torch.randint(8, shape[:3], generator=generator)] + 0.05 * x
    elif kind[:1] == "x" and kind[1:].isdigit():
        x[..., 1 % shape[-1]] *= float(kind[1:])
    elif kind[:1] == "+" and kind[1:].isdigit():
        x[..., 1 % shape[-1]] += float(kind[1:])
    elif kind[:4] == "all+" and kind[4:].isdigit():
        x += float(kind[4:])
    elif kind != "normal":
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, all+N or another xN or +N, got {kind!r}")
    return x.to(dtype)


def make_log_sigma(heads: int, head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """(H,) for sigma^2 from sqrt(D) to D, never a power of two: x / sigma^2 would be exact."""
    return 0.5 * torch.log(torch.linspace(1.3 * math.sqrt(head_dim), 1.3 * head_dim, heads)).to(device)


@dataclass(frozen=True, eq=False)
class Problem:
    """One call of the operator, and the gradient that is propagated back through it; B batch, Tq queries, Tk keys, H
    heads, D head_dim.
    """

    x: torch.Tensor  # features, (B, Tq, H, D)
    log_sigma: torch.Tensor  # (H,)
    values: torch.Tensor | None = None  # (B, Tk, H, D), or None: the keys
    grad_y: torch.Tensor | None = None  # (B, Tq, H, D), or None: no gradient is looked at
    keys: torch.Tensor | None = None  # (B, Tk, H, D), or None: x
    mask: Mask = FULL
    eps: float = 0.0  # what the oracle and plain PyTorch add to the row sum; 0 for routes that drop it
    # Applied to x and keys before every route, such as the norm that makes heads constant. Gradients are taken in
    # front of it; floors do not know it (`behind_front`).
    front: Callable[[torch.Tensor], torch.Tensor] | None = None

    @classmethod
    def seeded(
        cls,
        kind: str,
        shape: Shape,
        dtype: torch.dtype = torch.float32,
        *,
        with_values: bool = False,
        with_gradients: bool = True,
        device: torch.device | str = "cpu",
        **fields: Any,
    ) -> "Problem":
        """Features of a kind, and normal values and grad_y where they are wanted, of seeds 0, 1 and 2."""

        def draw(kind: str, seed: int) -> torch.Tensor:
            return make_features(kind, shape, dtype, seed).to(device)

        drawn = {
            "x": draw(kind, 0),
            "log_sigma": make_log_sigma(shape[2], shape[3], device),
            "values": draw("normal", 1) if with_values else None,
            "grad_y": draw("normal", 2) if with_gradients else None,
        }
        return cls(**{**drawn, **fields})

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Problem":
        """The problem with the function of every tensor."""
        mapped: dict[str, Any] = {n: function(t) for n, t in vars(self).items() if isinstance(t, torch.Tensor)}
        return replace(self, **mapped)

    def double(self) -> "Problem":
        """The problem in float64."""
        return self.map(torch.Tensor.double)

    def behind_front(self) -> "Problem":
        """The problem as the route sees it: x and keys through `front`."""
        if self.front is None:
            return self
        keys = None if self.keys is None else self.front(self.keys)
        return replace(self, x=self.front(self.x), keys=keys, front=None)

    def request(self, eps: float | None = None) -> GaussianRequest:
        """What the reference is asked for. eps None, and always with foreign keys: rows are normalised as a softmax."""
        eps = eps if self.keys is None else None
        return GaussianRequest(
            x=self.x, keys=self.keys, values=self.values, mask=self.mask, needs_grad=True, log_sigma=self.log_sigma,
            eps=eps, constant_norm=False,
        )  # fmt: skip


# What a route gives: y and all gradients, of the route under test, of the float64 oracle and of plain PyTorch

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
        q = x.transpose(1, 2)
        k = (x if keys is None else keys).transpose(1, 2)
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


# The budget (docs/accuracy.md, Error model): how far y and each gradient may be from float64

LARGEST_FLOOR = 0.1  # in half precision the worst case of log_sigma's gradient, which cancels, would allow anything
ZERO = 1e-5  # the largest number allowed where the exact gradient is 0
Tensors = Mapping[str, torch.Tensor]


def check(route: Route, problem: Problem, **options: Any) -> None:
    """AssertionError, with name and numbers, if y or a gradient of the route is outside the budget (`judge`)."""
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
    want = oracle(problem).named()
    by_plain = plain(problem).named()
    got = run(route, problem).named()
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
        size = exact.norm().item()
        off = (value.double() - exact).norm().item()
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
    """How much dlog_sigma = -2 sum dS S cancels: sum |dS S| over |sum dS S|, in norm over heads."""
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
    exponents = log_kernel(exact.x, exact.x, exact.log_sigma)
    inverse = inverse_variance(exact.log_sigma)[:, None, None]

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
