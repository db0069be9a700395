"""Question 6 on some images: what trains a cell, and what a finished one's row says."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deit_gka.training.trainer import Trainer
from runs.demo.commands import START_SECONDS, Job
from runs.study.ledger import RECORD, Ledger
from runs.study.vision.cells import VisionCell
from runs.study.vision.families import VisionDone, families_of, groups
from runs.study.vision.images import Images

VISION = "study-vision"  # the kind of its rows
REPORTS = ("--eval-every", -1, "--num-workers", 0, "--log-every", 30, "--save-every", 150)


class VisionPace:
    """Images/s of training, median over the finished cells that were long enough to be timed."""

    def __init__(self, images: Images, rows: Iterable[dict[str, Any]]):
        speeds = [speed for row in rows if (speed := row["metrics"]["images_per_second"])]
        self.images, self.measured = images, {"images/s": statistics.median(speeds)} if speeds else {}

    def seconds(self, cell: VisionCell) -> float:
        setting = self.images.setting
        speed = self.measured.get("images/s", setting.images_per_second)
        return START_SECONDS + setting.epochs * self.images.identity["train images"] / speed


class VisionStudy(Ledger):
    """The cells of some groups on one set of images."""

    KIND = VISION
    CELL, DONE, FINISH_KEYS = VisionCell, VisionDone, (*Trainer.FINISH_KEYS, "ema_top1")

    def __init__(self, images: Images, results: Path, runs: Path, groups: list[str], retry_failed: bool = False):
        super().__init__(results, runs, groups, retry_failed)
        self.images, self.GROUPS = images, groups_of(images)

    @property
    def identity(self):
        return self.images.identity

    def key(self, cell: VisionCell) -> str:
        return cell.key(self.identity, self.images.setting)

    def steps(self) -> int:
        """Updates of a run."""
        return self.images.setting.epochs * (self.identity["train images"] // self.images.setting.batch)

    def job(self, cell: VisionCell, device_type: str) -> Job:
        folder = self.folder(cell)
        places = ["--data", self.images.data, "--out", folder.parent, "--model-tag", folder.name, *REPORTS]
        places += ["--results", folder / RECORD, "--device-type", device_type]
        flags = [*places, *cell.flags(self.images.setting)]
        return Job(cell.label, "deit_gka.train", flags, folder, self.steps(), finish_keys=self.FINISH_KEYS)

    def pace(self) -> VisionPace:
        return VisionPace(self.images, self.rows().values())

    def metrics(self, record, cell: VisionCell):
        return record["metrics"]

    def score(self, metrics) -> tuple[float, float]:
        return score(metrics)

    def said(self, cell: VisionCell) -> str:
        return f"EMA top-1 {100 - self.done()[cell][0]:.2f} %"

    def command(self, cell: VisionCell) -> str:
        return f"python -m runs.study.vision --data {self.images.name} --only {self.key(cell)}"


def score(metrics: dict[str, Any]) -> tuple[float, float]:
    """By which runs are compared: errors of the averaged weights in percent, and of equal ones the loss."""
    return 100 - metrics["ema_top1"], metrics["ema_loss"]


def depth_of(images: Images) -> int:
    """How many layers the models have."""
    [depth] = [word.partition("=")[2] for word in images.setting.model if word.startswith("depth=")]
    return int(depth)


def groups_of(images: Images) -> dict:
    return groups(families_of(depth_of(images)))
