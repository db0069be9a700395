"""Measures of a matrix W of attention weights, whose rows sum to 1."""

from collections.abc import Sequence

import numpy as np
import torch


def by_head(layers: Sequence[torch.Tensor | None], num_heads: int) -> np.ndarray:
    """A number of every head, (H,) by layer, as (L, H); NaN in layers that have none."""
    return np.stack([np.full(num_heads, np.nan) if layer is None else layer.numpy() for layer in layers])


def diagonal_mass(weights: torch.Tensor) -> torch.Tensor:
    """The mean of W_ii, the weight of a token for itself, (..., N, N) -> (...)."""
    return weights.diagonal(dim1=-2, dim2=-1).mean(-1)


def entropy(rows: torch.Tensor) -> torch.Tensor:
    """Entropy in nats, (..., N) -> (...); 0 log 0 is 0."""
    return torch.special.entr(rows).sum(-1)


def effective_tokens(weights: torch.Tensor) -> torch.Tensor:
    """The mean over rows of exp(entropy): 1 for the identity, N for uniform W. (..., N, N) -> (...)."""
    return entropy(weights).exp().mean(-1)


def median_distance(features: torch.Tensor) -> torch.Tensor:
    """The median of |x_i - x_j| over pairs i < j, per head: (N, H, D) -> (H,)."""
    heads = features.transpose(0, 1)
    pairs = torch.ones(heads.shape[1], heads.shape[1]).triu(1).bool()
    return torch.cdist(heads, heads)[:, pairs].median(-1).values
