"""The per-head bandwidth sigma_h = exp(log_sigma_h) (paper eq. 3): parametrisation, initial value and bounds.

`log_sigma` is float32 whatever the features are, one value per head, and never weight-decayed.
"""

import math

import torch

# exp(2 * 20) ~ 2e17 keeps x.x / sigma^2 finite in float32; at that distance the operator is already the identity, or
# the mean.
LOG_SIGMA_BOUND = 20.0


def initial_log_sigma(num_heads: int, sigma_squared: float) -> torch.Tensor:
    """(num_heads,) float32 log-bandwidths for a starting sigma^2 > 0 (in squared feature units).

    Raises ValueError if `sigma_squared` is not a positive finite number.
    """
    is_number = isinstance(sigma_squared, (int, float))
    if not is_number or not (math.isfinite(sigma_squared) and sigma_squared > 0):
        raise ValueError(f"sigma_squared must be a positive finite number, got {sigma_squared!r}")
    return torch.full((num_heads,), 0.5 * math.log(sigma_squared), dtype=torch.float32)


def at_least_float32(log_sigma: torch.Tensor) -> torch.Tensor:
    """`log_sigma` as the operator takes it: `.bfloat16()` or FSDP may have cast the parameter of a layer down."""
    return log_sigma.to(torch.promote_types(log_sigma.dtype, torch.float32))


def inverse_variance(log_sigma: torch.Tensor) -> torch.Tensor:
    """1 / sigma^2 per head; log_sigma is clamped to +-LOG_SIGMA_BOUND (zero gradient outside)."""
    return torch.exp(-2.0 * log_sigma.clamp(-LOG_SIGMA_BOUND, LOG_SIGMA_BOUND))


def bandwidth_warnings(layer: int, sigma: list[float], head_dim: int, flag: str) -> dict[str, str]:
    """A line for the heads of a layer whose bandwidths are too small, or too large, by what it is about; mostly none.

    sigma: of every head, where features have `head_dim` entries. flag: the learning rate to lower.
    """
    faults: dict[str, list[int]] = {}
    for head, value in enumerate(sigma):
        if fault := _fault(value, head_dim):
            faults.setdefault(fault, []).append(head)
    lines = {}
    for fault, heads in faults.items():
        about = f"sigma of layer_{layer}, head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}"
        values = ", ".join(f"{sigma[head]:.3g}" for head in heads)
        lines[about] = f"{about}: {values}, {fault}; start again with a lower {flag}"
    return lines


def _fault(sigma: float, head_dim: int) -> str:
    """What is wrong with a head whose bandwidth is `sigma`, in words; empty if its weights can tell tokens apart.

    Features of `head_dim` entries, normalised, have norm sqrt(head_dim), so distances are between 0 and twice that, and
    the weight of two tokens is exp(-distance^2 / 2 sigma^2), the exponent at most 2 head_dim / sigma^2. Below
    sigma^2 = head_dim / 2e6 even tokens that differ by 1 % of the norm have an exponent beyond 100, where float32 has
    next to nothing: every token reads itself alone. Above sigma^2 = 2e4 head_dim opposite tokens weigh the same to
    1e-4: a plain mean. Training starts at sigma^2 between sqrt(head_dim) and head_dim, and moves it by factors of ten,
    not of a thousand.
    """
    if math.isnan(sigma):
        return "it is not a number"
    if sigma**2 < head_dim / 2e6:
        return "so small that every token reads itself alone"
    if sigma**2 > 2e4 * head_dim:
        return "so large that every token reads the plain mean"
    return ""
