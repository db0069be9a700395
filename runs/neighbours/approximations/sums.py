"""Attention by sums over blocks: far keys by features, near ones exactly. Linear in N, and exactly causal.

A form approximates K_ij by phi(q_i).M.psi(k_j). Then sum_j K_ij v_j = phi(q_i).M.(sum_j psi(k_j) v_j), and where a
query sees j <= i, that sum is a prefix sum (Katharopoulos et al. 2020, arXiv 2006.16236, eq. 9 to 12), taken by blocks.
"""

from collections.abc import Callable, Iterator
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
    """K, (H, n, m), from expanded squares."""
    half_norms = (0.5 * x.square().sum(-1) for x in (queries, keys))
    of_queries, of_keys = half_norms
    exponent = queries @ keys.mT - of_queries[..., None] - of_keys[..., None, :]
    return exponent.div_(sigma.to(queries.dtype).square()[:, None, None]).clamp_(max=0).exp_()


def attend(case: Case, features: Features, near: bool = False, block: int = BLOCK) -> Sums:
    """The sums of a case. near: keys of a query's own block and of those beside it are weighted exactly."""
    ones = case.values.new_ones(*case.values.shape[:2], 1)
    values = torch.cat([case.values, ones], dim=-1)
    shares = _Shares(case, features, values, block)
    states = _prefixes(shares, near) if case.causal else _others(shares, near)
    mixed = []
    for place, state in zip(shares.places, states):
        queries = features.of_queries(case.queries[:, place])
        part = queries @ features.through_middle(state)
        if near:
            part = part + _exactly(case, values, place, block)
        elif case.causal:  # the block itself, which the prefix does not hold
            weights = queries @ features.through_middle(features.of_keys(case.keys[:, place]).mT)
            part = part + weights.tril() @ values[:, place]
        mixed.append(part)
    result = torch.cat(mixed, dim=1)
    return Sums(result[..., :-1], result[..., -1])


class _Shares:
    """sum_j psi(k_j) [v_j, 1] of each block, (H, m, D + 1), computed when it is asked for."""

    def __init__(self, case: Case, features: Features, values: torch.Tensor, block: int):
        self.case, self.features, self.values = case, features, values
        tokens = values.shape[1]
        self.places = [slice(start, min(start + block, tokens)) for start in range(0, tokens, block)]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, block: int) -> torch.Tensor:
        place = self.places[block]  # raises IndexError at the end
        return self.features.of_keys(self.case.keys[:, place]).mT @ self.values[:, place]


def _prefixes(shares: _Shares, near: bool) -> Iterator[torch.Tensor]:
    """For every block the sum of the earlier ones; with near without the one before it."""
    first = shares[0]
    state, waiting = torch.zeros_like(first), [torch.zeros_like(first)] if near else []
    for block in range(len(shares)):
        yield state
        waiting.append(first if block == 0 else shares[block])
        state = state + waiting.pop(0)


def _others(shares: _Shares, near: bool) -> Iterator[torch.Tensor]:
    """For every block the sum of all; with near without its own and those beside it."""
    total = sum(shares[block] for block in range(len(shares)))
    beside: dict[int, torch.Tensor] = {}
    for block in range(len(shares)):
        if near:
            wanted = range(max(0, block - 1), min(len(shares), block + 2))
            beside = {other: beside[other] if other in beside else shares[other] for other in wanted}
        yield total - sum(beside.values())


def _exactly(case: Case, values: torch.Tensor, place: slice, block: int) -> torch.Tensor:
    """The share of near keys in the sums of a block, (H, n, D + 1)."""
    after = place.stop if case.causal else place.stop + block
    around = slice(max(0, place.start - block), min(after, values.shape[1]))
    weights = kernel(case.queries[:, place], case.keys[:, around], case.sigma)
    if case.causal:
        weights = weights.tril(place.start - around.start)
    return weights @ values[:, around]
