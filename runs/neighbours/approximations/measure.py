"""What is measured of a form: its errors against the oracle, its time in turns with exact attention, its memory."""

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runs.bench.measurement import Plan
from runs.bench.timing import interleave
from runs.neighbours.approximations.case import Case, oracle, some_rows
from runs.neighbours.approximations.forms import FORMS
from runs.neighbours.approximations.rows import FUSED, SOFTMAX
from runs.neighbours.approximations.sums import Sums

CPU = torch.device("cpu")

EXACT: dict[str, Callable[[Case], torch.Tensor]] = {FUSED: Case.fused, SOFTMAX: Case.softmax}


class Truth:
    """Exact results of some query rows of a case."""

    def __init__(self, case: Case):
        self.case, self.places = case, some_rows(case.queries.shape[1])
        self.y = oracle(case, self.places)

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
        }

    def judge(self, sums: Sums) -> dict[str, Any]:
        """Errors, and how many of all rows have a negative or an undefined sum."""
        counts = {
            "causal": self.case.causal,
            "rows": sums.rows.numel(),
            "negative": sums.negative_rows,
            "undefined": sums.undefined_rows,
        }
        return {**self.errors(sums.output), **counts}


@torch.inference_mode()
def time_in_turns(case: Case, chosen: list[tuple[str, int]], seed: int, plan: Plan) -> dict[tuple[str, int], dict]:
    """Milliseconds of one call, by form and size; exact attention by its name and 0.

    What a causal case fixes beforehand (directions, landmarks of other texts) is not timed, what others draw from their
    own keys is.
    """
    calls = {key: _call(case, *key, seed) for key in chosen}
    named = {f"{name} {size}": (lambda n, call=call: call()) for (name, size), call in calls.items()}
    measured = interleave(named, CPU, plan)
    rows = {}
    for key, measurement in zip(chosen, measured.values()):
        about = {name: getattr(measurement, name) for name in ("status", "reason", "median_ms", "low_ms", "high_ms")}
        rows[key] = {**about, "samples": measurement.samples, "elsewhere": measurement.elsewhere}
        rows[key]["peak_mib"] = peak_mib(calls[key])
    return rows


def _call(case: Case, name: str, size: int, seed: int) -> Callable[[], Any]:
    if name in EXACT:
        return lambda: EXACT[name](case)
    if not case.causal:
        return lambda: FORMS[name](case, size, seed).output
    prepared = FORMS[name].prepare(case, size, seed)
    return lambda: prepared(case).output


def peak_mib(work: Callable[[], Any]) -> float | None:
    """MiB of resident memory that `work` adds at its peak; None where Linux's counters are missing."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # memory that is kept for later would hide what is used again
        reset.write_text("5")  # the peak is now what is resident
        before = _resident(status, "VmRSS")
        work()
        return (_resident(status, "VmHWM") - before) / 2**10
    return None


def _resident(status: Path, name: str) -> int:
    """KiB."""
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))
