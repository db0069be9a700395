"""The study's tables of one setting each: its values across, families down, everything else equal."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pandas as pd

from runs.study import grid
from runs.study.families import ALL, LEARNED, VALUE_EMBEDS, WITHOUT
from runs.study.rates import SMALLEST
from runs.study.scores import Result, Scores, family_of
from runs.study.statistics import common_seeds
from runs.study.trials import Trial
from runs.table import NOT_RUN, Table
from runs.tables.study import difference_of, loss_of, of_every_text, over


@of_every_text
def largest_rates(scores: Scores) -> Table:
    """Question 3: whether the rate that the smallest size chose is still the best at the largest, seed 0 of each."""
    return _across(scores, grid.largest_rates(scores.done), "rate", "rate {:g}", seed=0)


@of_every_text
def deeper_rates(scores: Scores) -> Table:
    """The same at four layers, for the families with most seeds there."""
    return _across(scores, grid.deeper_rates(scores.done), "rate", "rate {:g}", seed=0)


@of_every_text
def patterns(scores: Scores) -> Table:
    """Question 2: which offsets the heads of a layer have."""
    return _across(scores, grid.offset_patterns(scores.done), "head_offsets", "`{}`")


@of_every_text
def sigma_starts(scores: Scores) -> Table:
    """Question 5: where sigma^2 starts."""
    return _across(scores, grid.sigma_starts(scores.done), "sigma_squared", "σ² = {:g}")


@of_every_text
def windows(scores: Scores) -> Table:
    """What half windows in three layers of four cost, paired over seeds."""
    trials = [trial for trial in grid.windows(scores.done) if trial.window_pattern == "L"]
    return _pairs(scores, trials, "window_pattern", "SSSL", ["full windows", "half windows", "difference"])


@of_every_text
def precision(scores: Scores) -> Table:
    """What bfloat16 changes, paired over seeds."""
    return _pairs(scores, grid.precision(scores.done), "dtype", "bfloat16", ["float32", "bfloat16", "difference"])


@of_every_text
def value_embeds(scores: Scores) -> Table:
    """Question 3: value embeddings in none, half and all of the layers, and differences at equally many."""
    places = (SMALLEST, grid.DEEPER)
    results = {
        form: [scores.at(ALL[name], place) for place in places for name in names]
        for form, names in VALUE_EMBEDS.items()
    }
    rows = [[form, *map(loss_of, own)] for form, own in results.items()]
    *baselines, ours = results
    for baseline in baselines:
        rows.append([f"{ours} over {baseline}", *map(over, results[ours], results[baseline])])
    headings = [f"depth {place['depth']}, {layers}" for place in places for layers in ("none", "half", "all")]
    return Table.of(["", *headings], rows)


@of_every_text
def hybrid(scores: Scores) -> Table:
    """Question 3: how much of what a hybrid gains is the value embeddings of its softmax layer."""
    baselines, rows = ("GKA + offsets", "softmax + offsets without VE", "softmax + offsets"), []
    for name in ("GGGA + offsets without VE", "GGGA + offsets"):
        own = scores.at(ALL[name], grid.DEEPER)
        rows.append([name, loss_of(own), *(over(own, scores.at(ALL[other], grid.DEEPER)) for other in baselines)])
    return Table.of(["", "validation bits per byte", *(f"over {baseline}" for baseline in baselines)], rows)


@of_every_text
def channels(scores: Scores) -> Table:
    """What a bandwidth for every channel and a gate for every head give to each form, paired over seeds."""
    rows = []
    for name in WITHOUT:
        for place in (SMALLEST, grid.DEEPER):
            without = scores.at(ALL[name], place)
            learned = [scores.at(ALL[f"{name} + {what}"], place) for what in LEARNED]
            if without and any(learned):
                cells = (_beside(one, without) for one in learned)
                rows.append([name, str(place["depth"]), loss_of(without), *cells])
    return Table.of(["", "layers", "without", *LEARNED], rows)


def _beside(own: Result | None, without: Result) -> str:
    """A loss, and what it is over the one without, of the seeds that both have."""
    if own is None:
        return NOT_RUN
    pairs, most = len(common_seeds([own.losses, without.losses])), max(len(own.losses), len(without.losses))
    return f"{loss_of(own)}, {over(own, without)}" + (f" (seeds: {pairs})" if pairs < most else "")


@of_every_text
def channel_rates(scores: Scores) -> Table:
    """The rates of channel bandwidths, and below of head gates, as multiples of their own; two layers, seed 0."""
    trials = grid.channel_rates(scores.done)
    halves = [("channel_rate", "channels"), ("gate_rate", "gates")]
    of_each = [
        _across(scores, [c for c in trials if _has(c, field)], field, "rate {:g}", seed=0) for field, _ in halves
    ]
    frame = pd.concat([one.frame for one in of_each]).fillna("")
    return replace(of_each[0], frame=frame[sorted(frame, key=lambda heading: float(heading[5:] or "-inf"))])


def _has(trial: Trial, own_rate: str) -> bool:
    return trial.channel_bandwidths if own_rate == "channel_rate" else trial.head_gates


def _across(scores: Scores, trials: Iterable[Trial], field: str, heading: str, seed: int | None = None) -> Table:
    """Every value of a field; of one seed if it is given."""
    losses: dict[str, dict[Any, str]] = {}
    for trial in trials:
        result = scores.of(trial)
        if result and seed is not None:
            result = replace(result, runs={seed: result.runs[seed]})
        losses.setdefault(family_of(trial, field), {})[getattr(trial, field)] = loss_of(result)
    values = list(dict.fromkeys(value for by_value in losses.values() for value in by_value))
    if all(isinstance(value, float) for value in values):
        values.sort()
    rows = [[name, *(by_value.get(value, "") for value in values)] for name, by_value in losses.items()]
    return Table.of(["", *(heading.format(value or "none") for value in values)], rows)


def _pairs(scores: Scores, trials: Iterable[Trial], field: str, other: Any, headings: list[str]) -> Table:
    """The trials, the same with another value of a field, and the difference that it makes."""
    rows = {}
    for trial in trials:
        before, after = scores.of(trial), scores.of(replace(trial, **{field: other}))
        difference = after.over(before) if before and after else None
        if difference:  # of a loss the seeds that both have
            before, after = (one.of_seeds(common_seeds([before.losses, after.losses])) for one in (before, after))
        rows[family_of(trial, field)] = [loss_of(before), loss_of(after), difference_of(difference)]
    return Table.of(["", *headings], ([name, *losses] for name, losses in rows.items()))


TABLES: dict[str, Callable[..., list[Table]]] = {
    "study-largest-rates": largest_rates,
    "study-deeper-rates": deeper_rates,
    "study-value-embeds": value_embeds,
    "study-hybrid": hybrid,
    "study-patterns": patterns,
    "study-sigma-starts": sigma_starts,
    "study-windows": windows,
    "study-precision": precision,
    "study-channels": channels,
    "study-channel-rates": channel_rates,
}
