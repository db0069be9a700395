"""The images of a run: their order, the worker processes that load them, how long training waits for them, and those
that are broken: their list, and which evaluations could read enough images."""

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deit_gka.data import workers
from deit_gka.data.batch import ImageBatch, Images, assemble
from deit_gka.data.order import Order
from deit_gka.data.sources import BrokenImage, ImageStream, check_classes, decode, located, open_source
from deit_gka.data.sources.base import check_parts, list_hash
from deit_gka.data.transforms import eval_transform, train_transform
from deit_gka.data.workers import BatchLoader, batches, evaluation_batches
from deit_gka.model.checkpoints import parse_kwargs
from deit_gka.training.config import TrainConfig
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime

SIDES = (32, 224)  # of --input-size -1
PATCHES = (4, 8, 16)  # of --patch-size -1
LOOKED_AT = 16  # images, for their size
FILE_NAMES = {"encoding": "utf-8", "errors": "surrogateescape"}  # they may be any bytes
BROKEN_SHARE = 0.01  # of the validation images


def fitted(config: TrainConfig) -> TrainConfig:
    """`config` with an input size and patches for its images where those are -1, and --patch-size in --model-kwargs.

    Raises UserError if there are no images, or their size cannot be found out.
    """
    size, patch, keywords = config.input_size, config.patch_size, config.model_kwargs
    if size < 0:
        size = min(max(typical_side(config), SIDES[0]), SIDES[1])
    if patch < 0:
        patch = min(PATCHES, key=lambda side: abs(side - size / 8))
    if patch:
        keywords += (f"patch_size={patch}",)
    if config.input_size < 0:
        size -= size % (patch or parse_kwargs(keywords).get("patch_size", 16))
    return replace(config, input_size=size, patch_size=0, model_kwargs=keywords)


def typical_side(config: TrainConfig) -> int:
    """The median of the smaller sides of some training images, which are spread over all classes, in pixels."""
    source, sides = open_source(config.data, "train", config), []
    if isinstance(source, ImageStream):
        raise UserError(f"--input-size -1 needs images that are stored, and {config.data} is a stream; give the size")
    for index in range(0, len(source), max(1, len(source) // LOOKED_AT)):
        with contextlib.suppress(BrokenImage, OSError):
            sides.append(min(decode(source.read(index)[0]).size))
    if not sides:
        raise UserError(f"{config.data}: no image that was looked at can be read; give --input-size")
    return statistics.median_low(sides)


class RunImages:
    """Training and validation images of the run in `folder`. Raises UserError if they cannot be trained on."""

    def __init__(self, config: TrainConfig, runtime: Runtime, folder: Path):
        self.config, self.runtime, self.folder = config, runtime, folder
        self.num_workers = workers.default_workers() if config.num_workers < 0 else config.num_workers
        if self.num_workers:
            workers.worker_context(config.data)
        self.train_set, self.val_set = (open_source(config.data, split, config) for split in ("train", "val"))
        for warning in check_classes(self.train_set, self.val_set):
            runtime.print(f"warning: {warning}")
        self.classes = self.train_set.classes
        self.order = Order(self.train_set, config, runtime, config.device_batch_size)
        at_once, sets = len(self.order.pieces[0].places), (self.train_set, self.val_set)
        workers.check_shared_memory(self.num_workers, config.input_size, at_once, *sets)
        self._training_images = Images(self.train_set, train_transform(config), True)

    def training_batches(self, step: int, steps: int) -> BatchLoader:
        """The images of the updates from `step` on; the workers that load them start here."""
        keys = self.order.batches(step, steps)
        return batches(self._training_images, keys, self.num_workers, self.runtime.device)

    def validation_batches(self) -> Iterator[ImageBatch]:
        """This process's part of the validation images."""
        config = self.config
        transform = eval_transform(config.input_size, config.crop_pct, mean=config.mean, std=config.std)
        return evaluation_batches(self.val_set, transform, self.runtime, config.device_batch_size, self.num_workers)

    def about(self) -> dict[str, Any]:
        """A checkpoint's description of the images."""
        place = {"trained_on": located(self.config.data), "parts": self.config.given_parts()}
        return {"classes": self.classes, "data": self._counts(), **place}

    def data_hashes(self) -> dict[str, str]:
        """Hashes of the lists of images, which must be the same on every process."""
        sets = {"training": self.train_set, "validation": self.val_set}
        return {f"{name} images with the hash": list_hash(images) for name, images in sets.items()}

    def check_same(self, saved: dict[str, Any]) -> None:
        """Raises UserError if these are not the images of the run whose checkpoint has the state `saved`."""
        data, advice = self.config.data, f"give it the run's data, {saved['trained_on']}, or another --model-tag"
        if saved["trained_on"] == located(data):
            check_parts(self.config, saved["parts"], self.folder)
        for key, value in self._counts().items():
            before = saved["data"][key]
            if (before is None) != (value is None):
                how = "at random" if value is None else "as a stream"
                raise UserError(f"{data} is read {how}, unlike the data of the run in {self.folder}; {advice}")
            if before != value:
                raise UserError(f"{data} has {value} {key} where the run in {self.folder} had {before}; {advice}")
        if saved["classes"] != self.classes:
            raise UserError(f"{data} has other classes than the run in {self.folder}; {advice}")

    def _counts(self) -> dict[str, int | None]:
        """Counts that a resumed run must share to go on exactly. processes: that share a stream; None without one."""
        processes = self.runtime.world_size if isinstance(self.train_set, ImageStream) else None
        return {"processes": processes, "training images": len(self.train_set), "validation images": len(self.val_set)}


class Fetch:
    """Takes the batches of one update from a loader. Sums up seconds of waiting for them and of loading, in the
    workers, and lists broken images by name and reason.
    """

    def __init__(self, units: Iterator[ImageBatch]):
        self._units, self.waiting, self.loading = units, 0.0, 0.0
        self.broken: list[tuple[str, str]] = []

    def __call__(self, size: int) -> ImageBatch:
        """The next batch of `size` images."""
        started = time.perf_counter()
        batch = assemble(self._units, size)
        self.waiting += time.perf_counter() - started
        self.loading += batch.seconds
        self.broken += batch.broken
        return batch


@dataclass
class Meter:
    """Sums over updates: images, seconds of training alone, those in which the slowest process waited for a batch, and
    seconds that workers spent loading.
    """

    images: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    loading: float = 0.0

    def add(self, images: int, seconds: float, waiting: float, loading: float) -> None:
        self.images += images
        self.seconds += seconds
        self.waiting += min(waiting, seconds)
        self.loading += loading

    def rates(self, workers: int) -> dict[str, float | None]:
        """Images per second of training, of the model alone and of `workers` loading workers, over all processes, and
        the part of the time spent waiting. None for what took no time, as before anything is timed.
        """
        seconds = {"": self.seconds, "model_": self.seconds - self.waiting, "loader_": self.loading / workers}
        rates = {f"{part}images_per_second": self.images / t if t > 0 else None for part, t in seconds.items()}
        return {**rates, "waiting": self.waiting / self.seconds if self.seconds else None}


class BrokenList:
    """The file broken_images.txt of a run's folder: a line for each, its name and the reason with a tab between.

    A process lists a file once, and none that an earlier run listed.
    """

    def __init__(self, folder: Path):
        self.path = folder / "broken_images.txt"
        lines = self.path.read_text(**FILE_NAMES).splitlines() if self.path.exists() else []
        self._names = {line.split("\t")[0] for line in lines}

    def report(self, images: Iterable[tuple[str, str]], consequence: str) -> None:
        """Warn of the images, (name, reason), that are new to this process, and add them to the list."""
        for name, reason in images:
            if name in self._names:
                continue
            self._names.add(name)
            printable = os.fsencode(name).decode(errors="replace")
            print(f"warning: {printable} cannot be read ({reason}); {consequence}", file=sys.stderr)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", **FILE_NAMES) as file:
                file.write(f"{name}\t{reason}\n")


def best(evaluations: Iterable[dict[str, Any]], metric: str) -> dict[str, Any]:
    """The first of the evaluations with the highest `metric`.

    One that left out many more images than another could not read them for a reason that will pass, such as a slow
    disk, and does not count.
    """
    evaluations = list(evaluations)
    fewest = min(record["broken"] for record in evaluations)
    complete = [
        record
        for record in evaluations
        if record["broken"] - fewest <= BROKEN_SHARE * (record["images"] + record["broken"])
    ]
    return max(complete, key=lambda record: record[metric])
