"""The demo's vision half: softmax, VLT and GKA micro-ViTs on scikit-learn's handwritten digits, two seeds each, side by side.

Every run is the trainer's own command. It reports accuracy on the third of the digits that is held out, and draws learned bandwidths and CLS attention.
"""

import json
import statistics
from pathlib import Path

import torch
from rich.table import Table

from deit_gka.data.sources import decode, open_source
from deit_gka.data.transforms import eval_transform
from deit_gka.figures.cls_attention import draw_cls_attention
from deit_gka.model.checkpoints import find_checkpoint, load_run
from deit_gka.train import FINISH_KEYS
from runs.demo.commands import START_SECONDS, Job
from runs.demo.report import plot_bandwidths
from trainkit.progress import console
from trainkit.results import read_results

SEEDS = (0, 1)
EXPECTED_TOP1 = 95.0
MODELS = {"softmax": "deit_tiny_patch16_224", "VLT": "deit_tiny_vlt_patch16_224", "GKA": "deit_tiny_gka_patch16_224"}
SIZE, BATCH = 16, 32
SECONDS_PER_EPOCH = 0.9  # on one core of two; it starts the estimate of what is left
HEADINGS = ("parameters", "FLOPs/image", "top-1 %", "EMA top-1 %", "train img/s")
# Tiny models on tiny images need none of the recipe's augmentation; the rate is 1e-3 at this batch (runs/LOG.md).
FLAGS = [
    "--model-kwargs", "patch_size=4", "embed_dim=64", "depth=4", "num_heads=4", "--data", "digits", "--input-size", SIZE, "--batch-size", BATCH,
    "--lr", 1e-3 * 1024 / BATCH, "--hflip", 0, "--aa", "", "--reprob", 0, "--repeated-aug", 1, "--mixup", 0, "--cutmix", 0, "--scale", 1, 1,
    "--ratio", 1, 1, "--crop-pct", 1, "--drop-path", 0, "--model-ema-decay", 0.99, "--eval-every", 10, "--save-every", 300, "--log-every", 37,
    "--num-workers", 0, "--device-type", "cpu",
]  # fmt: skip


def jobs(out: Path, epochs: int, wandb: str) -> list[tuple[str, Job]]:
    """(label, the command that trains this model), seed by seed."""
    steps = epochs * (len(open_source("digits", "train")) // BATCH)
    found = []
    for seed in SEEDS:
        for label, model in MODELS.items():
            tag = f"digits-{label.lower()}-{epochs}-seed{seed}"
            flags = ["--model", model, "--model-tag", tag, "--epochs", epochs, "--warmup-epochs", min(5, epochs), "--seed", seed, *FLAGS,
                     "--out", out / "runs", "--results", out / "train_deit.jsonl", "--wandb", wandb]  # fmt: skip
            name = f"digits, {label}, seed {seed}"
            found.append((label, Job(name, "deit_gka.train", flags, out / "runs" / tag, steps, START_SECONDS + SECONDS_PER_EPOCH * epochs,
                                    finish_keys=(*FINISH_KEYS, "ema_top1"))))  # fmt: skip
    return found


def rows_of(jobs: list[tuple[str, Job]]) -> dict[str, list[dict]]:
    """Label -> the `finish` records of its seeds, each with its run folder."""
    rows: dict[str, list[dict]] = {label: [] for label in MODELS}
    for label, job in jobs:
        rows[label].append({**job.finish(), "folder": job.folder})
    return rows


def show(rows: dict[str, list[dict]]) -> None:
    """Print the table: the mean over seeds, and half their range."""
    table = Table(title=f"\nMicro-ViTs on held-out handwritten digits, {len(SEEDS)} seeds: mean ± half the range")
    table.add_column("")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for label, records in rows.items():
        table.add_row(label, *cells(records))
    console.print(table)
    for label, records in rows.items():
        lowest = min(record["ema_top1"] for record in records)
        if lowest < EXPECTED_TOP1:
            console.print(
                f"note: {label} reached {lowest:.1f} % with one seed; the full demo is expected to reach {EXPECTED_TOP1:.0f} %"
            )


def cells(records: list[dict]) -> list[str]:
    """A model's cells, from its seeds' numbers."""

    def spread(key: str, form: str) -> str:
        values = [record[key] for record in records]
        return f"{statistics.fmean(values):{form}} ±{(max(values) - min(values)) / 2:{form}}"

    first = records[0]
    return [
        f"{first['parameters']:,}",
        f"{first['flops']:.3e}",
        spread("top1", ".2f"),
        spread("ema_top1", ".2f"),
        spread("images_per_second", ",.0f"),
    ]


def draw(rows: dict[str, list[dict]], out: Path) -> list[Path]:
    """Learned bandwidths of GKA's seeds, and what every model's CLS token looks at. Returns the files."""
    sigma = {f"GKA on digits, seed {seed}": list(record["sigma"].values()) for seed, record in zip(SEEDS, rows["GKA"])}
    source, transform = open_source("digits", "val"), eval_transform(SIZE, 1.0)
    first: dict[int, int] = {}
    for index in range(len(source)):
        first.setdefault(source.read(index)[1], index)
    images = torch.stack([transform(decode(source.read(first[label])[0])) for label in sorted(first)])
    models = {label: load_run(find_checkpoint(records[0]["folder"]), "ema", "cpu") for label, records in rows.items()}
    return [
        plot_bandwidths(sigma, out / "digits_bandwidths.png"),
        draw_cls_attention(models, images, out / "digits_cls_attention.png", titles=source.classes),
    ]


def write_results(rows: dict[str, list[dict]], trained: Path, results: Path) -> None:
    """Write the runs' records, with their labels, to `results`."""
    records = {record["config"].get("model_tag"): record for record in read_results(trained)}
    results.parent.mkdir(parents=True, exist_ok=True)
    with open(results, "w") as file:
        for label, finishes in rows.items():
            for finish in finishes:
                file.write(json.dumps({**records[finish["folder"].name], "label": label}) + "\n")
