"""The study of one text: what trains a cell, and what a finished one's row says."""

from pathlib import Path

from nanochat_gka.train import Trainer
from runs.demo.commands import Job
from runs.study.cells import Cell
from runs.study.data import Text
from runs.study.grid import GROUPS
from runs.study.ledger import RECORD, Ledger
from runs.study.pace import Pace
from runs.study.rates import Done
from trainkit_gka.progress import read_events

FINISHED = "study"  # the kind of its rows
CURVE_KEYS, EVAL_KEYS = ("smooth_loss", "tokens_per_second"), ("tokens", "train_bpb", "val_bpb")


class Study(Ledger):
    """The cells of some groups on one text."""

    KIND = FINISHED
    CELL, DONE, GROUPS, FINISH_KEYS = Cell, Done, GROUPS, Trainer.FINISH_KEYS

    def __init__(self, text: Text, results: Path, runs: Path, groups: list[str], retry_failed: bool = False):
        super().__init__(results, runs, groups, retry_failed)
        self.text = text

    @property
    def identity(self):
        return self.text.identity

    def job(self, cell: Cell, device_type: str) -> Job:
        folder = self.folder(cell)
        places = ["--data", self.text.packed, "--out", folder.parent, "--model-tag", folder.name]
        places += ["--results", folder / RECORD, "--device-type", device_type]
        flags = [*places, *cell.flags()]
        return Job(cell.label, "nanochat_gka.train", flags, folder, cell.steps, finish_keys=Trainer.FINISH_KEYS)

    def pace(self) -> Pace:
        return Pace(self.text, self.rows().values())

    def metrics(self, record, cell: Cell):
        return {**record["metrics"], **curves(self.folder(cell) / "log.jsonl", cell.batch)}

    def score(self, metrics):
        return metrics["val_bpb"]

    def said(self, cell: Cell) -> str:
        return f"validation BPB {self.done()[cell]:.4f}"

    def command(self, cell: Cell) -> str:
        return f'make study ARGS="--only {self.key(cell)}"'


def curves(log: Path, batch: int) -> dict[str, list]:
    """Of a run's log: [tokens, running mean of the training loss in nats], and [tokens, train BPB, validation BPB]."""
    losses = [
        [record["step"] * batch, round(record["smooth_loss"], 5)] for record in read_events(log, "train", *CURVE_KEYS)
    ]
    evaluations = [[record[name] for name in EVAL_KEYS] for record in read_events(log, "eval", *EVAL_KEYS)]
    return {"curve": losses, "evaluations": evaluations}
