"""The approximations that are compared: what they replace K by, and the table of them, FORMS.

Most replace K_ij by phi(q_i).M.psi(k_j). Then sum_j K_ij v_j = phi(q_i).M.(sum_j psi(k_j) v_j), and where a query sees
j <= i, that sum is a prefix sum (Katharopoulos et al. 2020, arXiv 2006.16236, eq. 9 to 12), taken by blocks: linear in
N, and exactly causal. Near keys may be weighted exactly.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from runs.neighbours.approximations.case import Case

BLOCK = 256  # tokens
RIDGE = 1e-5  # on the diagonal of the landmarks' kernel, which is 1
SAMPLE, ROUNDS = 4096, 5  # of k-means: tokens that it sees at most, and Lloyd's rounds
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


# Random features: unbiased estimates of K_ij = exp(-|q - k|^2 / 2), of features over sigma


def directions(case: Case, count: int, seed: int, orthogonal: bool) -> torch.Tensor:
    """w, (H, D, count), standard normal; orthogonal: by D at right angles to each other, with the lengths of others."""
    heads, _, width = case.queries.shape
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(heads, count, width, generator=generator, dtype=torch.float64)
    if orthogonal:
        blocks = -(-count // width)
        square = torch.randn(heads, blocks, width, width, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(square)
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # without it LAPACK's signs bias positive features
        drawn = q.mT.flatten(1, 2)[:, :count] * drawn.norm(dim=-1, keepdim=True)
    return drawn.mT.to(case.queries.dtype)


def positive(case: Case, size: int, seed: int, orthogonal: bool = False) -> Features:
    """phi(x) = exp(w.x - |x|^2), as K = E[phi(q) phi(k)].

    Every feature may be scaled, as rows are normalised: queries by their own largest one, keys all by one number, which
    in a causal case is known from the first key.
    """
    scaled_by = 1 / case.sigma.to(case.queries.dtype)[:, None, None]
    w = directions(case, size, seed, orthogonal)

    def exponent(x: torch.Tensor) -> torch.Tensor:
        scaled = x * scaled_by
        return scaled @ w - scaled.square().sum(-1, keepdim=True)

    seen = case.keys[:, :1] if case.causal else case.keys
    largest = torch.stack([exponent(part).amax((1, 2)) for part in seen.split(BLOCK, dim=1)]).amax(0)[:, None, None]

    def of_queries(x: torch.Tensor) -> torch.Tensor:
        logs = exponent(x)
        return (logs - logs.amax(-1, keepdim=True)).exp_()

    return Features(of_queries, lambda x: (exponent(x) - largest).exp_())


def trigonometric(case: Case, size: int, seed: int, orthogonal: bool = False) -> Features:
    """phi(x) = [cos(w.x), sin(w.x)] / sqrt(size / 2), as K = E[cos(w.(q - k))]; size / 2 directions."""
    scaled_by = 1 / case.sigma.to(case.queries.dtype)[:, None, None]
    w = directions(case, size // 2, seed, orthogonal) * scaled_by

    def phi(x: torch.Tensor) -> torch.Tensor:
        angles = x @ w
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * (size // 2) ** -0.5

    return Features(phi, phi)


# Landmarks: the kernel through a few points of feature space


def uniform(case: Case, size: int, seed: int) -> torch.Tensor:
    """Tokens drawn without repetition, (H, size, D); the same places in every head."""
    pool = case.landmark_pool
    generator = torch.Generator().manual_seed(seed)
    return pool[:, torch.randperm(pool.shape[1], generator=generator)[:size]]


def k_means(case: Case, size: int, seed: int) -> torch.Tensor:
    """Centres of clusters, (H, size, D), from drawn tokens by Lloyd's rounds; a centre without tokens stays."""
    points = uniform(case, max(SAMPLE, size), seed)
    centres = points[:, :size]
    for _ in range(ROUNDS):
        members = F.one_hot(nearest(points, centres), centres.shape[1]).to(points.dtype)  # (H, n, size)
        counts = members.sum(1)[..., None]
        centres = torch.where(counts > 0, members.mT @ points / counts.clamp(min=1), centres)
    return centres


def nearest(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """The number of the nearest centre, (H, n)."""
    return (points @ centres.mT - 0.5 * centres.square().sum(-1)[..., None, :]).argmax(-1)


def nystrom(case: Case, landmarks: torch.Tensor) -> Features:
    """K = K_QL (K_LL + ridge)^-1 K_LK; the inverse in float64. Row sums may be negative."""
    exact = landmarks.double()
    ridge = RIDGE * torch.eye(exact.shape[1], dtype=exact.dtype)
    square = kernel(exact, exact, case.sigma.double()) + ridge
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(square)).to(landmarks.dtype)

    def similarity(x: torch.Tensor) -> torch.Tensor:
        return kernel(x, landmarks, case.sigma)

    return Features(similarity, similarity, inverse)


def cluster_sums(case: Case, landmarks: torch.Tensor) -> Features:
    """K_ij = K(q_i, the landmark nearest to k_j). Row sums are positive."""
    return Features(
        lambda x: kernel(x, landmarks, case.sigma),
        lambda x: F.one_hot(nearest(x, landmarks), landmarks.shape[1]).to(x.dtype),
    )


def through(
    points: Callable[[Case, int, int], torch.Tensor], mapped: Callable[[Case, torch.Tensor], Features]
) -> Callable[[Case, int, int], Features]:
    """`mapped` with the landmarks that `points` chooses."""
    return lambda case, size, seed: mapped(case, points(case, size, seed))


# Controls, and truncation


def constant(case: Case, size: int, seed: int) -> Features:
    """`size` features that are 1 everywhere: K_ij = size, so that 0 of them leave nothing and 1 the mean."""
    return Features(lambda x: x.new_ones(*x.shape[:2], size), lambda x: x.new_ones(*x.shape[:2], size))


def nearest_keys(case: Case, size: int, rows: torch.Tensor | None = None) -> Sums:
    """Only the `size` largest K_ij of a row count; of equal ones all. rows: of these queries alone, in order.

    The search is exact, so it costs what exact attention costs.
    """
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


PERFORMER = "Choromanski et al. 2021, arXiv 2009.14794, lemma 1"
FOURIER = "Rahimi and Recht 2007, NIPS, theorem 1"
ORTHOGONAL = "directions as Yu et al. 2016, arXiv 1610.09072"
NYSTROM = "Williams and Seeger 2001, NIPS; in attention arXiv 2102.03902, 2111.00035"
GAUSS = "the fast Gauss transform's zeroth order (Yang et al. 2003, ICCV)"
EXP, TRIG = "φ(x) = exp(w·x − |x|²)", "φ(x) = [cos(w·x), sin(w·x)]"
LOW_RANK = "K = K_QL (K_LL + 10⁻⁵)⁻¹ K_LK"
CLUSTERED = "K_ij = K(q_i, landmark nearest to k_j)"
NEAR = f"exact on a block of {BLOCK} and those beside it"
MEAN, WINDOW = "mean", "window"
FORMS: dict[str, Form] = {
    "positive": Form(PERFORMER, EXP, positive),
    "positive, orthogonal": Form(f"{PERFORMER}; {ORTHOGONAL}", EXP, partial(positive, orthogonal=True)),
    "trigonometric": Form(FOURIER, TRIG, trigonometric),
    "trigonometric, orthogonal": Form(f"{FOURIER}; {ORTHOGONAL}", TRIG, partial(trigonometric, orthogonal=True)),
    "Nyström, uniform": Form(NYSTROM, LOW_RANK, through(uniform, nystrom)),
    "Nyström, k-means": Form(NYSTROM, LOW_RANK, through(k_means, nystrom)),
    "clusters": Form(GAUSS, CLUSTERED, through(k_means, cluster_sums)),
    "window + Nyström": Form(NYSTROM, f"{NEAR}; {LOW_RANK} elsewhere", through(k_means, nystrom), near=True),
    "window + clusters": Form(GAUSS, f"{NEAR}; {CLUSTERED} elsewhere", through(k_means, cluster_sums), near=True),
    "nearest keys": Form(
        "truncation; the search is exact", "the largest K_ij of a row", sums=nearest_keys, random=False
    ),
    WINDOW: Form("control", NEAR, constant, near=True, random=False, sizes=(0,)),
    MEAN: Form("control", "K_ij = 1", lambda case, size, seed: constant(case, 1, seed), random=False, sizes=(0,)),
}
