"""The results: a file of rows, each of one case that was measured. A case is measured once; tables read a frame."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from trainkit_gka.progress import console
from trainkit_gka.results import append_result, read_results

CPU = torch.device("cpu")
PROVENANCE = ("date", "commit", "hardware", "torch")


class Rows:
    """The rows of a file, of which new ones are of `kind`. A case is a dictionary of words and numbers."""

    def __init__(self, path: Path, kind: str):
        self.path, self.kind, self.added = path, kind, 0
        self._cases = {_key(row["config"].get("case", row["config"])) for row in read_results(path)}

    def has(self, **case: Any) -> bool:
        return _key(case) in self._cases

    def add(self, metrics: dict[str, Any], settings: dict[str, Any] | None = None, **case: Any) -> None:
        """Append a row, and say its numbers. Settings are what else one may want to know of how they came about."""
        config = case if settings is None else {**settings, "case": case}
        append_result(self.path, self.kind, config, metrics, CPU)
        self._cases.add(_key(case))
        self.added += 1
        numbers = {name: f"{value:.4g}" for name, value in metrics.items() if type(value) in (int, float)}
        told = metrics.get("failed") or ", ".join(f"{name} {number}" for name, number in numbers.items())
        console.print(f"{' '.join(map(str, case.values()))}: {told}", highlight=False, markup=False)


def _key(case: dict[str, Any]) -> str:
    return json.dumps(case, sort_keys=True)


def frame(path: Path, **case: Any) -> pd.DataFrame:
    """A line for each row of the file of which `case` is true: what was measured, settings, numbers, and where, when
    and with what. Empty, without columns, if there is none.
    """
    lines = []
    for row in read_results(path):
        described = {**row["config"], **row["config"].get("case", {})}
        if case.items() <= described.items():
            lines.append({**{key: row[key] for key in PROVENANCE}, **described, **row["metrics"]})
    return pd.DataFrame(lines)
