"""The flags that benchmarks share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from trainkit.cli import Bounds, UserError, check_bounds


@dataclass
class BenchConfig:
    """The flags that every benchmark has."""

    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run; auto takes CUDA if there is a GPU."""
    quick: bool = False
    """Time fewer cases in fewer rounds: to try things out, not to report."""
    results: Path = Path("runs/results")
    """Folder of the JSON lines: one file for each benchmark and hardware, appended to case by case."""


@dataclass
class CaseConfig(BenchConfig):
    """The flags of a benchmark that runs cases."""

    only: list[str] = field(default_factory=list)
    """Run the cases whose names begin with one of these; empty = all."""
    rounds: Annotated[int, Bounds(0)] = 0
    """Timed turns of every candidate; 0 = the benchmark's own number."""
    seconds: Annotated[float, Bounds(0)] = 0.0
    """Stop the turns of a comparison after this time (three are made in any case); 0 = the benchmark's own limit."""

    def check(self) -> None:
        """Raises UserError for values that make no sense; a benchmark's own checks call this first."""
        check_bounds(self)

    def select(self, names: list[str]) -> list[str]:
        """The names that --only asks for, in order. Raises UserError for a beginning that no name has."""
        for beginning in self.only:
            if not any(name.startswith(beginning) for name in names):
                raise UserError(f"--only {beginning}: no such case; there are {', '.join(names)}")
        return [name for name in names if not self.only or name.startswith(tuple(self.only))]
