"""What is on disk of a study: a line of the results for every finished or failed trial, and each run's folder."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from runs.jobs import Job
from runs.store import Store
from runs.study.rates import Done
from trainkit_gka.cli import UserError
from trainkit_gka.files import locked
from trainkit_gka.results import date_of, git_commit, read_results

RECORD = "results.jsonl"  # in a run's folder, by the trainer
FAILED = "-failed"


@dataclass
class Ledger(ABC):
    """The trials of some groups, and where their rows and runs are, whatever a trial is."""

    results: Path
    runs: Path
    groups: list[str]
    retry_failed: bool = False
    _left: tuple[int, list] = (-1, [])  # the size of the results when it was worked out

    KIND: ClassVar[str]  # of the rows of finished trials; those of failed ones have "-failed" after it
    TRIAL: ClassVar[type]
    DONE: ClassVar[type[Done]]
    GROUPS: ClassVar[dict]  # name -> the function that makes its trials of the finished ones
    FINISH_KEYS: ClassVar[tuple[str, ...]]  # what a finished run's record has

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What the data have in common on every machine."""

    @abstractmethod
    def job(self, trial, device_type: str) -> Job:
        """What trains the trial."""

    @abstractmethod
    def pace(self):
        """How long trials take, as far as finished ones tell: `seconds(trial)`, and whether any were `measured`."""

    @abstractmethod
    def metrics(self, record: dict[str, Any], trial) -> dict[str, Any]:
        """What its row says, of the record of a finished run."""

    @abstractmethod
    def score(self, metrics: dict[str, Any]) -> Any:
        """By which runs are compared; less is better."""

    @abstractmethod
    def said(self, trial) -> str:
        """The score of a finished trial, in words."""

    @abstractmethod
    def command(self, trial) -> str:
        """What computes this trial alone."""

    def folder(self, trial) -> Path:
        """Of the trial's run."""
        return self.runs / self.key(trial)

    def key(self, trial) -> str:
        return trial.key(self.identity)

    @property
    def store(self) -> Store:
        return Store(self.results, self.KIND)

    def rows(self, ending: str = "") -> dict[str, dict[str, Any]]:
        """The rows of finished trials by key; ending: of others. Lines of other versions are left out."""
        return {key: row for key, row in self.store.rows(ending).items() if isinstance(row.get("trial"), dict)}

    def failed(self) -> dict[str, dict[str, Any]]:
        """Rows of trials that failed and did not finish later."""
        finished = self.rows()
        return {key: row for key, row in self.rows(FAILED).items() if key not in finished}

    def done(self) -> Done:
        """The score of every finished trial on these data."""
        scores = self.DONE()
        for row in self.rows().values():
            try:
                trial = self.TRIAL.from_row(row["trial"])
            except TypeError:
                continue
            if row["key"] == self.key(trial):
                scores[trial] = self.score(row["metrics"])
        return scores

    def trials(self, assumed_rate: float | None = None) -> dict[str, list]:
        """The trials that are known by now, by group; a trial of two groups stands in the first.

        assumed_rate: of families whose best one is not known, to see what is to come.
        """
        done, seen, groups = self.done(), set(), {}
        done.assumed_rate = assumed_rate
        for name in dict.fromkeys(self.groups):
            trials = [trial for trial in self.GROUPS[name](done) if not (trial in seen or seen.add(trial))]
            groups[name] = trials
        return groups

    def left(self) -> list:
        """What is neither finished nor failed, in order. Worked out anew when the results have grown."""
        size = self.results.stat().st_size if self.results.exists() else 0
        if size != self._left[0]:
            self._left = size, self._work_out_left()
        return self._left[1]

    def _work_out_left(self) -> list:
        over = self.rows().keys() | (() if self.retry_failed else self.failed().keys())
        return [trial for trials in self.trials().values() for trial in trials if self.key(trial) not in over]

    def collect(self, trial) -> bool:
        """Append the row of a run that its trainer has finished. Returns False if it has not."""
        folder = self.folder(trial)
        records = read_results(folder / RECORD, *self.FINISH_KEYS)
        if not records:
            return False
        metrics = self.metrics(records[-1], trial)
        about = {"key": self.key(trial), "command": self.command(trial), "trial": asdict(trial), "data": self.identity}
        self.store.add({**records[-1], **about, "metrics": metrics})
        return True

    def fail(self, trial, code: int, reason: str) -> None:
        """Append a row that says why there is none."""
        about = {"key": self.key(trial), "command": self.command(trial), "trial": asdict(trial)}
        row = {**about, "date": date_of(), "commit": git_commit(), "exit_code": code, "reason": reason}
        self.store.add(row, FAILED)

    def is_busy(self, trial) -> bool:
        """Whether a process trains it: another runner's, or one that outlived a runner that was killed."""
        try:
            with locked(self.folder(trial), "training in"):
                return False
        except UserError:
            return True
