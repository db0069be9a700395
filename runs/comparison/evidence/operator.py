"""Claims about the operator itself (section 3), computed here on seeded features; see also sizes.py for its cost."""

import torch

from gka import gaussian_weights, log_kernel
from gka.api import EPS
from runs.comparison.evidence import Finding, holds, seen
from runs.tables.demo import vision_records

SHAPE = (1, 40, 2, 16)  # batch, tokens, heads, head_dim
FLOAT64 = "float64, seeded features"


def _features() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*SHAPE, generator=generator, dtype=torch.float64), torch.zeros(SHAPE[2], dtype=torch.float64) + 1


def _weights(**mask) -> torch.Tensor:
    """W, (1, H, T, T)."""
    x, log_sigma = _features()
    return gaussian_weights(x, log_sigma, **mask)


def rows_sum_to_one() -> Finding:
    """Up to the epsilon of eq. 4."""
    off = (_weights().sum(-1) - 1).abs().max().item()
    return holds(off < EPS, FLOAT64, f"Rows of W sum to 1 within the ε of equation 4, {EPS:.0e}.")


def diffusion_is_symmetric() -> Finding:
    """Of K; dividing each row by its own sum makes W another matrix than its transpose."""
    x, log_sigma = _features()
    kernel, weights = log_kernel(x, x, log_sigma).exp(), _weights()
    apart = [(matrix - matrix.mT).abs().max().item() for matrix in (kernel, weights)]
    text = f"K equals its transpose. W, whose rows are normalised, differs from its own by up to {apart[1]:.2f}:"
    return holds(apart[0] < 1e-12, "of K; not of W", f"{text} the mixing itself is not symmetric.")


def causal_mask() -> Finding:
    weights = _weights(causal=True)
    ahead, off = weights.triu(1).abs().max().item(), (weights.sum(-1) - 1).abs().max().item()
    text = f"Weight on later tokens: {ahead:.0f}; rows still sum to 1 within {EPS:.0e}."
    return holds(ahead == 0 and off < 1.01 * EPS, FLOAT64, text)


def window_mask() -> Finding:
    """i - W < j <= i is W keys; ours (and nanochat's) window counts the earlier ones alone."""
    window = 5
    reached = int((_weights(causal=True, window=window - 1) > 0).sum(-1).max())
    text = f"A window of {window} in the paper's sense, {window - 1} in ours and nanochat's, reaches {reached} keys."
    return holds(reached == window, FLOAT64, text)


def drop_in_layer() -> Finding:
    """Same settings of the trainer for every kind in the demo's vision models, but for the model."""
    settings = []
    for records in vision_records().values():
        config = records[0]["config"]
        settings.append({key: value for key, value in config.items() if key not in ("model", "model_tag", "seed")})
    same = len(settings) > 1 and all(other == settings[0] for other in settings)
    text = f"{len(settings)} kinds of attention trained with one set of settings; only the model's name differs."
    return seen(same, "the demo's vision models", text)
