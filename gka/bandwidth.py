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
    if not (math.isfinite(sigma_squared) and sigma_squared > 0):
        raise ValueError(f"sigma_squared must be a positive finite number, got {sigma_squared!r}")
    return torch.full((num_heads,), 0.5 * math.log(sigma_squared), dtype=torch.float32)


def inverse_variance(log_sigma: torch.Tensor) -> torch.Tensor:
    """1 / sigma^2 per head; log_sigma is clamped to +-LOG_SIGMA_BOUND (zero gradient outside)."""
    return torch.exp(-2.0 * log_sigma.clamp(-LOG_SIGMA_BOUND, LOG_SIGMA_BOUND))
