"""Question 7 on some images: what trains a trial, and what a finished one's row says."""

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deit_gka.train import Trainer
from runs.jobs import START_SECONDS, Job
from runs.study.ledger import RECORD, Ledger
from runs.study.vision.families import VisionDone, done_of, groups
from runs.study.vision.images import Images
from runs.study.vision.trials import KIND, VisionTrial, score
from trainkit_gka.progress import read_events

REPORTS = ("--num-workers", 0, "--log-every", 30, "--save-every", 150)


class VisionPace:
    """Images/s of training, median over the finished trials that were long enough to be timed."""

    def __init__(self, images: Images, rows: Iterable[dict[str, Any]]):
        speeds = [speed for row in rows if (speed := row["metrics"]["images_per_second"])]
        self.images, self.measured = images, {"images/s": statistics.median(speeds)} if speeds else {}

    def seconds(self, trial: VisionTrial) -> float:
        setting = self.images.setting
        speed = self.measured.get("images/s", setting.images_per_second)
        return START_SECONDS + setting.epochs_of(trial) * self.images.trained_on(trial) / speed


class VisionStudy(Ledger):
    """The trials of some groups on one set of images."""

    KIND = KIND
    TRIAL, DONE, FINISH_KEYS = VisionTrial, VisionDone, (*Trainer.FINISH_KEYS, "ema_top1")

    def __init__(self, images: Images, results: Path, runs: Path, groups: list[str], retry_failed: bool = False):
        super().__init__(results, runs, groups, retry_failed)
        self.images, self.GROUPS, self.DONE = images, groups_of(images), done_of(images.setting)

    @property
    def identity(self):
        return self.images.identity

    def key(self, trial: VisionTrial) -> str:
        return trial.key(self.identity, self.images.setting)

    def steps(self, trial: VisionTrial) -> int:
        """Updates of a run."""
        setting = self.images.setting
        return setting.epochs_of(trial) * (self.images.trained_on(trial) // setting.batch)

    def job(self, trial: VisionTrial, device_type: str) -> Job:
        folder = self.folder(trial)
        places = ["--data", self.images.folder_of(trial), "--out", folder.parent, "--model-tag", folder.name, *REPORTS]
        places += ["--results", folder / RECORD, "--device-type", device_type]
        every = 1 if trial.tuning else -1  # the images that compare are looked at once
        flags = [*places, "--eval-every", every, *trial.flags(self.images.setting)]
        built = trial.attention in self.images.setting.built_weights
        return Job(
            trial.label,
            "deit_gka.train",
            flags,
            folder,
            self.steps(trial),
            finish_keys=self.FINISH_KEYS,
            environment={"TIMM_FUSED_ATTN": "0"} if built else {},
        )

    def pace(self) -> VisionPace:
        return VisionPace(self.images, self.rows().values())

    def metrics(self, record, trial: VisionTrial):
        return record["metrics"] | ({"curve": curve(self.folder(trial))} if self.images.setting.tuning_epochs else {})

    def score(self, metrics) -> tuple[float, float]:
        return score(metrics)

    def said(self, trial: VisionTrial) -> str:
        of = " of held-out images" if trial.tuning else ""
        return f"EMA top-1{of} {100 - self.done()[trial][0]:.2f} %"

    def command(self, trial: VisionTrial) -> str:
        return f"python -m runs.study.vision --data {self.images.name} --only {self.key(trial)}"


def curve(folder: Path) -> list[dict[str, Any]]:
    """How a run learned, by epoch: its training loss, mean of the logged updates, and what was judged on the way."""
    losses: dict[int, list[float]] = {}
    for record in read_events(folder / "log.jsonl", "train", "epoch", "loss"):
        losses.setdefault(math.ceil(record["epoch"]), []).append(record["loss"])
    judged = {record["epoch"]: record["ema_top1"] for record in read_events(folder / "log.jsonl", "eval", "ema_top1")}
    return [
        {"epoch": epoch, "loss": statistics.mean(losses[epoch]), "ema_top1": judged.get(epoch)}
        for epoch in sorted(losses)
    ]


def groups_of(images: Images) -> dict:
    return groups(images.setting)
