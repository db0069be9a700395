"""The forms that are compared: one row each, with where it comes from and its equation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from runs.neighbours.approximations.case import Case
from runs.neighbours.approximations.landmarks import cluster_sums, k_means, nystrom, uniform
from runs.neighbours.approximations.random_features import positive, trigonometric
from runs.neighbours.approximations.sums import BLOCK, Features, Sums, attend
from runs.neighbours.approximations.truncation import nearest_keys

PERFORMER = "Choromanski et al. 2021, arXiv 2009.14794, lemma 1"
FOURIER = "Rahimi and Recht 2007, NIPS, theorem 1"
ORTHOGONAL = "directions as Yu et al. 2016, arXiv 1610.09072"
NYSTROM = "Williams and Seeger 2001, NIPS; in attention arXiv 2102.03902, 2111.00035"


@dataclass(frozen=True)
class Form:
    """An approximation: `features` of (case, size, seed), or `sums` where there are none."""

    source: str
    equation: str
    features: Callable[[Case, int, int], Features] | None = None
    near: bool = False  # keys of near blocks are weighted exactly
    sums: Callable[..., Sums] | None = None  # of (case, size), and the rows that are wanted
    random: bool = True  # whether a seed changes it
    sizes: tuple[int, ...] | None = None  # None: any; (0,): it has none

    def prepare(self, case: Case, size: int, seed: int) -> Callable[[Case], Sums]:
        """What is computed once for a model: directions, and landmarks of causal cases."""
        if self.features is None:
            return lambda given: self.sums(given, size)
        features = self.features(case, size, seed)
        return lambda given: attend(given, features, self.near)

    def __call__(self, case: Case, size: int, seed: int, rows: torch.Tensor | None = None) -> Sums:
        """The sums of all queries; what costs as much as exact attention computes `rows` alone, if they are given."""
        if self.sums is not None:
            return self.sums(case, size, rows)
        return self.prepare(case, size, seed)(case)


def _with(points: Callable, mapped: Callable) -> Callable[[Case, int, int], Features]:
    return lambda case, size, seed: mapped(case, points(case, size, seed))


def _nothing(case: Case, size: int, seed: int) -> Features:
    return Features(lambda x: x[..., :0], lambda x: x[..., :0])


def _constant(case: Case, size: int, seed: int) -> Features:
    return Features(lambda x: x.new_ones(*x.shape[:2], 1), lambda x: x.new_ones(*x.shape[:2], 1))


EXP, TRIG = "φ(x) = exp(w·x − |x|²)", "φ(x) = [cos(w·x), sin(w·x)]"
THROUGH = "K = K_QL (K_LL + 10⁻⁵)⁻¹ K_LK"
CLUSTERED = "K_ij = K(q_i, landmark nearest to k_j)"
WINDOW = f"exact on a block of {BLOCK} and those beside it"
GAUSS = "the fast Gauss transform's zeroth order (Yang et al. 2003, ICCV)"
CONTROL = "control"

FORMS: dict[str, Form] = {
    "positive": Form(PERFORMER, EXP, partial(positive, orthogonal=False)),
    "positive, orthogonal": Form(f"{PERFORMER}; {ORTHOGONAL}", EXP, partial(positive, orthogonal=True)),
    "trigonometric": Form(FOURIER, TRIG, partial(trigonometric, orthogonal=False)),
    "trigonometric, orthogonal": Form(f"{FOURIER}; {ORTHOGONAL}", TRIG, partial(trigonometric, orthogonal=True)),
    "Nyström, uniform": Form(NYSTROM, THROUGH, _with(uniform, nystrom)),
    "Nyström, k-means": Form(NYSTROM, THROUGH, _with(k_means, nystrom)),
    "clusters": Form(GAUSS, CLUSTERED, _with(k_means, cluster_sums)),
    "window + Nyström": Form(NYSTROM, f"{WINDOW}; {THROUGH} elsewhere", _with(k_means, nystrom), near=True),
    "window + clusters": Form(GAUSS, f"{WINDOW}; {CLUSTERED} elsewhere", _with(k_means, cluster_sums), near=True),
    "nearest keys": Form(
        "truncation; the search is exact", "the largest K_ij of a row", sums=nearest_keys, random=False
    ),
    "window": Form(CONTROL, WINDOW, _nothing, near=True, random=False, sizes=(0,)),
    "mean": Form(CONTROL, "K_ij = 1", _constant, random=False, sizes=(0,)),
}
