"""What is on disk of the study: a line of the results for every finished or failed cell, and each run's folder."""

import datetime
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanochat_gka.training.trainer import Trainer
from runs.study.cells import Cell
from runs.study.data import Text
from runs.study.grid import GROUPS, Done
from trainkit.cli import UserError
from trainkit.files import locked
from trainkit.progress import read_events, read_lines
from trainkit.results import append_line, git_commit, read_results

RECORD = "results.jsonl"  # in a run's folder, by the trainer
FAILED, FINISHED = "study-failed", "study"
CURVE_KEYS, EVAL_KEYS = ("smooth_loss", "tokens_per_second"), ("tokens", "train_bpb", "val_bpb")


@dataclass
class Study:
    """The cells of some groups on one text, and where their rows and runs are."""

    text: Text
    results: Path
    runs: Path
    groups: list[str]
    retry_failed: bool = False
    _left: tuple[int, list[Cell]] = (-1, [])  # the size of the results when it was worked out

    def folder(self, cell: Cell) -> Path:
        """Of the cell's run."""
        return self.runs / self.key(cell)

    def key(self, cell: Cell) -> str:
        return cell.key(self.text.identity)

    def rows(self, kind: str = FINISHED) -> dict[str, dict[str, Any]]:
        """The rows of a kind, by key; the last one of a key counts. Lines of other versions are left out."""
        lines = [line for line in read_lines(self.results) if line.get("kind") == kind]
        return {line["key"]: line for line in lines if isinstance(line.get("cell"), dict) and "key" in line}

    def failed(self) -> dict[str, dict[str, Any]]:
        """Rows of cells that failed and did not finish later."""
        finished = self.rows()
        return {key: row for key, row in self.rows(FAILED).items() if key not in finished}

    def done(self) -> Done:
        """Validation bits per byte of every finished cell on this text."""
        scores = Done()
        for row in self.rows().values():
            try:
                cell = Cell.from_row(row["cell"])
            except TypeError:
                continue
            if row["key"] == self.key(cell):
                scores[cell] = row["metrics"]["val_bpb"]
        return scores

    def cells(self, assumed_rate: float | None = None) -> dict[str, list[Cell]]:
        """The cells that are known by now, by group; a cell of two groups stands in the first.

        assumed_rate: of families whose best one is not known, to see what is to come.
        """
        done, seen, groups = self.done(), set(), {}
        done.assumed_rate = assumed_rate
        for name in self.groups:
            cells = [cell for cell in GROUPS[name](done) if not (cell in seen or seen.add(cell))]
            groups[name] = cells
        return groups

    def left(self) -> list[Cell]:
        """What is neither finished nor failed, in order. Worked out anew when the results have grown."""
        size = self.results.stat().st_size if self.results.exists() else 0
        if size != self._left[0]:
            self._left = size, self._work_out_left()
        return self._left[1]

    def _work_out_left(self) -> list[Cell]:
        over = self.rows().keys() | (() if self.retry_failed else self.failed().keys())
        return [cell for cells in self.cells().values() for cell in cells if self.key(cell) not in over]

    def collect(self, cell: Cell) -> bool:
        """Append the row of a run that its trainer has finished. Returns False if it has not."""
        folder = self.folder(cell)
        records = read_results(folder / RECORD, *Trainer.FINISH_KEYS)
        if not records:
            return False
        metrics = {**records[-1]["metrics"], **curves(folder / "log.jsonl", cell.batch)}
        places = {"kind": FINISHED, "key": self.key(cell), "command": self.command(cell), "cell": asdict(cell)}
        append_line(self.results, {**records[-1], **places, "data": self.text.identity, "metrics": metrics})
        return True

    def fail(self, cell: Cell, code: int, reason: str) -> None:
        """Append a row that says why there is none."""
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")
        about = {"kind": FAILED, "key": self.key(cell), "date": date, "commit": git_commit()}
        row = {**about, "command": self.command(cell), "cell": asdict(cell), "exit_code": code, "reason": reason}
        append_line(self.results, row)

    def command(self, cell: Cell) -> str:
        """What computes this cell alone."""
        return f'make study ARGS="--only {self.key(cell)}"'

    def is_busy(self, cell: Cell) -> bool:
        """Whether a process trains it: another runner's, or one that outlived a runner that was killed."""
        try:
            with locked(self.folder(cell), "training in"):
                return False
        except UserError:
            return True


def curves(log: Path, batch: int) -> dict[str, list]:
    """Of a run's log: [tokens, running mean of the training loss in nats], and [tokens, train BPB, validation BPB]."""
    losses = [
        [record["step"] * batch, round(record["smooth_loss"], 5)] for record in read_events(log, "train", *CURVE_KEYS)
    ]
    evaluations = [[record[name] for name in EVAL_KEYS] for record in read_events(log, "eval", *EVAL_KEYS)]
    return {"curve": losses, "evaluations": evaluations}
