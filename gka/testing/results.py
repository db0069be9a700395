"""Seeded features, and what a route gives for them: y and all gradients, of the route under test, of the float64
oracle and of plain PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gka.api import EPS
from gka.bandwidth import inverse_variance
from gka.impl import reference
from gka.masking import Mask
from gka.request import GaussianRequest

KINDS = ("normal", "unit_norm", "clusters", "x10", "x50", "+50")
FULL = Mask()
Route = Callable[..., torch.Tensor]  # route(x, log_sigma, keys=..., values=...) -> y
Optional = torch.Tensor | None
Front = Callable[[torch.Tensor], torch.Tensor]  # what features and keys pass before the route


def make_features(
    kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
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


def run(
    route: Route,
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    values: Optional = None,
    grad_y: Optional = None,
    *,
    keys: Optional = None,
    front: Front | None = None,
) -> Result:
    """Call the route on fresh leaves and back-propagate grad_y; only y without it.

    front: applied to x and keys first, such as a per-head norm; gradients are those of what enters it.
    """

    def leaf(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(grad_y is not None)

    def gradient(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.grad

    x, log_sigma = leaf(x), leaf(log_sigma)
    keys, values = None if keys is None else leaf(keys), None if values is None else leaf(values)
    if front is None:
        y = route(x, log_sigma, keys=keys, values=values)
    else:
        y = route(front(x), log_sigma, keys=None if keys is None else front(keys), values=values)
    if grad_y is None:
        return Result(y.detach())
    y.backward(grad_y.to(y.dtype))
    return Result(y.detach(), x.grad, gradient(keys), gradient(values), log_sigma.grad)


def oracle(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    values: Optional = None,
    grad_y: Optional = None,
    mask: Mask = FULL,
    eps: float = EPS,
    *,
    keys: Optional = None,
    front: Front | None = None,
) -> Result:
    """The definition in float64, on the inputs as rounded to their dtype. With foreign keys eps is not used."""
    keys, values, grad_y = (None if t is None else t.double() for t in (keys, values, grad_y))
    route = partial(_definition, mask=mask, eps=eps)
    return run(route, x.double(), log_sigma.double(), values, grad_y, keys=keys, front=front)


def _definition(
    x: torch.Tensor, log_sigma: torch.Tensor, *, keys: Optional, values: Optional, mask: Mask, eps: float
) -> torch.Tensor:
    return definition(x, log_sigma, keys, values, mask, eps if keys is None else None)[0]


def definition(
    x: torch.Tensor, log_sigma: torch.Tensor, keys: Optional, values: Optional, mask: Mask, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, W) of the reference, in the dtype of the arguments."""
    return reference.output_and_weights(GaussianRequest(x, keys, values, mask, True, log_sigma, eps, False))


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


def plain(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    values: Optional = None,
    grad_y: Optional = None,
    mask: Mask = FULL,
    eps: float = EPS,
    *,
    keys: Optional = None,
    front: Front | None = None,
) -> Result:
    """`plain_attention` with its gradients."""
    visible = mask.dense(x.shape[1], (x if keys is None else keys).shape[1], x.device)
    return run(partial(plain_attention, visible=visible, eps=eps), x, log_sigma, values, grad_y, keys=keys, front=front)
