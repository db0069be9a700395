"""The results of neighbours and approximations: a row for each case. What has a row is not measured again."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from runs.store import Store, key_of
from trainkit_gka.progress import console
from trainkit_gka.results import append_result, read_results

CPU = torch.device("cpu")
Case = dict[str, Any]  # words and numbers
Measured = tuple[dict[str, Any], dict[str, Any]]  # settings, which one may want to know too, and numbers


class Cases(Store):
    """A row's key is its case's."""

    def __init__(self, path: Path, kind: str):
        super().__init__(path, kind)
        self.known, self.added = set(self.rows()), 0

    def rows(self, ending: str = "") -> dict[str, dict[str, Any]]:
        lines = [line for line in read_results(self.path) if line["kind"] == self.kind + ending]
        return {key_of(line["config"].get("case", line["config"])): line for line in lines}

    def has(self, case: Case) -> bool:
        return key_of(case) in self.known

    def fill(self, cases: Iterable[Case], measure: Callable[[Case], Measured | None]) -> None:
        """Measure what has no row, one after the other. `measure` returns None if a signal ended it, which ends all."""
        for case in cases:
            if not self.has(case):
                if (measured := measure(case)) is None:
                    return
                self.append(case, *measured)

    def append(self, case: Case, settings: dict[str, Any], numbers: dict[str, Any]) -> None:
        """Append a row, and say its numbers."""
        append_result(self.path, self.kind, {**settings, "case": case}, numbers, CPU)
        self.known.add(key_of(case))
        self.added += 1
        shown = {name: f"{value:.4g}" for name, value in numbers.items() if type(value) in (int, float)}
        told = numbers.get("failed") or ", ".join(f"{name} {number}" for name, number in shown.items())
        console.print(f"{' '.join(map(str, case.values()))}: {told}", highlight=False, markup=False)
