"""The paper's experiments in miniature, on real data, without GPU or network: language models on text, vision transformers on digits.

    make demo            (python -m runs.demo)

It runs the commands a full run would (corpus, tokenizer, pack, train, evaluate), prints each, then the paper's tables beside ours.
Everything is reused the second time; an interrupted demo continues where it stopped.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nanochat_gka.train import Trainer
from runs.demo import report as demo_report
from runs.demo import vision as demo_vision
from runs.demo.commands import START_SECONDS, Job, expected_seconds, run, run_side_by_side
from runs.demo.outlook import Outlook
from trainkit import cli
from trainkit.cli import UserError
from trainkit.progress import console
from trainkit.results import read_results
from trainkit.workers import cores

VOCAB, SEQUENCE_LEN = 2048, 256
DEPTH, STEPS = 4, 400
# nanochat's rule would shrink the rates 16-fold at this batch; these undo it, times the 2 at which the softmax baseline is best (runs/LOG.md).
TRAIN_FLAGS = {
    "aspect-ratio": 32, "head-dim": 32, "total-batch-size": 2048, "device-batch-size": 8,
    "matrix-lr": 0.64, "embedding-lr": 9.6, "unembedding-lr": 0.128, "scalar-lr": 16.0, "sigma-lr": 0.08,
    "eval-every": 200, "eval-tokens": 51200, "sample-every": -1, "save-every": 100, "log-every": 20, "device-type": "cpu",
}  # fmt: skip
# What the runs' folders are called, what tables call them, and their flags. GKA is the paper's form, section 5.1 ("gka"
# was values before rotation, and such folders may still lie about). GKA + offsets is ours: keys and values one token
# apart, a fixed case of KV shifting attention (arXiv 2411.19574), in an operator without projections, and values before
# rotation, which suit it better. Softmax gains from such offsets too.
VARIANTS = {
    "softmax": ("softmax", ["--attention", "softmax"]),
    "gka-paper": ("GKA", ["--attention", "gka"]),
    "gka-offsets": (
        "GKA + offsets (ours)",
        ["--attention", "gka", "--head-offsets", "PS", "--gka-values", "normalised"],
    ),
}
PROMPTS = ["The ", "Return the ", "If the "]
SAMPLES = "samples.jsonl"
PREPARE, TRAIN, SAMPLE, SHOW = (
    "documents, tokenizer and rows",
    "training",
    "text from the language models",
    "tables and pictures",
)
SECONDS_PER_STEP, SECONDS_PER_SAMPLE = (
    0.29,
    9.0,
)  # of a language model on one core of two; they start the estimate of what is left


@dataclass
class DemoConfig:
    """Train softmax, GKA as the paper has it and our GKA with head offsets on real text, and softmax, VLT and GKA on
    digits; print the paper's tables in miniature."""

    out: Path = Path("out/demo")
    """folder for everything the demo makes; delete it to start over"""
    steps: int = STEPS
    """training steps of 2,048 tokens for each language model"""
    depth: int = DEPTH
    """layers of the language models; the width follows"""
    ranks: int = 1
    """processes for each language model"""
    epochs: int = 50
    """epochs for each vision model"""
    parts: list[Literal["language", "vision"]] = field(default_factory=lambda: ["language", "vision"])
    """what to train"""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases"""
    results: Path | None = None
    """also write the results to this folder: demo.jsonl and demo_vision.jsonl (the README's tables come from runs/results)"""


def prepare(out: Path) -> Path:
    """Corpus, tokenizer and packed rows; returns the folder of rows."""
    run("nanochat_gka.corpus", "--source", "builtin", "--out", out / "corpus")
    run("nanochat_gka.tokenizer", "--corpus", out / "corpus", "--out", out / "tokenizer", "--vocab-size", VOCAB)
    run(
        "nanochat_gka.pack",
        "--corpus",
        out / "corpus",
        "--tokenizer",
        out / "tokenizer",
        "--out",
        out / "packed",
        "--sequence-len",
        SEQUENCE_LEN,
    )
    return out / "packed"


def run_tag(name: str, depth: int = DEPTH, steps: int = STEPS) -> str:
    """What a variant's run is called."""
    return f"d{depth}-{name}-{steps}"


def language_jobs(config: DemoConfig) -> dict[str, Job]:
    """Label -> the command that trains this language model."""
    flags = [word for key, value in TRAIN_FLAGS.items() for word in (f"--{key}", value)]
    jobs = {}
    for name, (label, own_flags) in VARIANTS.items():
        tag = run_tag(name, config.depth, config.steps)
        command = ["--data", config.out / "packed", "--out", config.out / "runs", "--results", config.out / "train.jsonl", "--model-tag", tag,
                   "--depth", config.depth, "--num-iterations", config.steps, *own_flags, *flags, "--wandb", config.wandb]  # fmt: skip
        jobs[label] = Job(label, "nanochat_gka.train", command, config.out / "runs" / tag, config.steps,
                          START_SECONDS + SECONDS_PER_STEP * config.steps * config.depth / DEPTH, config.ranks, Trainer.FINISH_KEYS)  # fmt: skip
    return jobs


def sample_jobs(trained: dict[str, Job]) -> list[Job]:
    """The commands that continue the prompts, for the models that have no samples yet."""
    flags = [
        "--eval",
        "sample",
        "--prompt",
        *PROMPTS,
        "--max-tokens",
        40,
        "--temperature",
        0.8,
        "--unconditioned",
        0,
        "--device-type",
        "cpu",
    ]
    # Their folder is not the run's, whose log is of steps long done.
    return [Job(f"text by {label}", "nanochat_gka.evaluate",
                ["--run", job.folder, *flags, "--results", job.folder / SAMPLES],
                job.folder / "text", 1, SECONDS_PER_SAMPLE)
            for label, job in trained.items() if not read_results(job.folder / SAMPLES, "samples")]  # fmt: skip


def show_language(config: DemoConfig, jobs: dict[str, Job]) -> list[Path]:
    """Print the tables and texts, write the results; returns the pictures."""
    rows = {label: {**job.finish(), "log": job.folder / "log.jsonl"} for label, job in jobs.items()}
    texts = {
        label: read_results(job.folder / SAMPLES, "samples")[-1]["metrics"]["samples"] for label, job in jobs.items()
    }
    demo_report.show(
        rows, {label: {prompt: found[0] for prompt, found in samples.items()} for label, samples in texts.items()}
    )
    if config.results:
        trained = {record["config"].get("model_tag"): record for record in read_results(config.out / "train.jsonl")}
        config.results.mkdir(parents=True, exist_ok=True)
        with open(config.results / "demo.jsonl", "w") as file:
            for label, job in jobs.items():
                file.write(json.dumps({**trained[job.folder.name], "label": label}) + "\n")
    return demo_report.plot(rows, config.out)


def show_vision(config: DemoConfig, jobs: list[tuple[str, Job]]) -> list[Path]:
    """The same of the vision models."""
    rows = demo_vision.rows_of(jobs)
    demo_vision.show(rows)
    if config.results:
        demo_vision.write_results(rows, config.out / "train_deit.jsonl", config.results / "demo_vision.jsonl")
    return demo_vision.draw(rows, config.out)


def run_all(config: DemoConfig) -> list[Path]:
    """Prepare, train, sample, show; what is there already is reused. Returns the pictures."""
    parts = set(config.parts)
    texts = language_jobs(config) if "language" in parts else {}
    digits = demo_vision.jobs(config.out, config.epochs, config.wandb) if "vision" in parts else []
    training = [*texts.values(), *(job for _, job in digits)]
    todo = [job for job in training if not job.finish()]
    sampling = sample_jobs(texts)
    at_once = max(1, cores() // config.ranks)
    stages = {
        PREPARE: 12.0 if texts else 0.0,
        TRAIN: expected_seconds(todo, at_once),
        SAMPLE: expected_seconds(sampling, at_once),
        SHOW: 8.0,
    }
    outlook = Outlook({stage: seconds for stage, seconds in stages.items() if seconds})
    if PREPARE in outlook.expected:
        with outlook.during(PREPARE):
            prepare(config.out)
    if len(todo) < len(training):
        console.print(f"\n{len(training) - len(todo)} of {len(training)} models are trained already")
    for stage, jobs in ((TRAIN, todo), (SAMPLE, sampling)):
        if jobs:
            with outlook.during(stage):
                run_side_by_side(jobs, at_once, outlook)
        if not all(job.finish() for job in training):  # Ctrl-C reached a trainer alone: it has saved and left
            raise KeyboardInterrupt
    with outlook.during(SHOW):
        return [*(show_language(config, texts) if texts else []), *(show_vision(config, digits) if digits else [])]


def main(config: DemoConfig) -> None:
    for key in ("steps", "depth", "ranks", "epochs"):
        if getattr(config, key) < 1:
            raise UserError(f"--{key} must be at least 1, got {getattr(config, key)}")
    started = time.perf_counter()
    pictures = run_all(config)
    minutes, seconds = divmod(round(time.perf_counter() - started), 60)
    console.print(
        f"\nPictures: {', '.join(map(str, pictures))}. Logs and checkpoints: {config.out / 'runs'}. {minutes} min {seconds:02d} s in all."
    )


if __name__ == "__main__":
    cli.run(main, DemoConfig)
