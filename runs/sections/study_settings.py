"""The study's tables of one setting each: its values across, families down, everything else equal."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runs.sections.sources import table
from runs.sections.study import ROWS, difference_of, loss_of, of_every_text
from runs.study import grid
from runs.study.cells import Cell
from runs.study.families import ALL, VALUE_EMBEDS
from runs.study.rates import SMALLEST
from runs.study.scores import Scores, family_of


def largest_rates(folder: Path = ROWS) -> str:
    """Question 3: whether the rate that the smallest size chose is still the best at the largest, seed 0 of each."""
    return of_every_text(folder, lambda s: _across(s, grid.largest_rates(s.done), "rate", "rate {:g}", seed=0))


def deeper_rates(folder: Path = ROWS) -> str:
    """The same at four layers, for the families with most seeds there."""
    return of_every_text(folder, lambda s: _across(s, grid.deeper_rates(s.done), "rate", "rate {:g}", seed=0))


def value_embeds(folder: Path = ROWS) -> str:
    """Question 3: value embeddings in none, half and all of the layers, and differences at equally many."""
    return of_every_text(folder, _value_embeds)


def _value_embeds(scores: Scores) -> str:
    places = (SMALLEST, grid.DEEPER)
    found = {
        form: [scores.at(ALL[name], place) for place in places for name in names]
        for form, names in VALUE_EMBEDS.items()
    }
    rows = [[form, *map(loss_of, results)] for form, results in found.items()]
    *baselines, ours = found
    for baseline in baselines:
        pairs = zip(found[ours], found[baseline], strict=True)
        cells = [difference_of(own.over(other), "+.3f") if own and other else "" for own, other in pairs]
        rows.append([f"{ours} over {baseline}", *cells])
    headings = [f"depth {place['depth']}, {layers}" for place in places for layers in ("none", "half", "all")]
    return table(["", *headings], rows)


def hybrid(folder: Path = ROWS) -> str:
    """Question 3: how much of what a hybrid gains is the value embeddings of its softmax layer."""
    return of_every_text(folder, _hybrid)


def _hybrid(scores: Scores) -> str:
    baselines = ("GKA + offsets", "softmax + offsets without VE", "softmax + offsets")
    rows = []
    for name in ("GGGA + offsets without VE", "GGGA + offsets"):
        over = [scores.over(ALL[name], ALL[baseline], grid.DEEPER) for baseline in baselines]
        cells = [difference_of(difference, "+.3f") for difference in over]
        rows.append([name, loss_of(scores.at(ALL[name], grid.DEEPER)), *cells])
    return table(["", "validation bits per byte", *(f"over {baseline}" for baseline in baselines)], rows)


def patterns(folder: Path = ROWS) -> str:
    """Question 2: which offsets the heads of a layer have."""
    return of_every_text(folder, lambda s: _across(s, grid.offset_patterns(s.done), "head_offsets", "`{}`"))


def sigma_starts(folder: Path = ROWS) -> str:
    """Question 4: where sigma^2 starts."""
    return of_every_text(folder, lambda s: _across(s, grid.sigma_starts(s.done), "sigma_squared", "σ² = {:g}"))


def windows(folder: Path = ROWS) -> str:
    """What half windows in three layers of four cost, paired over seeds."""

    def one(scores: Scores) -> str:
        cells = [cell for cell in grid.windows(scores.done) if cell.window_pattern == "L"]
        return _pairs(scores, cells, "window_pattern", "SSSL", ["full windows", "half windows", "difference"])

    return of_every_text(folder, one)


def precision(folder: Path = ROWS) -> str:
    """What bfloat16 changes, paired over seeds."""
    headings = ["float32", "bfloat16", "difference"]
    return of_every_text(folder, lambda s: _pairs(s, grid.precision(s.done), "dtype", "bfloat16", headings))


def _across(scores: Scores, cells: Iterable[Cell], field: str, heading: str, seed: int | None = None) -> str:
    """Every value of a field; of one seed if it is given."""
    losses: dict[str, dict[Any, str]] = {}
    for cell in cells:
        result = scores.of(cell)
        if result and seed is not None:
            result = replace(result, runs={seed: result.runs[seed]})
        losses.setdefault(family_of(cell, field), {})[getattr(cell, field)] = loss_of(result)
    values = list(dict.fromkeys(value for by_value in losses.values() for value in by_value))
    if all(isinstance(value, float) for value in values):
        values.sort()
    rows = [[name, *(by_value.get(value, "") for value in values)] for name, by_value in losses.items()]
    return table(["", *(heading.format(value or "none") for value in values)], rows)


def _pairs(scores: Scores, cells: Iterable[Cell], field: str, other: Any, headings: list[str]) -> str:
    """The cells, the same with another value of a field, and the difference that it makes."""
    rows = {}
    for cell in cells:
        before, after = scores.of(cell), scores.of(replace(cell, **{field: other}))
        difference = after.over(before) if before and after else None
        rows[family_of(cell, field)] = [loss_of(before), loss_of(after), difference_of(difference)]
    return table(["", *headings], [[name, *losses] for name, losses in rows.items()])


TABLES: dict[str, Callable[..., str]] = {
    "study-largest-rates": largest_rates,
    "study-deeper-rates": deeper_rates,
    "study-value-embeds": value_embeds,
    "study-hybrid": hybrid,
    "study-patterns": patterns,
    "study-sigma-starts": sigma_starts,
    "study-windows": windows,
    "study-precision": precision,
}
