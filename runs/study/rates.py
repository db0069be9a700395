"""Which learning rates are tried for a family, and which is its best at the smallest size and at the deepest."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from runs.study.families import Family, fits_depth, rate_source
from runs.study.trials import Trial

Tried = TypeVar("Tried")  # a rate or a trial
RATES = (1.0, 2.0, 4.0)
LEAST_RATE, MOST_RATE = 0.25, 16.0
SMALLEST: dict[str, Any] = dict(depth=2, tokens=2**20)
DEEPEST: dict[str, Any] = dict(depth=8, tokens=2**20, batch=4096)


class Done(dict):
    """Validation bits per byte of finished trials. assumed_rate: the best one of families where it is not known."""

    rates: ClassVar[tuple[float, ...]] = RATES
    assumed_rate: float | None = None

    def first_trial(self, family: dict, rate: float) -> Trial:
        """What decides about a family's rate."""
        return Trial(**SMALLEST, **family, rate=rate)

    def score(self, family: dict, rate: float) -> float | None:
        """Of that trial, if it is finished."""
        return self.get(self.first_trial(family, rate))


def tried_rates(family: dict, done: Done) -> list[float]:
    """The three rates; and one beyond the end, as long as an end is the best of all that are finished."""
    return _enclosing(done.rates, partial(done.score, family))


def best_rate(family: dict, done: Done) -> float | None:
    """The family's best rate at the smallest size, seed 0; some take another family's (`RATE_OF`).

    Until every rate that must be tried is finished, unknown.
    """
    source = rate_source(family)
    return _best_of(tried_rates(source, done), partial(done.score, source)) or done.assumed_rate


def around_the_best(family: Family, place: dict, done: Done) -> list[Trial]:
    """The family at another place with its best rate, half and twice of it, and beyond as in `tried_rates`; seed 0."""
    rate = best_rate(family, done)
    if rate is None or not fits_depth(family, place["depth"]):
        return []
    trial = Trial(**{**family, **place})
    rates = _enclosing([rate / 2, rate, rate * 2], lambda rate: done.get(replace(trial, rate=rate)))
    return [replace(trial, rate=rate) for rate in rates]


def rate_to_train(family: Family, place: dict, done: Done) -> float | None:
    """The rate for a place, unknown until it is found. `DEEPEST` is first trained at the rate of the smallest size."""
    if place == DEEPEST:
        return best_rate(family, done)
    return chosen_rate(family, place, done) or done.assumed_rate


def chosen_rate(family: Family, place: dict, done: Done) -> float | None:
    """The family's best: as deep as `DEEPEST` the best there, elsewhere that of the smallest size."""
    if place["depth"] != DEEPEST["depth"]:
        return best_rate(family, done)
    best = best_at_the_deepest(family, done)
    return best.rate if best else None


def best_at_the_deepest(family: Family, done: Done) -> Trial | None:
    """None until every rate that must be tried there is finished."""
    return _best_of(around_the_best(family, DEEPEST, done), done.get)


def around_one(trial: Trial, name: str, done: Done) -> list[Trial]:
    """The trial with `name`, channel_rate or gate_rate, at a quarter, 1 and 4, and beyond as in `tried_rates`."""
    rates = _enclosing([0.25, 1.0, 4.0], lambda rate: done.get(replace(trial, **{name: rate})), step=4.0, least=1 / 16)
    return [replace(trial, **{name: rate}) for rate in rates]


def _enclosing(
    first: Iterable[float], score_of: Callable[[float], float | None], step: float = 2.0, least: float = LEAST_RATE
) -> list[float]:
    rates = list(first)
    while best := _best_of(rates, score_of):
        if best == min(rates) and best / step >= least:
            rates.append(best / step)
        elif best == max(rates) and best * step <= MOST_RATE:
            rates.append(best * step)
        else:
            break
    return sorted(rates)


def _best_of(tried: Iterable[Tried], score_of: Callable[[Tried], float | None]) -> Tried | None:
    scores = {one: score_of(one) for one in tried}
    return None if not scores or None in scores.values() else min(scores, key=scores.get)
