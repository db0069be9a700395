"""The paper's experiments in miniature, on real data, without GPU or network: language models on text, vision
transformers on digits.

    make demo            (python -m runs.demo)

It runs the commands a full run would (corpus, tokenizer, pack, train, evaluate), prints each, then the paper's tables
beside ours. Everything is reused the second time; an interrupted demo continues where it stopped.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runs.demo import language, vision
from runs.demo.commands import expected_seconds, run_side_by_side
from runs.demo.outlook import Outlook
from trainkit_gka import cli
from trainkit_gka.cli import Count
from trainkit_gka.progress import console
from trainkit_gka.workers import cores

# The stages, as the demo announces them.
PREPARE = "documents, tokenizer and rows"
TRAIN = "training"
SAMPLE = "text from the language models"
SHOW = "tables and pictures"
PREPARE_SECONDS, SHOW_SECONDS = 12.0, 8.0


@dataclass
class DemoConfig:
    """Train softmax, GKA as the paper has it and our GKA with head offsets on real text, and one vision transformer of
    every kind on digits. Print the paper's tables in miniature."""

    out: Path = Path("out/demo")
    """Folder for everything the demo makes; delete it to start over."""
    steps: Count = language.STEPS
    """Training steps of 2,048 tokens for each language model."""
    depth: Count = language.DEPTH
    """Layers of the language models; the width follows."""
    ranks: Count = 1
    """Processes for each language model."""
    epochs: Count = 50
    """Epochs for each vision model."""
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
    if "language" in config.parts:
        texts = language.train_jobs(out, config.depth, config.steps, config.ranks, config.wandb)
    if "vision" in config.parts:
        digits = vision.train_jobs(out, config.epochs, config.wandb)
    training = [*texts.values(), *(job for jobs in digits.values() for job in jobs)]
    untrained = [job for job in training if not job.finish()]
    sampling = language.sample_jobs(texts)
    at_once = max(1, cores() // config.ranks)
    stages = {
        PREPARE: PREPARE_SECONDS if texts else 0.0,
        TRAIN: expected_seconds(untrained, at_once),
        SAMPLE: expected_seconds(sampling, at_once),
        SHOW: SHOW_SECONDS,
    }
    outlook = Outlook({stage: seconds for stage, seconds in stages.items() if seconds})
    if texts:
        with outlook.during(PREPARE):
            language.prepare(out)
    if len(untrained) < len(training):
        console.print(f"\n{len(training) - len(untrained)} of {len(training)} models are trained already")
    for stage, jobs in ((TRAIN, untrained), (SAMPLE, sampling)):
        if jobs:
            with outlook.during(stage):
                run_side_by_side(jobs, at_once, outlook)
        if not all(job.finish() for job in training):  # Ctrl-C reached a trainer alone: it has saved and left
            raise KeyboardInterrupt
    pictures = []
    with outlook.during(SHOW):
        if texts:
            pictures += language.show(texts, out)
        if digits:
            pictures += vision.show(digits, out)
    if config.results:
        if texts:
            language.write_results(texts, out / "train.jsonl", config.results / "demo.jsonl")
        if digits:
            vision.write_results(digits, out / "train_deit.jsonl", config.results / "demo_vision.jsonl")
    return pictures


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
