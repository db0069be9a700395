"""The training runs that a report is about: their settings, logs and result lines."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gka.kinds import KINDS
from trainkit_gka.cli import UserError
from trainkit_gka.loop import finish_record
from trainkit_gka.progress import LOG, read_events
from trainkit_gka.results import read_results

RESULT_FILES = ("results.jsonl", "demo/train.jsonl", "demo/train_deit.jsonl")  # in BASE
T = TypeVar("T")


@dataclass(frozen=True)
class TrainedRun:
    """A run's folder, the settings it started with, its log, and its line of a result file (empty if there is none)."""

    folder: Path
    config: dict[str, Any]
    events: list[dict[str, Any]]
    finish: dict[str, Any]
    result: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_vision(self) -> bool:
        return "model" in self.config

    @property
    def family(self) -> str:
        """The name without the seed: runs that differ in nothing else share it."""
        return re.sub(r"-seed\d+$", "", self.name)

    @property
    def form(self) -> str:
        """The name of its attention in pictures."""
        model, attention = self.config.get("model", ""), self.config.get("attention", "")
        kind = KINDS.get(attention or next((name for name in KINDS if f"_{name}_" in model), "softmax"))
        offsets = " + offsets" if self.config.get("head_offsets") else ""
        return (kind.label if kind else attention) + offsets

    @property
    def has_sigma(self) -> bool:
        return any(event.get("sigma") for event in self.events)

    def points(self, event: str, key: str) -> list[tuple[int, Any]]:
        """(step, value) of every record of `event` that has a value of `key`."""
        return [(e["step"], e[key]) for e in self.events if e["event"] == event and e.get(key) is not None]


def find_runs(chosen: tuple[Path, ...], base: Path) -> list[TrainedRun]:
    """The chosen runs, or else all in BASE/runs and BASE/demo/runs. Raises UserError for a folder that is not a run."""
    folders = list(chosen) or [
        log.parent for place in ("runs", "demo/runs") for log in sorted(base.glob(f"{place}/*/{LOG}"))
    ]
    results = {}
    for path in (base / name for name in RESULT_FILES):
        for line in read_results(path, "parameters"):
            results[line["config"].get("model_tag")] = line
    runs = []
    for folder in folders:
        if not (folder / LOG).exists():
            raise UserError(f"{folder} is not a run: it has no {LOG}; give a folder that a trainer made")
        events = read_events(folder / LOG)
        starts = [event for event in events if event["event"] == "start" and isinstance(event.get("config"), dict)]
        if starts:
            name = folder.resolve().name
            finish = finish_record(folder, ("parameters",)) or {}
            runs.append(TrainedRun(folder, starts[-1]["config"], events, finish, results.get(name, {})))
        elif chosen:
            raise UserError(f"{folder / LOG} does not say how the run was started; it is damaged or of another program")
    return runs


def first_that_works(runs: Sequence[TrainedRun], look: Callable[[TrainedRun], T]) -> tuple[T | None, str]:
    """What `look` gives for the first run that it raises no UserError for, such as one that has a checkpoint.

    The second value says why there is none; it is empty where there are no runs at all.
    """
    reason = ""
    for run in runs:
        try:
            return look(run), ""
        except UserError as error:
            reason = reason or f"{run.name} is not drawn: {error}."
    return None, reason
