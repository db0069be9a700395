"""The study's tables, one or two for each of its questions; what is not trained yet is called not run."""

import math
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path

from runs.frames import RESULTS
from runs.study.families import (
    ALL,
    FAMILIES,
    FURTHER,
    HYBRIDS,
    IDEAS,
    KERNELS,
    PATTERNS,
    PRESET,
    RATE_OF,
    REPAIRS,
    RIVAL,
    fits_depth,
)
from runs.study.grid import DEEPER, LONGER, REPEATED, SCALED, longer_families, scaled_places
from runs.study.rates import SMALLEST
from runs.study.scores import Place, Result, Scores
from runs.study.statistics import UNIT, Interval, Scaling, SeedNoise, crossing
from runs.table import NOT_RUN, Table, measured

TOO_FEW = "too few points"
ROWS = RESULTS / "study"
PROVISIONAL = "Rates marked * are provisional: not every rate that must be tried has been."


def of_every_text(one: Callable[[Scores], Table]) -> Callable[..., list[Table]]:
    """A table for each file of results, under its name, with when and where its rows were measured."""

    @wraps(one)
    def tables(folder: Path = ROWS) -> list[Table]:
        shown = []
        for path in sorted(folder.glob("*.jsonl")):
            scores = Scores.read(path)
            if scores.done:
                table = one(scores)
                table.title = f"{path.stem}:"
                table.sources = [measured(scores.used or scores.rows, f"study/{path.name}")]
                shown.append(table)
        return shown

    return tables


@of_every_text
def families(scores: Scores) -> Table:
    """Question 3, at the smallest size: every family at its best rate, and its difference from nanochat's softmax."""
    return comparison(scores, [*FAMILIES, *FURTHER, PRESET, RIVAL], SMALLEST, "softmax")


@of_every_text
def deeper(scores: Scores) -> Table:
    """Questions 2 to 4 at four layers: families, hybrids, repairs and kernels, as far as they are trained."""
    chosen = {**FAMILIES, **HYBRIDS, **REPAIRS, **KERNELS}
    return comparison(scores, [name for name in chosen if scores.at(ALL[name], DEEPER)], DEEPER, "softmax")


@of_every_text
def repairs(scores: Scores) -> Table:
    """Question 2: what repairs GKA, and what the same does for softmax."""
    names = ["GKA unrotated", "GKA + offsets", "softmax", "softmax + offsets", *REPAIRS]
    unrepaired = {name: "GKA unrotated" if name.startswith("GKA") else "softmax" for name in names}
    return comparison(scores, sorted(names, key=unrepaired.get), SMALLEST, unrepaired)


@of_every_text
def further_offsets(scores: Scores) -> Table:
    """Question 2: offsets of several tokens, and others in other layers, over those of one token in all layers."""
    own = {name: RATE_OF[name] for name in PATTERNS}
    own = {name: name for name in own.values()} | own
    return comparison(scores, own, DEEPER, own)


@of_every_text
def kernels(scores: Scores) -> Table:
    """Question 5: GKA + offsets with something else in the place of its kernel."""
    names = ("GKA + offsets", "softmax + offsets", "VLT + offsets", "GKA unrotated", *KERNELS)
    return comparison(scores, names, SMALLEST, "GKA + offsets")


@of_every_text
def ideas(scores: Scores) -> Table:
    """Question 4: what else might help the preset."""
    own = {name: name.partition(",")[0] for name in IDEAS}
    own = {name: name for name in own.values()} | own
    return comparison(scores, sorted(own, key=own.get), DEEPER, own, of="the same without it")


def comparison(
    scores: Scores, names: Iterable[str], place: Place, baseline: str | dict[str, str], of: str = ""
) -> Table:
    """Families at one place, and the difference of each from its baseline: one for all, or each one's own.

    of: what the baseline is called, if not by its name.
    """
    baselines = baseline if isinstance(baseline, dict) else dict.fromkeys(names, baseline)
    others = {name: scores.at(ALL[name], place) for name in baselines.values()}
    rows, settled = [], True
    for name in names:
        result, other = scores.at(ALL[name], place), others[baselines[name]]
        compared = result.over(other) if result and other and baselines[name] != name else None
        counts = [f"{result['parameters']:,}", f"{result['flops_per_token']:,}"] if result else ["", ""]
        rows.append([name, loss_of(result), rate_of(result), seeds_of(result), difference_of(compared), *counts])
        settled &= result is None or result.settled
    of = of or " and ".join(dict.fromkeys(baselines.values()))
    headings = ["", "validation bits per byte", "rate", "seeds", f"over {of}", "parameters", "FLOPs/token"]
    return Table.of(headings, rows, notes=[] if settled else [PROVISIONAL])


@of_every_text
def longer(scores: Scores) -> Table:
    """Question 1: bits per byte and sigma^2 of the paper's form as training gets longer."""
    rows = []
    for name, family in longer_families().items():
        results = [scores.at(family, place) for place in LONGER]
        sigmas = [result and result.sigma_squared for result in results]
        rows.append([name, *(loss_of(r) + (f"; σ² {s:.3g}" if s else "") for r, s in zip(results, sigmas))])
    return Table.of(["", *(f"{place['tokens']:,} tokens" for place in LONGER)], rows)


@of_every_text
def sizes(scores: Scores) -> Table:
    """Question 3: bits per byte of every family at every size and budget."""
    rows = []
    for name in (*SCALED, PRESET, RIVAL):
        losses = [loss_of(scores.at(ALL[name], place)) for place in scaled_places()]
        possible = [fits_depth(ALL[name], place["depth"]) for place in scaled_places()]
        rows.append([name, *(loss if has_form else "" for loss, has_form in zip(losses, possible))])
    repeated = [list(result.losses.values()) for name in REPEATED for result in scores.finished(name, scaled_places())]
    noise, places = SeedNoise.pooled(repeated), sum(len(losses) > 1 for losses in repeated)
    said = f"Standard deviation over seeds, pooled over {places} trials: {noise.deviation:.4f}." if noise else ""
    return Table.of(["", *map(place_of, scaled_places())], rows, notes=[said])


@of_every_text
def fits(scores: Scores) -> Table:
    """Question 3: L(C) = a + b (C / UNIT)^-c of every family's frontier, and where it crosses softmax's."""
    fitted, rows = scores.scalings(), []
    for name, own in fitted.items():
        done = len(scores.finished(name, scaled_places()))
        places = sum(fits_depth(ALL[name], place["depth"]) for place in scaled_places())
        if own is None:
            rows.append([name, f"{done} of {places}", *[NOT_RUN if done < places else TOO_FEW] * 6])
            continue
        cells = [interval_of(own.interval(part)) for part in "abc"]
        crossing_there = "" if name == "softmax" else _crossing_of(own, fitted["softmax"])
        rows.append([name, str(done), str(own.points), *cells, f"{own.miss:.3f}", crossing_there])
    headings = ["", "finished sizes and budgets", "fitted", "a", f"b at {UNIT:g} FLOPs", "c", "largest miss"]
    return Table.of([*headings, "crosses softmax at FLOPs (share of draws)"], rows)


def _crossing_of(own: Scaling, baseline: Scaling | None) -> str:
    if baseline is None:
        return NOT_RUN
    where, share = crossing(own, baseline)
    shares = "" if math.isnan(share) else f" ({share:.0%})"
    return ("nowhere in reach" if where is None else interval_of(where, ".2e")) + shares


# Cells


def place_of(place: Place) -> str:
    """A depth and a budget, as a heading."""
    return f"depth {place['depth']}, 2^{place['tokens'].bit_length() - 1}"


def loss_of(result: Result | None, form: str = ".4f") -> str:
    """The mean over seeds, and their standard deviation."""
    if result is None:
        return NOT_RUN
    return f"{result.mean:{form}}" + ("" if math.isnan(result.spread) else f" ± {result.spread:{form}}")


def rate_of(result: Result | None) -> str:
    return "" if result is None else f"{result.rate:g}" + ("" if result.settled else "*")


def seeds_of(result: Result | None) -> str:
    return "" if result is None else str(len(result.runs))


def difference_of(difference: Interval | None, form: str = "+.4f") -> str:
    return "" if difference is None else interval_of(difference, form)


def over(own: Result | None, other: Result | None, form: str = "+.3f") -> str:
    """One result minus another, if both are there."""
    return difference_of(own.over(other), form) if own and other else ""


def interval_of(interval: Interval, form: str = ".3g") -> str:
    """The value, and in brackets what holds 95 %."""
    if math.isnan(interval.low):
        return f"{interval.value:{form}}"
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


TABLES: dict[str, Callable[..., list[Table]]] = {
    "study-families": families,
    "study-longer": longer,
    "study-sizes": sizes,
    "study-fits": fits,
    "study-deeper": deeper,
    "study-repairs": repairs,
    "study-further-offsets": further_offsets,
    "study-kernels": kernels,
    "study-ideas": ideas,
}
