"""What tests and benchmarks share: seeded features, the float64 oracle with all gradients, plain PyTorch, and the error budget.

The budget of a fast path is derived, never tuned: twice the error that plain PyTorch makes in the same dtype on the same inputs, plus what
one unit in the last place of the exponents and of dot products is worth: `floors`, term by term; or, coarser, `output_floor` for y and
`exponent_ulp` for gradients (times `log_sigma_condition` for log_sigma's). Everything is measured against float64 of the same rounded inputs.
"""

from dataclasses import dataclass

import torch

from gka.api import EPS
from gka.bandwidth import inverse_variance
from gka.impl import reference
from gka.kernel import log_kernel, squared_distances
from gka.masking import Mask

KINDS = ("normal", "unit_norm", "clusters", "x10", "x50", "+50")


def make_features(kind: str, shape: tuple[int, int, int, int], dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """(B, T, H, D) features: LayerNorm-like, RMS-normalised per head, 8 tight clusters, with one outlier channel (xN scaled, +N offset), or with
    all channels offset (all+N)."""
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


@dataclass
class Result:
    """An output and its gradients with respect to x, values (None when they are the features) and log_sigma."""

    y: torch.Tensor
    dx: torch.Tensor
    dvalues: torch.Tensor | None
    dlog_sigma: torch.Tensor

    def named(self):
        return [(name, t) for name, t in vars(self).items() if t is not None]


def run(function, x, log_sigma, values, grad_y) -> Result:
    """Call function(x, log_sigma, values) on fresh leaves and back-propagate grad_y."""
    x, log_sigma = x.detach().clone().requires_grad_(), log_sigma.detach().clone().requires_grad_()
    values = None if values is None else values.detach().clone().requires_grad_()
    y = function(x, log_sigma, values)
    y.backward(grad_y.to(y.dtype))
    return Result(y.detach(), x.grad, None if values is None else values.grad, log_sigma.grad)


def oracle(x, log_sigma, values, grad_y, mask: Mask = Mask(), eps: float = EPS) -> Result:  # noqa: B008 (Mask is frozen)
    """The definition in float64, on the inputs as rounded to their dtype."""

    def definition(x, log_sigma, values):
        return reference.gaussian(x, x, x if values is None else values, log_sigma, mask, eps)[0]

    values = None if values is None else values.double()
    return run(definition, x.double(), log_sigma.double(), values, grad_y.double())


def plain(x, log_sigma, values, grad_y, mask: Mask = Mask(), eps: float = EPS) -> Result:  # noqa: B008
    """What one would write in PyTorch from the paper, in x.dtype: |a|^2 + |b|^2 - 2ab, exp, mask, divide (section 3.2)."""

    def eager(x, log_sigma, values):
        q = x.transpose(1, 2)
        v = q if values is None else values.transpose(1, 2)
        norm = q.square().sum(-1, keepdim=True)
        distance2 = norm + norm.mT - 2 * q @ q.mT
        affinity = torch.exp(-0.5 * distance2 * inverse_variance(log_sigma).to(x.dtype)[:, None, None])
        affinity = affinity * mask.dense(x.shape[1], x.shape[1], x.device)
        weights = affinity / (affinity.sum(-1, keepdim=True) + eps)
        return (weights @ v).transpose(1, 2)

    return run(eager, x, log_sigma, values, grad_y)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error against the float64 oracle."""
    return ((got.double() - want).norm() / want.norm()).item()


def exponent_ulp(x, log_sigma) -> float:
    """The rounding floor of gradients: eps of the dtype times (1 + the largest |x|^2 / sigma^2)."""
    largest = (x.double().square().sum(-1) * inverse_variance(log_sigma.double())).max().item()
    return torch.finfo(x.dtype).eps * (1 + largest)


def output_floor(x, log_sigma, values=None, mask: Mask = Mask()) -> float:  # noqa: B008
    """The rounding floor of y, relative to y in norm: eps of the dtype times (1 + |sum_j W_ij r_ij |v_j - y_i|| / |y|).

    Exponents off by delta_ij move y_i by sum_j W_ij delta_ij (v_j - y_i); and |delta_ij| <= eps r_ij, for the score x_i.x_j / sigma^2 -
    |x_j|^2 / (2 sigma^2) is known to eps r_ij = eps (|x_i| |x_j| + |x_j|^2 / 2) / sigma^2. Peaked rows have little to move.
    """
    eps, x, log_sigma = torch.finfo(x.dtype).eps, x.double(), log_sigma.double()
    values = x if values is None else values.double()
    y, weights = reference.gaussian(x, x, values, log_sigma, mask, None)
    norm = x.norm(dim=-1).transpose(1, 2)[..., None]  # (B, H, T, 1)
    size = (norm * norm.mT + 0.5 * norm.mT.square()) * inverse_variance(log_sigma)[:, None, None]
    moved = (weights * size * _distances(y.transpose(1, 2), values.transpose(1, 2))).sum(-1)
    return eps * (1 + moved.norm() / y.norm()).item()


def log_sigma_condition(x, log_sigma, values, grad_y, mask: Mask = Mask()) -> float:  # noqa: B008
    """How much dlog_sigma = -2 sum dS S cancels: sum |dS S| over |sum dS S|, in norm over heads. Its floor grows by this factor."""
    x, grad_y = x.double(), grad_y.double()
    values = x if values is None else values.double()
    y, weights = reference.gaussian(x, x, values, log_sigma.double(), mask, EPS)
    q, g, v = (t.transpose(1, 2) for t in (x, grad_y, values))
    terms = weights * (g @ v.mT - (g * y.transpose(1, 2)).sum(-1, keepdim=True)) * log_kernel(q, q, log_sigma.double())
    return (terms.abs().sum((0, 2, 3)).norm() / terms.sum((0, 2, 3)).norm()).item()


def floors(x, log_sigma, values, grad_y, mask: Mask = Mask()) -> dict[str, float]:  # noqa: B008
    """The rounding floor of y and of each gradient in norm, term by term (gka/README.md, Error model), for self-attention computed in float32,
    or in x.dtype if that is wider: centred where nothing is causal, S_ij the sum of three terms of size r_ij, results rounded to x.dtype.
    """
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    want = oracle(x, log_sigma, values, grad_y, mask, eps=0.0)
    q, g = (t.double().transpose(1, 2) for t in (x, grad_y))
    q = q if mask.causal else q - q.mean(2, keepdim=True)
    v = q if values is None else values.double().transpose(1, 2)
    log_sigma, inverse = log_sigma.double(), inverse_variance(log_sigma.double())[:, None, None]
    y, w = reference.gaussian(q.transpose(1, 2), q.transpose(1, 2), v.transpose(1, 2), log_sigma, mask, None)
    y, (norm, norm_g, norm_v) = y.transpose(1, 2), (t.norm(dim=-1, keepdim=True) for t in (q, g, v))

    r = 0.5 * inverse * (norm + norm.mT).square()  # |dS_ij| <= eps r_ij
    off_w = w * (
        1 + r * (1 - 2 * w) + (w * r).sum(-1, keepdim=True)
    )  # |dW_ij| <= eps off_w_ij, as W_ij (dS_ij - sum_l W_il dS_il)
    off_y = y.norm(dim=-1, keepdim=True) + (w * r * _distances(y, v)).sum(-1, keepdim=True)
    factor = (g @ v.mT - (g * y).sum(-1, keepdim=True)).abs()
    off_g = off_w * factor + w * norm_g * (norm_v.mT + off_y)
    pulls = off_g * _distances(q, q) + (w * factor + eps * off_g) * (norm + norm.mT)
    found = {
        "y": off_y[..., 0],
        "dx": (inverse * (pulls + pulls.mT)).sum(-1),
        "dvalues": (off_w * norm_g).sum(-2),
        "dlog_sigma": 2 * (w * factor * r + off_g * (log_kernel(q, q, log_sigma).abs() + eps * r)).sum((0, 2, 3)),
    }
    found["dx"] = found["dx"] + found["dvalues"] if values is None else found["dx"]
    stored = {name: torch.finfo(torch.float32 if name == "dlog_sigma" else x.dtype) for name in found}
    return {
        name: eps * found[name].norm().item()
        + stored[name].eps * result.norm().item()
        + stored[name].smallest_normal * stored[name].eps * result.numel() ** 0.5
        for name, result in want.named()
    }


def _distances(a, b):
    return squared_distances(a, b).sqrt()


def budget(plain_result: Result, want: Result, name: str, floor: float, factor: float = 2.0) -> float:
    """Largest allowed relative error of the named output or gradient."""
    return factor * error(getattr(plain_result, name), getattr(want, name)) + floor
