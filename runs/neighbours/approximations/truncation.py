"""Truncation to the nearest keys in feature space. The search is exact, so it costs what exact attention costs."""

import torch

from runs.neighbours.approximations.case import Case
from runs.neighbours.approximations.sums import BLOCK, Sums, kernel


def nearest_keys(case: Case, size: int) -> Sums:
    """Only the `size` largest K_ij of a row count; of equal ones all."""
    weighted, rows = [], []
    for start in range(0, case.queries.shape[1], BLOCK):
        queries = case.queries[:, start : start + BLOCK]
        stop = start + queries.shape[1] if case.causal else case.keys.shape[1]
        weights = kernel(queries, case.keys[:, :stop], case.sigma)
        weights = weights.tril(start) if case.causal else weights
        smallest = weights.topk(min(size, stop), dim=-1).values[..., -1:]
        weights = torch.where(weights >= smallest, weights, 0)
        weighted.append(weights @ case.values[:, :stop])
        rows.append(weights.sum(-1))
    return Sums(torch.cat(weighted, 1), torch.cat(rows, 1))
