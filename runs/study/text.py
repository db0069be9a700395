"""The study of one text: its packed rows, what trains a trial on them and how long it takes, and what its row says."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat_gka.data.loader import same_rows
from nanochat_gka.data.shards import MANIFEST
from nanochat_gka.train import Trainer
from runs.jobs import START_SECONDS, Job
from runs.study.grid import GROUPS
from runs.study.ledger import RECORD, Ledger
from runs.study.rates import Done
from runs.study.trials import EVAL_TOKENS, EVALUATE_ALONG_FROM, KIND, Trial
from trainkit_gka.cli import UserError
from trainkit_gka.files import read_json
from trainkit_gka.progress import read_events

CURVE_KEYS, EVAL_KEYS = ("smooth_loss", "tokens_per_second"), ("tokens", "train_bpb", "val_bpb")
GUESSED_FLOPS = 8e10  # FLOP/s of one thread, before anything is measured


@dataclass(frozen=True)
class Text:
    """Packed rows. name: of the corpus. identity: what two folders of the same rows have in common."""

    packed: Path
    name: str
    sequence_len: int
    vocab_size: int
    identity: dict[str, Any]


def load(packed: Path) -> Text:
    """The rows in a folder. Raises UserError if there are none."""
    if not (packed / MANIFEST).exists():
        raise UserError(f"no packed rows in {packed}; make study packs them (CORPUS=builtin, fineweb or a folder)")
    manifest = read_json(packed / MANIFEST, "manifest of packed rows")
    name, length = Path(manifest["corpus"]).name, manifest["sequence_len"]
    return Text(packed, name, length, manifest["vocab_size"], same_rows(manifest))


class Pace:
    """How long trials take: FLOPs over the FLOP/s of training, the median of finished trials (`rows`) of that depth."""

    def __init__(self, text: Text, rows: Iterable[dict]):
        self.text, measured = text, defaultdict(list)
        for row in rows:
            if speed := row["metrics"]["tokens_per_second"]:  # else too few steps to time
                flops = speed * row["metrics"]["flops_per_token"]
                measured[row["trial"]["depth"], row["trial"]["dtype"]].append(flops)
        self.measured = {place: statistics.median(speeds) for place, speeds in measured.items()}

    def flops_per_second(self, trial: Trial) -> float:
        """As measured at this dtype and the nearest depth, or a guess if nothing is."""
        depths = [depth for depth, dtype in self.measured if dtype == trial.dtype]
        if not depths:
            return GUESSED_FLOPS
        return self.measured[min(depths, key=lambda depth: abs(depth - trial.depth)), trial.dtype]

    def seconds(self, trial: Trial) -> float:
        """Of the whole trial: start, training, and evaluations, which cost a third of training on as many tokens."""
        flops = trial.flops(self.text.sequence_len, self.text.vocab_size)
        evaluations = 5 if trial.tokens >= EVALUATE_ALONG_FROM else 2
        evaluated = evaluations * 2 * EVAL_TOKENS / 3
        return START_SECONDS + flops * (1 + evaluated / trial.tokens) / self.flops_per_second(trial)


class Study(Ledger):
    """The trials of some groups on one text."""

    KIND = KIND
    TRIAL, DONE, GROUPS, FINISH_KEYS = Trial, Done, GROUPS, Trainer.FINISH_KEYS

    def __init__(self, text: Text, results: Path, runs: Path, groups: list[str], retry_failed: bool = False):
        super().__init__(results, runs, groups, retry_failed)
        self.text = text

    @property
    def identity(self):
        return self.text.identity

    def job(self, trial: Trial, device_type: str) -> Job:
        folder = self.folder(trial)
        places = ["--data", self.text.packed, "--out", folder.parent, "--model-tag", folder.name]
        places += ["--results", folder / RECORD, "--device-type", device_type]
        flags = [*places, *trial.flags()]
        return Job(trial.label, "nanochat_gka.train", flags, folder, trial.steps, finish_keys=Trainer.FINISH_KEYS)

    def pace(self) -> Pace:
        return Pace(self.text, self.rows().values())

    def metrics(self, record, trial: Trial):
        return {**record["metrics"], **curves(self.folder(trial) / "log.jsonl", trial.batch)}

    def score(self, metrics):
        return metrics["val_bpb"]

    def said(self, trial: Trial) -> str:
        return f"validation BPB {self.done()[trial]:.4f}"

    def command(self, trial: Trial) -> str:
        return f'make study ARGS="--only {self.key(trial)}"'


def curves(log: Path, batch: int) -> dict[str, list]:
    """Of a run's log: [tokens, running mean of the training loss in nats], and [tokens, train BPB, validation BPB]."""
    losses = [
        [record["step"] * batch, round(record["smooth_loss"], 5)] for record in read_events(log, "train", *CURVE_KEYS)
    ]
    evaluations = [[record[name] for name in EVAL_KEYS] for record in read_events(log, "eval", *EVAL_KEYS)]
    return {"curve": losses, "evaluations": evaluations}
