"""Claims about the operator itself (section 3), computed here on seeded features; see also sizes.py for its cost."""

import torch

from gka import gaussian_attention, log_kernel
from gka.api import EPS
from runs.bench import operator_error
from runs.paper.evidence import Finding, follows, holds
from runs.sections.sources import vision_records
from trainkit.progress import read_lines

SHAPE = (1, 40, 2, 16)  # batch, tokens, heads, head_dim
FLOAT64 = "float64, seeded features"


def _features() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*SHAPE, generator=generator, dtype=torch.float64), torch.zeros(SHAPE[2], dtype=torch.float64) + 1


def _weights(**mask) -> torch.Tensor:
    """W, (1, H, T, T)."""
    x, log_sigma = _features()
    return gaussian_attention(x, log_sigma, return_weights=True, impl="reference", **mask)[1]


def rows_sum_to_one() -> Finding:
    """Up to the epsilon of eq. 4."""
    off = (_weights().sum(-1) - 1).abs().max().item()
    return holds(off < EPS, FLOAT64, f"Rows of W sum to 1 within the ε of equation 4, {EPS:.0e}.")


def distance_identity() -> Finding:
    """The identity is exact; rounding is another matter, which the operator's error table shows."""
    x, log_sigma = _features()
    heads = x.transpose(1, 2)
    squares = heads.square().sum(-1)
    expanded = squares[..., :, None] + squares[..., None, :] - 2 * heads @ heads.mT
    direct = -2 * log_kernel(heads, heads, log_sigma) * (2 * log_sigma).exp()[:, None, None]
    off = (expanded - direct).abs().max().item()
    errors = {}
    for record in read_lines(operator_error.RESULTS):
        metrics = record["metrics"]
        if metrics["route"] == "plain" and metrics["dtype"] == "bfloat16":
            errors[metrics["kind"]] = metrics["dx"]
    shifted = f"{errors['normal']:.0e} becomes {errors['all+10']:.0e} if 10 is added to every feature"
    text = (
        f"Exact but for rounding. In bfloat16 it cancels: the plain form's gradient error of {shifted} (runs/results)."
    )
    return follows(off < 1e-10, FLOAT64, text)


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
    return holds(same, "the demo's vision models", text)
