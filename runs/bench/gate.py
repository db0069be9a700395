"""The gate: why a result is wrong, or None."""

from types import SimpleNamespace

import torch

from gka import testing


def disagreement(
    got: dict[str, torch.Tensor],
    want: dict[str, torch.Tensor],
    plain: dict[str, torch.Tensor],
    floors: dict[str, float],
) -> str | None:
    """Why `got` is not what float64 (`want`) says, or None.

    Allowed: twice the error of plain PyTorch in the same dtype, plus a rounding floor.
    """
    for name, value in got.items():
        error = testing.error(value, want[name])
        limit = testing.budget(SimpleNamespace(**plain), SimpleNamespace(**want), name, floors[name])
        if not error <= limit:  # NaN too
            return f"{name} is off by {error:.1e} of its norm, allowed are {limit:.1e}"
    return None
