"""How long the trainers take to know all images of a data set of ImageNet's size, at the first start and later.

    python -m runs.bench.listing                          all forms, in a temporary folder
    python -m runs.bench.listing --folder out/listing     kept there, and taken from there the next time

The images are empty and named as ImageNet's: listing reads names, and of tars headers and labels. Parquet files are of
the Hub's form, which `hf:` reads. The first start has no kept list (deit_gka/README.md, Images) or, of parquet files,
no copy of the `datasets` library, a later one has. All was written or read just before, so the operating system's cache
is warm; a cold disk adds its own time. Appends a line for each: medians of wall and processor time.
"""

import io
import os
import shutil
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

import datasets
import torch

from deit_gka.data.sources import kept, open_source
from trainkit_gka.cli import Count, run
from trainkit_gka.results import append_result

FILE = "listing.jsonl"
CLASSES = 1000
FORMS = ("class folders", "tars", PARQUET := "parquet files")


@dataclass
class ListingConfig:
    """Measure how long listing the images of a data set takes, with and without a kept list."""

    images: Count = 1_281_167
    """Images of the training split (ImageNet's by default), over a thousand classes or tars."""
    forms: list[Literal[FORMS]] = field(default_factory=lambda: list(FORMS))
    """What they lie in."""
    rounds: Count = 3
    """Starts of each kind; the median counts."""
    folder: Path | None = None
    """Where to write them and to leave them; empty = a temporary folder."""
    results: Path = Path("runs/results") / FILE
    """File of the JSON lines."""


def main(config: ListingConfig) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        for form in config.forms:
            root = (config.folder or Path(temporary)) / f"{form.replace(' ', '-')}-{config.images}"
            if not (root / "written").exists():
                print(f"writing {config.images:,} images as {form}", flush=True)
                WRITERS[form](root / "train", shares(config.images))
                (root / "written").touch()
                time.sleep(kept.SETTLED)  # a list of what has just changed is not kept
            os.environ["GKA_CACHE_DIR"] = cache = str(Path(temporary) / "cache")
            datasets.config.HF_DATASETS_CACHE = Path(cache) / "datasets"
            measured = {"first": [], "later": []}
            for _ in range(config.rounds):
                shutil.rmtree(cache, ignore_errors=True)
                for times in measured.values():
                    times.append(timed(f"hf:{root}" if form == PARQUET else str(root), config.images))
            for start, times in measured.items():
                wall, processor = (median(values) for values in zip(*times))
                settings = {"form": form, "images": config.images, "start": start, "page_cache": "warm"}
                metrics = {"seconds": wall, "processor_seconds": processor, "rounds": config.rounds}
                append_result(config.results, "listing", settings, metrics, torch.device("cpu"))
                print(f"{form}, {start} start: {wall:.2f} s, {processor:.2f} s of processor time", flush=True)


def timed(data: str, images: int) -> tuple[float, float]:
    """Seconds, and seconds of the processor, that opening the training split takes."""
    started = time.perf_counter(), time.process_time()
    source = open_source(data, "train")
    taken = time.perf_counter() - started[0], time.process_time() - started[1]
    assert len(source) == images, f"{data} has {len(source):,} images, not {images:,}: delete it"
    return taken


def shares(images: int) -> list[int]:
    """How many images each class folder or tar has."""
    count = min(CLASSES, images)
    return [images // count + (number < images % count) for number in range(count)]


def write_folders(folder: Path, counts: list[int]) -> None:
    """Empty images in class folders, named as ImageNet's."""
    for number, count in enumerate(counts):
        name = f"n{number:08d}"
        (folder / name).mkdir(parents=True, exist_ok=True)
        for image in range(count):
            os.close(os.open(folder / name / f"{name}_{image}.JPEG", os.O_CREAT | os.O_WRONLY, 0o644))


def write_tars(folder: Path, counts: list[int]) -> None:
    """Tars of empty images and labels. All of one size are copies, as only their names and labels are read."""
    folder.mkdir(parents=True, exist_ok=True)
    originals: dict[int, Path] = {}
    for number, count in enumerate(counts):
        path = folder / f"train-{number:04d}.tar"
        if count in originals:
            shutil.copyfile(originals[count], path)
            continue
        originals[count] = path
        with tarfile.open(path, "w") as tar:
            for image in range(count):
                for name, data in ((f"{image:08d}.jpg", b""), (f"{image:08d}.cls", str(image % CLASSES).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def write_parquet(folder: Path, counts: list[int]) -> None:
    """Parquet files of empty images and labels, one for ten classes."""
    folder.mkdir(parents=True, exist_ok=True)
    datasets.disable_progress_bars()  # one for each file
    labels = datasets.ClassLabel(names=[f"n{number:08d}" for number in range(len(counts))])
    features = datasets.Features(image=datasets.Image(), label=labels)
    for first in range(0, len(counts), 10):
        classes = [number for number in range(first, min(first + 10, len(counts))) for _ in range(counts[number])]
        names = [f"n{number:08d}_{image}.JPEG" for image, number in enumerate(classes)]
        images = [{"bytes": b"", "path": name} for name in names]
        rows = datasets.Dataset.from_dict(dict(image=images, label=classes), features)
        rows.to_parquet(folder / f"train-{first // 10:05d}.parquet")


WRITERS = dict(zip(FORMS, (write_folders, write_tars, write_parquet), strict=True))

if __name__ == "__main__":
    run(main, ListingConfig)
