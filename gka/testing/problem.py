"""What a route is judged on: seeded features, and the problem that holds them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

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
    """One call of the operator, and the gradient that is propagated back through it.

    Legend: B batch, Tq queries, Tk keys, H heads, D head_dim.
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
        """Features of a kind (`make_features`, seed 0), normal values and grad_y (seeds 1 and 2) where they are wanted,
        and `make_log_sigma`; other fields as given.
        """

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
        return replace(
            self, x=self.front(self.x), keys=None if self.keys is None else self.front(self.keys), front=None
        )

    def request(self, eps: float | None = None) -> GaussianRequest:
        """What the reference is asked for. eps None, and always with foreign keys: rows are normalised as a softmax."""
        eps = eps if self.keys is None else None
        return GaussianRequest(
            x=self.x, keys=self.keys, values=self.values, mask=self.mask, needs_grad=True, log_sigma=self.log_sigma,
            eps=eps, constant_norm=False,
        )  # fmt: skip
