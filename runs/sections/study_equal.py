"""The study's tables of differences at every depth: with intervals over seeds, and at equal FLOPs and parameters."""

from pathlib import Path

import numpy as np

from runs.sections.sources import table
from runs.sections.study import NOT_RUN, ROWS, difference_of, of_every_text
from runs.study.families import ALL
from runs.study.grid import BUDGETS, REPEATED, SCALED, scaled_places
from runs.study.scores import Result, Scores

BASELINES = ("softmax", "softmax + offsets")
MEASURES = {"tokens": None, "FLOPs": "flops_per_token", "parameters": "parameters"}
LEAST = min(BUDGETS[min(BUDGETS)])  # tokens of the budget that every depth has


def differences(folder: Path = ROWS) -> str:
    """Questions 1 to 3: what the repeated families are over both baselines, at every depth and the least budget."""
    return of_every_text(folder, _differences)


def _differences(scores: Scores) -> str:
    rows = []
    for baseline in BASELINES:
        for name in REPEATED:
            pairs = [(scores.at(ALL[name], place), scores.at(ALL[baseline], place)) for place in least_places()]
            if name in BASELINES[: BASELINES.index(baseline) + 1] or not any(own and other for own, other in pairs):
                continue  # itself, a row that is there the other way round, or not trained
            cells = [difference_of(own.over(other), "+.3f") if own and other else "" for own, other in pairs]
            seeds = [
                str(len(own.losses.keys() & other.losses.keys())) if own and other else "0" for own, other in pairs
            ]
            rows.append([name, baseline, *cells, " / ".join(seeds)])
    headings = [f"depth {place['depth']}" for place in least_places()]
    return table(["", "over", *headings, "seeds"], rows, left=2) if rows else f"{NOT_RUN}\n"


def least_places() -> list[dict]:
    """Every depth, with the least budget."""
    return [place for place in scaled_places() if place["tokens"] == LEAST]


def equal(folder: Path = ROWS) -> str:
    """Question 3: differences at the least budget, with the baseline's loss interpolated between its depths."""
    return of_every_text(folder, _equal)


def _equal(scores: Scores) -> str:
    places = least_places()
    found = {name: {p["depth"]: scores.at(ALL[name], p) for p in places} for name in SCALED}
    depths = [place["depth"] for place in places][1:]  # the smallest GKA is smaller than any softmax
    rows = []
    for baseline in BASELINES:
        curve = [result for result in found[baseline].values() if result]
        for name in SCALED:
            if name.startswith("softmax") or len(curve) < 2:
                continue
            own = [found[name][depth] for depth in depths]
            others = [found[baseline][depth] for depth in depths]
            cells = [_over(a, b, curve, m) for a, b in zip(own, others, strict=True) for m in MEASURES.values()]
            rows.append([name, baseline, *cells])
    headings = [f"depth {depth}: equal {measure}" for depth in depths for measure in MEASURES]
    return table(["", "over", *headings], rows, left=2) if rows else f"{NOT_RUN}\n"


def _over(own: Result | None, same_depth: Result | None, curve: list[Result], measure: str | None) -> str:
    """own minus the baseline at the same depth, or where its curve has as much of the measure; nothing beyond it."""
    if own is None or same_depth is None:
        return ""
    if measure is None:
        return f"{own.mean - same_depth.mean:+.3f}"
    sizes = [result[measure] for result in curve]
    if not min(sizes) <= own[measure] <= max(sizes):
        return ""
    interpolated = np.interp(np.log(own[measure]), np.log(sizes), [result.mean for result in curve])
    return f"{own.mean - interpolated:+.3f}"


TABLES = {"study-differences": differences, "study-equal": equal}
