"""What is measured of a form: its errors against the oracle, its time in turns with exact attention, its memory.

`errors` and `times` give tables and the picture what was measured.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from runs.bench.measurement import Plan
from runs.bench.timing import interleave
from runs.frames import frame
from runs.neighbours.approximations.case import Case
from runs.neighbours.approximations.forms import FORMS, Sums
from runs.neighbours.cases import CPU
from runs.neighbours.speed import peak_mib

FUSED, SOFTMAX = "exact, fused", "softmax, fused"
EXACT: dict[str, Callable[[Case], torch.Tensor]] = {FUSED: Case.fused, SOFTMAX: Case.softmax}


class Truth:
    """Exact results of some query rows of a case: all, or `most` that are spread evenly, the last one with them."""

    def __init__(self, case: Case, most: int = 512):
        tokens = case.queries.shape[1]
        self.case, self.places = case, torch.linspace(0, tokens - 1, min(tokens, most)).round().long()
        self.y = case.oracle(self.places)

    def errors(self, y: torch.Tensor) -> dict[str, Any]:
        """Relative Frobenius errors over the rows: of every head, and their median. A row that is not finite counts as
        one that is 0. y: (H, N, D), or of the rows alone.
        """
        got = (y if y.shape[1] == len(self.places) else y[:, self.places]).double()
        got = torch.where(got.isfinite().all(-1, keepdim=True), got, 0)
        of_heads = (got - self.y).norm(dim=(1, 2)) / self.y.norm(dim=(1, 2))
        of_rows = (got - self.y).norm(dim=-1) / self.y.norm(dim=-1)
        return {
            "error": of_heads.median().item(),
            "worst_head": of_heads.max().item(),
            "row_median": of_rows.median().item(),
            "errors": [round(error, 7) for error in of_heads.tolist()],
            "causal": self.case.causal,
        }

    def of_form(self, name: str, size: int, seed: int) -> dict[str, Any]:
        """What a row says of a form at a size, or of the fused operator."""
        if name == FUSED:
            return self.errors(self.case.fused()) | {"sigma_squared": self.case.sigma.square().tolist()}
        return self.judge(FORMS[name](self.case, size, seed, self.places))

    def judge(self, sums: Sums) -> dict[str, Any]:
        """Errors, and how many of all rows have a negative or an undefined sum."""
        counts = {"rows": sums.rows.numel(), "negative": sums.negative_rows, "undefined": sums.undefined_rows}
        return {**self.errors(sums.output), **counts}


@torch.inference_mode()
def time_in_turns(case: Case, chosen: list[tuple[str, int]], plan: Plan) -> dict[tuple[str, int], dict]:
    """Milliseconds and MiB of one call, by form and size; exact attention by its name and 0.

    What a causal case fixes beforehand (directions, landmarks of other texts) is not timed, what others draw from their
    own keys is.
    """
    calls = {key: _call(case, *key) for key in chosen}
    measured = interleave({key: lambda n, call=call: call() for key, call in calls.items()}, CPU, plan)
    kept = ("status", "reason", "median_ms", "low_ms", "high_ms", "samples", "elsewhere")
    return {
        key: {name: getattr(measured[key], name) for name in kept} | {"peak_mib": peak_mib(call)}
        for key, call in calls.items()
    }


def _call(case: Case, name: str, size: int) -> Callable[[], Any]:
    if name in EXACT:
        return lambda: EXACT[name](case)
    if not case.causal:
        return lambda: FORMS[name](case, size, seed=0).output
    prepared = FORMS[name].prepare(case, size, seed=0)
    return lambda: prepared(case).output


def rows(path: Path, part: str) -> pd.DataFrame:
    """The rows of a part, error or time, with the columns that it has."""
    measured = frame(path, "part")
    if measured.empty:
        return measured
    own = measured[measured.part == part].dropna(axis=1, how="all")
    return own.astype({name: int for name in ("tokens", "size") if name in own})  # other parts have none of them


def errors(path: Path) -> pd.DataFrame:
    """A line for every source, length, form and size: the median over heads and the worst one, over all seeds."""
    keys, measured = ["source", "causal", "tokens", "form", "size"], rows(path, "error")
    if measured.empty:
        return pd.DataFrame(columns=[*keys, "error", "worst_head"])
    by_case = measured.groupby(keys, sort=False)
    return by_case.agg(error=("error", "mean"), worst_head=("worst_head", "max")).reset_index()


def times(path: Path) -> pd.DataFrame:
    """The newest line for every mask, length, form and size, with `over_fused`: the time over the exact operator's in
    the same process, NaN without one.
    """
    keys, measured = ["causal", "tokens", "form", "size"], rows(path, "time")
    if measured.empty:
        return pd.DataFrame(columns=[*keys, "median_ms", "samples", "peak_mib", "over_fused", "record"])
    measured = measured[measured.median_ms.notna()]
    fused = measured[measured.form == FUSED].drop_duplicates("group", keep="last").set_index("group").median_ms
    measured = measured.assign(over_fused=measured.median_ms / measured.group.map(fused))
    return measured.drop_duplicates(keys, keep="last")


def errors_and_times(path: Path) -> pd.DataFrame:
    """The lines of `errors` beside those of `times` with the mask that the source has, where there are both."""
    return errors(path).merge(times(path), on=["causal", "tokens", "form", "size"])
