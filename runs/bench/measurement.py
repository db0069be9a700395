"""How to time (Plan), and what one candidate gave (Measurement). Times are in milliseconds, memory in MiB."""

import contextlib
import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from runs.bench.config import CaseConfig
from runs.bench.device import release_memory

MIN_ROUNDS = 3
REASON_LENGTH = 240


@dataclass(frozen=True)
class Plan:
    """A sample is `buffers` consecutive calls (call n works on buffer n), repeated until it lasts `sample_ms`."""

    rounds: int = 50
    warmup: int = 3  # calls of each candidate, then untimed rounds
    seconds: float = math.inf  # of timed rounds
    buffers: int = 1
    sample_ms: float = 0.0
    graph: bool = False  # CUDA graphs, where there is CUDA

    def adjust(self, config: CaseConfig) -> "Plan":
        """The plan with the user's --rounds, --seconds and --quick."""
        plan = self
        if config.quick:
            plan = replace(self, rounds=max(MIN_ROUNDS, self.rounds // 5), seconds=self.seconds / 5)
        return replace(plan, rounds=config.rounds or plan.rounds, seconds=config.seconds or plan.seconds)


@dataclass
class Measurement:
    """What one candidate gave. Times are of one call; None is what was not measured."""

    status: Literal["ok", "wrong", "failed"] = "ok"
    reason: str = ""
    note: str = ""
    first_ms: float | None = None  # with compilation and autotuning, unless a cache on disk had them
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    samples: int = 0
    graphed: bool = False
    peak_mib: float | None = None  # what one call allocates beyond what was allocated before; None on a CPU
    elsewhere: float | None = None  # cores that others used meanwhile: above 0, the times are not the machine's

    def fail(self, error: BaseException) -> None:
        """Take the error, be it out of memory or unsupported, as the reason of a row, and give the memory back."""
        self.status, self.reason = "failed", one_line(error)
        release_memory()


@contextlib.contextmanager
def failing(measurement: Measurement):
    """An error inside becomes the candidate's reason."""
    try:
        yield
    except Exception as error:
        measurement.fail(error)


def one_line(error: BaseException) -> str:
    """The error as the reason of a row."""
    while isinstance(error.__context__, Exception) and not error.__suppress_context__:
        error = error.__context__  # the error of a failed capture hides the one that made it fail
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."
