"""The flags that benchmarks share."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch

from trainkit_gka.cli import Bounds, UserError, check_bounds


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


# On each kind of device the usual dtype of features, which the names of cases leave out.
USUAL_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
SUFFIXES = {"bfloat16": "-bf16", "float32": "-fp32"}
Counts = Annotated[list[int], Bounds(1)]


@dataclass
class ComparisonConfig(CaseConfig):
    """The flags of a benchmark that compares softmax attention and GKA on any device."""

    dtypes: list[Literal["float32", "bfloat16"]] = field(default_factory=list)
    """What features and products are rounded to; empty = bfloat16 on CUDA, both on a CPU."""
    threads: Counts = field(default_factory=list)
    """Numbers of threads to time a CPU with, one after the other, each in a file of its own; empty = torch's own."""

    def dtypes_on(self, device_type: str) -> list[str]:
        return self.dtypes or (["bfloat16"] if device_type == "cuda" else ["float32", "bfloat16"])

    def with_threads(self, otherwise: list[int] | None = None) -> Iterator[int]:
        """Every number of threads to time with, while torch uses it; `otherwise` if the user named none."""
        before = torch.get_num_threads()
        try:
            for threads in self.threads or otherwise or [before]:
                torch.set_num_threads(threads)
                yield threads
        finally:
            torch.set_num_threads(before)


def with_dtype(case: str, dtype: str, device_type: str) -> str:
    """The case's name, which says what dtype it has unless that is the device's usual one: vit-ti-bf16 on a CPU."""
    return case if dtype == USUAL_DTYPE[device_type] else case + SUFFIXES[dtype]


def is_unusual(case: str) -> bool:
    """Whether a case's name says its dtype."""
    return case.endswith(tuple(SUFFIXES.values()))
