"""Attention by sums over blocks: far keys by features, near ones exactly. Linear in N, and exactly causal.

A form approximates K_ij by phi(q_i).M.psi(k_j). Then sum_j K_ij v_j = phi(q_i).M.(sum_j psi(k_j) v_j), and where a
query sees j <= i, that sum is a prefix sum (Katharopoulos et al. 2020, arXiv 2006.16236, eq. 9 to 12), taken by blocks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from runs.neighbours.approximations.case import Case

BLOCK = 256
FeatureMap = Callable[[torch.Tensor], torch.Tensor]  # (H, n, D) -> (H, n, m)


@dataclass(frozen=True)
class Features:
    """K_ij = of_queries(q_i).middle.of_keys(k_j), up to a factor of the row; middle None: the identity."""

    of_queries: FeatureMap
    of_keys: FeatureMap
    middle: torch.Tensor | None = None  # (H, m, m)

    def through_middle(self, state: torch.Tensor) -> torch.Tensor:
        """(H, m, n) -> (H, m, n)."""
        return state if self.middle is None else self.middle @ state


@dataclass(frozen=True)
class Sums:
    """Numerators and row sums; K is positive, approximations of it need not be."""

    weighted: torch.Tensor  # sum_j K_ij v_j, (H, N, D)
    rows: torch.Tensor  # sum_j K_ij, (H, N)

    @property
    def output(self) -> torch.Tensor:
        """y, (H, N, D)."""
        return self.weighted / self.rows[..., None]

    @property
    def negative_rows(self) -> int:
        """How many row sums are below 0."""
        return int((self.rows < 0).sum())

    @property
    def undefined_rows(self) -> int:
        """How many rows of y have an entry that is not finite: the row sum is 0 or a feature overflowed."""
        return int((~self.output.isfinite()).any(-1).sum())


def kernel(queries: torch.Tensor, keys: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """K, (H, n, m): exp of one matrix product, of [q, 1, -|q|^2 / 2] and [k, -|k|^2 / 2, 1], features over sigma."""
    queries, keys = (x / sigma.to(x.dtype)[:, None, None] for x in (queries, keys))
    of_queries, of_keys = (-0.5 * x.square().sum(-1, keepdim=True) for x in (queries, keys))
    left = torch.cat([queries, torch.ones_like(of_queries), of_queries], dim=-1)
    right = torch.cat([keys, of_keys, torch.ones_like(of_keys)], dim=-1)
    return (left @ right.mT).exp_()


def attend(case: Case, features: Features, near: bool = False, block: int = BLOCK) -> Sums:
    """The sums of a case. near: keys of a query's own block and of those beside it are weighted exactly."""
    with_ones = torch.cat([case.values, torch.ones_like(case.values[..., :1])], dim=-1)
    queries, keys, values = (tensor.split(block, dim=1) for tensor in (case.queries, case.keys, with_ones))
    shares = (features.of_keys(k).mT @ v for k, v in zip(keys, values))  # of each block, (H, m, D + 1)
    states = _prefixes(shares, near) if case.causal else _others(list(shares), near)
    mixed = []
    for number, state in enumerate(states):
        of_queries = features.of_queries(queries[number])
        part = of_queries @ features.through_middle(state)
        if near:
            around = slice(max(0, number - 1), number + (1 if case.causal else 2))
            weights = kernel(queries[number], torch.cat(keys[around], dim=1), case.sigma)
            if case.causal:
                weights = weights.tril(block * (number - around.start))
            part = part + weights @ torch.cat(values[around], dim=1)
        elif case.causal:  # the block itself, which the prefix does not hold
            weights = of_queries @ features.through_middle(features.of_keys(keys[number]).mT)
            part = part + weights.tril() @ values[number]
        mixed.append(part)
    sums = torch.cat(mixed, dim=1)
    return Sums(sums[..., :-1], sums[..., -1])


def _prefixes(shares: Iterable[torch.Tensor], near: bool) -> Iterator[torch.Tensor]:
    """For every block the sum of the earlier shares; with near without the one before it."""
    state, waiting = None, []
    for share in shares:
        if state is None:
            state, waiting = torch.zeros_like(share), [torch.zeros_like(share)] if near else []
        yield state
        waiting.append(share)
        state = state + waiting.pop(0)


def _others(shares: list[torch.Tensor], near: bool) -> Iterator[torch.Tensor]:
    """For every block the sum of all shares; with near without its own and those beside it."""
    total = sum(shares)
    for block in range(len(shares)):
        yield total - sum(shares[max(0, block - 1) : block + 2]) if near else total
