"""Truncation to the nearest keys in feature space. The search is exact, so it costs what exact attention costs."""

import torch

from runs.neighbours.approximations.case import Case
from runs.neighbours.approximations.sums import BLOCK, Sums, kernel


def nearest_keys(case: Case, size: int, rows: torch.Tensor | None = None) -> Sums:
    """Only the `size` largest K_ij of a row count; of equal ones all. rows: of these queries alone, in order."""
    places = torch.arange(case.keys.shape[1])
    parts, totals = [], []
    for chosen in (places if rows is None else rows).split(BLOCK):
        stop = int(chosen[-1]) + 1 if case.causal else len(places)
        weights = kernel(case.queries[:, chosen], case.keys[:, :stop], case.sigma)
        if case.causal:
            weights = weights * (places[:stop] <= chosen[:, None])
        smallest = weights.topk(min(size, stop), dim=-1).values[..., -1:]
        weights = torch.where(weights >= smallest, weights, 0)
        parts.append(weights @ case.values[:, :stop])
        totals.append(weights.sum(-1))
    return Sums(torch.cat(parts, 1), torch.cat(totals, 1))
