"""The study's table of equal tokens, FLOPs and parameters: what GKA's forms are over softmax's of the same size."""

from pathlib import Path

import numpy as np

from runs.sections.sources import table
from runs.sections.study import NOT_RUN, ROWS, of_every_text
from runs.study.families import ALL
from runs.study.grid import BUDGETS, SCALED, scaled_places
from runs.study.scores import Result, Scores

BASELINES = ("softmax", "softmax + offsets")
MEASURES = {"tokens": None, "FLOPs": "flops_per_token", "parameters": "parameters"}
LEAST = min(BUDGETS[min(BUDGETS)])  # tokens of the budget that every depth has


def equal(folder: Path = ROWS) -> str:
    """Question 3: differences at the least budget, with the baseline's loss interpolated between its depths."""
    return of_every_text(folder, _equal)


def _equal(scores: Scores) -> str:
    places = [place for place in scaled_places() if place["tokens"] == LEAST]
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


TABLES = {"study-equal": equal}
