"""The paper's experiments in miniature, on real data, without GPU or network: language models on text, vision
transformers on digits.

    make demo            (python -m runs.demo)

It runs the commands a full run would (corpus, tokenizer, pack, train, evaluate), prints each, then the paper's tables
beside ours. Everything is reused the second time; an interrupted demo continues where it stopped.
"""

import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runs.demo import language, vision
from runs.demo.length import choose_length
from runs.jobs import Job, run_side_by_side
from trainkit_gka import cli
from trainkit_gka.cli import Count, CountOrAutomatic
from trainkit_gka.progress import console
from trainkit_gka.results import read_results
from trainkit_gka.workers import cores


@dataclass
class DemoConfig:
    """Train softmax, GKA as the paper has it and our GKA with head offsets on real text, and one vision transformer of
    every kind on digits. Print the paper's tables in miniature."""

    out: Path = Path("out/demo")
    """Folder for everything the demo makes; delete it to start over."""
    steps: CountOrAutomatic = -1
    """Training steps of 2,048 tokens for each language model; -1 = 400, or what takes about five minutes here."""
    depth: Count = language.DEPTH
    """Layers of the language models; the width follows."""
    ranks: Count = 1
    """Processes for each language model."""
    epochs: CountOrAutomatic = -1
    """Epochs for each vision model; -1 = 50, or what takes about five minutes here."""
    parts: list[Literal["language", "vision"]] = field(default_factory=lambda: ["language", "vision"])
    """Which halves to run."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Log to Weights & Biases."""
    results: Path | None = None
    """Also write the results to this folder: demo.jsonl and demo_vision.jsonl (the READMEs' tables come from
    runs/results)."""


def run_all(config: DemoConfig) -> list[Path]:
    """Prepare, train, sample, show; what exists already is reused. Returns the pictures."""
    out, texts, digits = config.out, {}, {}
    at_once = max(1, cores() // config.ranks)
    if "language" in config.parts:
        announce("documents, tokenizer and rows")
        language.prepare(out)
    steps, epochs = lengths(config, at_once)
    if "language" in config.parts:
        texts = language.train_jobs(out, config.depth, steps, config.ranks, config.wandb)
    if "vision" in config.parts:
        digits = vision.train_jobs(out, epochs, config.wandb)
    training = [*texts.values(), *itertools.chain(*digits.values())]
    untrained = [job for job in training if not job.finish()]
    if len(untrained) < len(training):
        console.print(f"\n{len(training) - len(untrained)} of {len(training)} models are trained already")
    for stage, jobs in (("training", untrained), ("text from the language models", language.sample_jobs(texts))):
        if jobs:
            announce(stage)
            run_side_by_side(jobs, at_once)
        if not all(job.finish() for job in training):  # Ctrl-C reached a trainer alone: it has saved and left
            raise KeyboardInterrupt
    announce("tables and pictures")
    pictures = language.show(texts, out) if texts else []
    pictures += vision.show(digits, out) if digits else []
    if config.results:
        seeds = {label: [job] for label, job in texts.items()}
        write_results(seeds, out / "train.jsonl", config.results / "demo.jsonl")
        write_results(digits, out / "train_deit.jsonl", config.results / "demo_vision.jsonl")
    return pictures


def lengths(config: DemoConfig, at_once: int) -> tuple[int, int]:
    """Steps of the language models and epochs of the vision models: the flags', else what this machine can do."""
    if "language" not in config.parts:
        return language.STEPS, vision.EPOCHS if config.epochs < 0 else config.epochs
    if config.steps > 0 and (config.epochs > 0 or "vision" not in config.parts):
        return config.steps, config.epochs
    announce("timing of a few steps")
    chosen = choose_length(config.out, config.depth, config.ranks, at_once, config.parts)
    return chosen.steps if config.steps < 0 else config.steps, chosen.epochs if config.epochs < 0 else config.epochs


def announce(stage: str) -> None:
    """Print the name of the stage that begins."""
    console.print(f"\n== {stage}", style="bold", highlight=False, markup=False)


def write_results(jobs: dict[str, list[Job]], trained: Path, results: Path) -> None:
    """Write the runs' records out of the file `trained`, with their labels, to `results`; no file without jobs."""
    records = {record["config"].get("model_tag"): record for record in read_results(trained)}
    lines = [{**records[job.folder.name], "label": label} for label, seeds in jobs.items() for job in seeds]
    if lines:
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main(config: DemoConfig) -> None:
    started = time.perf_counter()
    pictures = run_all(config)
    minutes, seconds = divmod(round(time.perf_counter() - started), 60)
    console.print(
        f"\nPictures: {', '.join(map(str, pictures))}. Logs and checkpoints: {config.out / 'runs'}. "
        f"{minutes} min {seconds:02d} s in all."
    )


if __name__ == "__main__":
    cli.run(main, DemoConfig)
