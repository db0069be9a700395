"""The demo's language half: softmax, GKA and GKA with head offsets on the built-in corpus.

Every step is the command that a full run would take: corpus, tokenizer, pack, train, evaluate.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gka.kinds import KINDS
from nanochat_gka.train import Trainer
from runs.demo import pictures, report
from runs.demo.jobs import START_SECONDS, Job, run
from trainkit_gka.results import read_results

VOCAB, SEQUENCE_LEN, STEP_TOKENS = 2048, 256, 2048
DEPTH, STEPS = 4, 400
# nanochat's rule would shrink the rates 16-fold at this batch. These undo that, times the 2 at which the softmax
# baseline is best (runs/log/2026-11-21-learning-rates-of-the-demo.md).
TRAIN_FLAGS = {
    "aspect-ratio": 32,
    "head-dim": 32,
    "total-batch-size": STEP_TOKENS,
    "device-batch-size": 8,
    "matrix-lr": 0.64,
    "embedding-lr": 9.6,
    "unembedding-lr": 0.128,
    "scalar-lr": 16.0,
    "sigma-lr": 0.08,
    "eval-every": 200,
    "eval-tokens": 51200,
    "sample-every": -1,
    "save-every": 100,
    "log-every": 20,
    "device-type": "cpu",
}
PROMPTS = ["The ", "Return the ", "If the "]
SAMPLE_FLAGS = {"max-tokens": 40, "temperature": 0.8, "unconditioned": 0, "device-type": "cpu"}
SAMPLES = "samples.jsonl"
# Of a language model on one core of two; they start the estimate of what is left.
SECONDS_PER_STEP, SECONDS_PER_SAMPLE = 0.29, 9.0


@dataclass(frozen=True)
class Variant:
    """A model of the demo: what tables call it, and the trainer's flags that make it."""

    label: str
    flags: tuple[str, ...]


# The keys are in the runs' folder names. "gka-paper" is the paper's form, section 5.1; a folder called "gka" is of an
# older demo, which mixed values before rotation. GKA + offsets is not the paper's: keys and values one token apart, a
# fixed case of KV shifting attention (arXiv 2411.19574), and values before rotation, which suit it better. Softmax
# gains from such offsets too.
VARIANTS = {
    "softmax": Variant(KINDS["softmax"].label, ("--attention", "softmax")),
    "gka-paper": Variant(KINDS["gka"].label, ("--attention", "gka")),
    "gka-offsets": Variant(
        f"{KINDS['gka'].label} + offsets",
        ("--attention", "gka", "--head-offsets", "PS", "--gka-values", "normalised"),
    ),
}


def run_tag(name: str, depth: int = DEPTH, steps: int = STEPS) -> str:
    """What a variant's run is called."""
    return f"d{depth}-{name}-{steps}"


def words(flags: dict[str, Any]) -> list[Any]:
    """A dictionary of flags as words of a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def prepare(out: Path) -> None:
    """Make the corpus, the tokenizer and the packed rows in `out`."""
    corpus, tokenizer, packed = out / "corpus", out / "tokenizer", out / "packed"
    rows = ["--sequence-len", SEQUENCE_LEN, "--split-documents", "no"]  # as runs/results has them
    run("nanochat_gka.corpus", ["--source", "builtin", "--out", corpus])
    run("nanochat_gka.tokenizer", ["--corpus", corpus, "--out", tokenizer, "--vocab-size", VOCAB])
    run("nanochat_gka.pack", ["--corpus", corpus, "--tokenizer", tokenizer, *rows, "--out", packed])


def train_jobs(out: Path, depth: int, steps: int, ranks: int, wandb: str) -> dict[str, Job]:
    """Label -> the command that trains this language model."""
    jobs = {}
    for name, variant in VARIANTS.items():
        tag = run_tag(name, depth, steps)
        places = ["--data", out / "packed", "--out", out / "runs", "--results", out / "train.jsonl"]
        shape = ["--model-tag", tag, "--depth", depth, "--num-iterations", steps]
        jobs[variant.label] = Job(
            name=variant.label,
            module="nanochat_gka.train",
            flags=[*places, *shape, *variant.flags, *words(TRAIN_FLAGS), "--wandb", wandb],
            folder=out / "runs" / tag,
            steps=steps,
            seconds=START_SECONDS + SECONDS_PER_STEP * steps * depth / DEPTH,
            ranks=ranks,
            finish_keys=Trainer.FINISH_KEYS,
        )
    return jobs


def timing_jobs(out: Path, folder: Path, depth: int, steps: int, ranks: int, count: int) -> list[Job]:
    """The commands that train `count` models for some steps, to see how long a step takes with all of them at work."""
    places = ["--data", out / "packed", "--out", folder, "--results", folder / "timed.jsonl"]
    shape = ["--depth", depth, "--num-iterations", steps]
    flags = words({**TRAIN_FLAGS, "eval-tokens": STEP_TOKENS, "log-every": steps})
    return [
        Job(
            name=f"timing {number}",
            module="nanochat_gka.train",
            flags=[*places, "--model-tag", f"timing-{number}", *shape, *variant.flags, *flags],
            folder=folder / f"timing-{number}",
            steps=steps,
            ranks=ranks,
        )
        for number, variant in zip(range(count), itertools.cycle(VARIANTS.values()))
    ]


def sample_jobs(trained: dict[str, Job]) -> list[Job]:
    """The commands that continue the prompts, for the models that have no samples yet."""
    flags = ["--eval", "sample", "--prompt", *PROMPTS, *words(SAMPLE_FLAGS)]
    return [
        Job(
            name=f"text by {label}",
            module="nanochat_gka.evaluate",
            flags=["--run", job.folder, *flags, "--results", job.folder / SAMPLES],
            folder=job.folder / "text",  # not the run's, whose log counts the training's steps
            steps=1,
            seconds=SECONDS_PER_SAMPLE,
        )
        for label, job in trained.items()
        if not read_results(job.folder / SAMPLES, "samples")
    ]


def show(jobs: dict[str, Job], out: Path) -> list[Path]:
    """Print the tables and the texts; returns the pictures."""
    rows = {label: {**job.finish(), "log": job.folder / "log.jsonl"} for label, job in jobs.items()}
    texts = {}
    for label, job in jobs.items():
        samples = read_results(job.folder / SAMPLES, "samples")[-1]["metrics"]["samples"]
        texts[label] = {prompt: continuations[0] for prompt, continuations in samples.items()}
    report.show(rows, texts)
    drawn = [pictures.draw_losses(rows, out / "loss_curves.png")]
    sigma = {label: list(row["sigma"].values()) for label, row in rows.items() if row["sigma"]}
    if sigma:
        drawn.append(pictures.draw_bandwidths(sigma, out / "bandwidths.png"))
    return drawn
