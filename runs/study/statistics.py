"""Means over seeds, paired differences, and L(C) = a + b C^-c, each with its uncertainty."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, stdev, variance
from zlib import crc32

import numpy as np
from scipy import stats

EXPONENTS = np.geomspace(0.02, 2.0, 160)  # c is searched among these
DRAWS = 500  # of what other seeds might have given
UNIT = 1e14  # FLOPs; the same for all fits, so that their b compare
LEAST_POINTS, LEAST_RANGE = 4, 4.0  # of a fit: points, and the largest compute over the smallest


@dataclass(frozen=True)
class Interval:
    """A value between two others, which hold 95 % of it; NaN where nothing is known of it."""

    value: float
    low: float
    high: float

    @classmethod
    def of_draws(cls, value: float, draws: np.ndarray) -> "Interval":
        """From the values of a bootstrap's draws, NaN left out."""
        known = draws[np.isfinite(draws)]
        low, high = np.percentile(known, (2.5, 97.5)) if len(known) else (np.nan, np.nan)
        return cls(value, float(low), float(high))


def spread(values: list[float]) -> float:
    """The standard deviation over seeds; NaN for one seed."""
    return stdev(values) if len(values) > 1 else float("nan")


def paired_difference(ours: dict[int, float], baseline: dict[int, float]) -> Interval | None:
    """Mean of ours - baseline over the seeds that both have, with a 95 % t-interval; None if they share no seed."""
    differences = [ours[seed] - baseline[seed] for seed in sorted(ours.keys() & baseline.keys())]
    if not differences:
        return None
    middle = mean(differences)
    if len(differences) == 1:
        return Interval(middle, float("nan"), float("nan"))
    half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
    return Interval(middle, float(middle - half), float(middle + half))


def common_seeds(losses: Iterable[dict[int, float]]) -> set[int]:
    """The seeds that all have. losses: by seed."""
    return set.intersection(*map(set, losses))


def interpolated(sizes: list[float], losses: list[dict[int, float]], size: float, degree: int) -> dict[int, float]:
    """The loss at a size, of every seed that all sizes have: by chords (degree 1) or by a parabola (2) through them, in
    the logarithm of the size. losses: for each size by seed.
    """

    def loss(seed: int) -> float:
        known = [by_seed[seed] for by_seed in losses]
        if degree == 1 or len(sizes) <= degree:
            return float(np.interp(np.log(size), np.log(sizes), known))
        return float(np.polyval(np.polyfit(np.log(sizes), known, degree), np.log(size)))

    return {seed: loss(seed) for seed in common_seeds(losses)}


@dataclass(frozen=True)
class Fit:
    """L(C) = a + b (C / UNIT)^-c; C in FLOPs, L in bits per byte, a and b not negative."""

    a: float
    b: float
    c: float

    def __call__(self, compute: np.ndarray) -> np.ndarray:
        return self.a + self.b * (np.asarray(compute, dtype=float) / UNIT) ** -self.c


def fit(compute: np.ndarray, loss: np.ndarray) -> Fit:
    """Least squares: for every c of a grid a and b are linear. compute, loss: (n,)."""
    x = (compute / UNIT) ** -EXPONENTS[:, None]  # (exponents, n)
    x_mean, y_mean = x.mean(1), loss.mean()
    b = ((x - x_mean[:, None]) * (loss - y_mean)).sum(1) / ((x - x_mean[:, None]) ** 2).sum(1)
    a = y_mean - b * x_mean
    # Where a would be negative it is 0, and b alone is fitted.
    b = np.where(a < 0, (x * loss).sum(1) / (x**2).sum(1), b).clip(min=0)
    a = np.where(a < 0, 0.0, np.where(b > 0, a, y_mean))
    errors = ((a[:, None] + b[:, None] * x - loss) ** 2).sum(1)
    best = int(errors.argmin())
    return Fit(float(a[best]), float(b[best]), float(EXPONENTS[best]))


Points = dict[str, tuple[float, list[float]]]  # place -> compute, and the losses of its seeds


def frontier(compute: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Which points, in order of compute, are better than everything that costs less."""
    order = np.argsort(compute, kind="stable")
    best, kept = np.inf, []
    for place in order:
        if loss[place] < best:
            best = loss[place]
            kept.append(place)
    return np.array(kept)


@dataclass(frozen=True)
class Scaling:
    """The fit to a family's frontier, the fits to draws of other seeds, and `reach`: least and most compute.

    points: how many the frontier has. miss: the most that the fit is away from one of them.
    """

    fit: Fit
    draws: list[Fit]
    reach: tuple[float, float]
    points: int
    miss: float

    def interval(self, name: str) -> Interval:
        """Of a, b or c."""
        return Interval.of_draws(getattr(self.fit, name), np.array([getattr(draw, name) for draw in self.draws]))


@dataclass(frozen=True)
class SeedNoise:
    """The standard deviation of a loss over seeds, taken to be the same at all places, and its degrees of freedom."""

    deviation: float
    freedom: int

    @classmethod
    def pooled(cls, places: Iterable[list[float]]) -> "SeedNoise | None":
        """From the losses of places with two seeds or more; None if no place has."""
        repeated = [losses for losses in places if len(losses) > 1]
        freedom = sum(len(losses) - 1 for losses in repeated)
        if not freedom:
            return None
        squares = sum(variance(losses) * (len(losses) - 1) for losses in repeated)
        return cls((squares / freedom) ** 0.5, freedom)

    def draw(self, points: Points) -> np.ndarray:
        """What other seeds might have given, (places, DRAWS): the means with normal noise.

        A deviation from few seeds is uncertain itself, so that each draw has its own (a place alone is Student's t).
        """
        means, counts = (np.array([how(losses) for _, losses in points.values()])[:, None] for how in (mean, len))
        chooser = np.random.default_rng(crc32(repr(points).encode()))
        deviations = self.deviation * (self.freedom / chooser.chisquare(self.freedom, DRAWS)) ** 0.5
        return means + chooser.standard_normal((len(points), DRAWS)) * deviations / counts**0.5


def scaling(points: Points, noise: SeedNoise | None = None) -> Scaling | None:
    """The fit to points that are enough of them, else None. noise: for a family without two seeds anywhere."""
    compute = np.array([compute for compute, _ in points.values()])
    means = np.array([mean(losses) for _, losses in points.values()])
    chosen = frontier(compute, means) if len(points) else []
    if len(chosen) < LEAST_POINTS or compute[chosen].max() < LEAST_RANGE * compute[chosen].min():
        return None
    noise = SeedNoise.pooled(losses for _, losses in points.values()) or noise
    drawn = noise.draw(points)[chosen].T if noise else ()
    spent, losses = compute[chosen], means[chosen]
    fitted = fit(spent, losses)
    return Scaling(
        fitted,
        draws=[fit(spent, column) for column in drawn],
        reach=(float(spent.min()), float(spent.max())),
        points=len(chosen),
        miss=float(np.abs(fitted(spent) - losses).max()),
    )


def crossing(ours: Scaling, baseline: Scaling) -> tuple[Interval | None, float]:
    """Where two fits cross within the compute that both were trained with, and the share of draws in which they do.

    None if the fits themselves do not cross there. The share is NaN without draws.
    """
    low, high = max(ours.reach[0], baseline.reach[0]), min(ours.reach[1], baseline.reach[1])
    if low >= high:
        return None, float("nan")
    compute = np.geomspace(low, high, 200)
    here = _first_crossing(compute, ours.fit, baseline.fit)
    draws = np.array([_first_crossing(compute, *pair) for pair in zip(ours.draws, baseline.draws)])
    share = float(np.isfinite(draws).mean()) if len(draws) else float("nan")
    return (Interval.of_draws(here, draws) if np.isfinite(here) else None), share


def _first_crossing(compute: np.ndarray, one: Fit, other: Fit) -> float:
    signs = np.sign(one(compute) - other(compute))
    changes = np.flatnonzero(signs[1:] * signs[:-1] < 0)
    return float(compute[changes[0]]) if len(changes) else float("nan")
