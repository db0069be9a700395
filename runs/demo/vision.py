"""The demo's vision half: a micro-ViT of every kind of attention on scikit-learn's handwritten digits, two seeds each.

Every run is the trainer's own command. The demo reports accuracy on the third of the digits that is held out, and draws
learned bandwidths and what the CLS tokens look at.
"""

import itertools
import statistics
from pathlib import Path
from typing import Any

from deit_gka import draw
from deit_gka.data.sources import open_source
from deit_gka.model.registry import model_name
from deit_gka.train import Trainer
from gka.kinds import KINDS
from runs.jobs import START_SECONDS, Job
from runs.table import Table

SEEDS = (0, 1)
SIZES = ("parameters", "flops")  # equal for all seeds
WARMUP_EPOCHS = 5
IMAGE_SIZE, BATCH_SIZE = 16, 32
EPOCHS, MODELS = 50, len(SEEDS) * len(KINDS)
SECONDS_PER_EPOCH = 0.9  # on one core of two
COLUMNS = {  # of a table of vision models: heading and format
    "parameters": ("parameters", "{:,}"),
    "flops": ("FLOPs/image", "{:.3e}"),
    "top1": ("top-1 %", "{:.2f}"),
    "ema_top1": ("EMA top-1 %", "{:.2f}"),
    "images_per_second": ("train img/s", "{:,.0f}"),
}
# Tiny models on tiny images need none of the recipe's augmentation; the rate is 1e-3 at this batch
# (runs/log/2026-11-21-learning-rate-of-the-digits-demo.md).
MODEL_FLAGS = ["--model-kwargs", "patch_size=4", "embed_dim=64", "depth=4", "num_heads=4"]
DATA_FLAGS = ["--data", "digits", "--input-size", IMAGE_SIZE, "--batch-size", BATCH_SIZE, "--num-workers", 0]
RECIPE_FLAGS = ["--lr", 1e-3 * 1024 / BATCH_SIZE, "--hflip", 0, "--aa", "", "--reprob", 0, "--repeated-aug", 1]
RECIPE_FLAGS += ["--mixup", 0, "--cutmix", 0, "--scale", 1, 1, "--ratio", 1, 1, "--crop-pct", 1, "--drop-path", 0]
RECIPE_FLAGS += ["--model-ema-decay", 0.99]
REPORT_FLAGS = ["--eval-every", 10, "--save-every", 300, "--log-every", 37, "--device-type", "cpu"]
Jobs = dict[str, list[Job]]


def train_jobs(out: Path, epochs: int, wandb: str) -> Jobs:
    """Label -> the commands that train this model, a seed each."""
    images = len(open_source("digits", "train"))
    jobs: Jobs = {kind.label: [] for kind in KINDS.values()}
    for kind, seed in itertools.product(KINDS.values(), SEEDS):
        tag = f"digits-{kind.label.lower()}-{epochs}-seed{seed}"
        flags = ["--model", model_name("tiny", kind.name), "--model-tag", tag, "--seed", seed]
        flags += ["--epochs", epochs, "--warmup-epochs", min(WARMUP_EPOCHS, epochs)]
        flags += [*MODEL_FLAGS, *DATA_FLAGS, *RECIPE_FLAGS, *REPORT_FLAGS]
        job = Job(
            name=f"digits, {kind.label}, seed {seed}",
            module="deit_gka.train",
            flags=[*flags, "--out", out / "runs", "--results", out / "train_deit.jsonl", "--wandb", wandb],
            folder=out / "runs" / tag,
            steps=epochs * (images // BATCH_SIZE),
            cost=START_SECONDS + SECONDS_PER_EPOCH * epochs,
            finish_keys=(*Trainer.FINISH_KEYS, "ema_top1"),
        )
        jobs[kind.label].append(job)
    return jobs


def show(jobs: Jobs, out: Path) -> None:
    """Print the table, the mean over seeds and half their range; draw the bandwidths and the maps of the CLS token."""
    records = {label: [job.finish() for job in seeds] for label, seeds in jobs.items()}
    title = f"Micro-ViTs on held-out handwritten digits, {len(SEEDS)} seeds: mean ± half the range"
    table(records, title=title).show()
    folders = {label: [job.folder for job in seeds] for label, seeds in jobs.items()}
    first, *repeats = folders.pop(KINDS["gka"].label)
    runs = dict(run=first, seeds=tuple(repeats), twin=tuple(seeds[0] for seeds in folders.values()))
    draw.main(draw.DrawConfig(**runs, family=("sigma", "cls_maps"), out=out / "figures"))


def table(records: dict[str, list[dict]], **about: Any) -> Table:
    """A row for each model: its sizes, then the mean over its seeds and half their range.

    records: label -> the measurements of each seed.
    """
    rows = [[f"**{label}**"] for label in records]
    for row, seeds in zip(rows, records.values()):
        for key, (_, form) in COLUMNS.items():
            values = [record[key] for record in seeds if record[key] is not None]
            if not values:  # too few updates to time
                row.append("")
            elif key in SIZES:
                row.append(form.format(values[0]))
            else:
                half = (max(values) - min(values)) / 2
                row.append(f"{form.format(statistics.fmean(values))} ±{form.format(half)}")
    return Table.of(["", *(heading for heading, _ in COLUMNS.values())], rows, **about)
