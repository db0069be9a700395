"""The demo's language half: softmax, GKA and GKA with head offsets on the built-in corpus.

Every step is the command that a full run would take: corpus, tokenizer, pack, train, evaluate.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gka.kinds import KINDS
from nanochat_gka import draw
from nanochat_gka.train import Trainer
from nanochat_gka.training.bits_per_byte import remarks
from runs.jobs import START_SECONDS, Job, run
from runs.looks import LOOKS, legend, panels, save
from runs.paper import published
from runs.table import Table
from trainkit_gka.progress import console, read_events
from trainkit_gka.results import read_results

VOCAB, SEQUENCE_LEN, STEP_TOKENS = 2048, 256, 2048
DEPTH, STEPS = 4, 400
# nanochat's rule would shrink the rates 16-fold at this batch. These undo that, times the 2 at which the softmax
# baseline is best (runs/log/2026-11-21-learning-rates-of-the-demo.md).
MODEL_FLAGS = ["--aspect-ratio", 32, "--head-dim", 32, "--total-batch-size", STEP_TOKENS, "--device-batch-size", 8]
RATE_FLAGS = ["--matrix-lr", 0.64, "--embedding-lr", 9.6, "--unembedding-lr", 0.128, "--scalar-lr", 16.0]
RATE_FLAGS += ["--sigma-lr", 0.08]
REPORT_FLAGS = ["--eval-tokens", 51200, "--log-every", 20]
PACE_FLAGS = ["--eval-every", 200, "--sample-every", -1, "--save-every", 100, "--device-type", "cpu"]
PROMPTS = ["The ", "Return the ", "If the "]
SAMPLE_FLAGS = ["--max-tokens", 40, "--temperature", 0.8, "--unconditioned", 0, "--device-type", "cpu"]
SAMPLES = "samples.jsonl"
COLUMNS = {  # of a table of language models: heading and format
    "parameters": ("parameters", "{:,}"),
    "flops_per_token": ("FLOPs/token", "{:.3e}"),
    "train_tokens": ("tokens", "{:.3e}"),
    "train_flops": ("total FLOPs", "{:.3e}"),
    "train_bpb": ("train BPB", "{:.4f}"),
    "val_bpb": ("val BPB", "{:.4f}"),
    "gap": ("val - train", "{:.4f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}
OFFSETS_NOTE = (
    "GKA is the paper's form. Offsets pair key and value one token apart, a fixed case of KV shifting attention "
    "(arXiv 2411.19574); softmax gains from that too, and has none here."
)
# Of a language model on one core of two; they start the estimate of what is left.
SECONDS_PER_STEP, SECONDS_PER_SAMPLE = 0.29, 9.0


class Variant(NamedTuple):
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
        ("--attention", "gka", "--head-offsets", "PS", "--gka-values", "unrotated"),
    ),
}


def run_tag(name: str, depth: int = DEPTH, steps: int = STEPS) -> str:
    """What a variant's run is called."""
    return f"d{depth}-{name}-{steps}"


def prepare(out: Path) -> None:
    """Make the corpus, the tokenizer and the packed rows in `out`."""
    corpus, tokenizer, packed = out / "corpus", out / "tokenizer", out / "packed"
    rows = ["--sequence-len", SEQUENCE_LEN, "--split-documents", "no"]  # as runs/results has them
    run("nanochat_gka.corpus", ["--source", "builtin", "--out", corpus])
    run("nanochat_gka.tokenizer", ["--corpus", corpus, "--out", tokenizer, "--vocab-size", VOCAB])
    run("nanochat_gka.pack", ["--corpus", corpus, "--tokenizer", tokenizer, *rows, "--out", packed])


def train_job(out: Path, place: Path, variant: Variant, tag: str, depth: int, steps: int, *more: Any) -> Job:
    """The command that trains a language model on the rows in `out`, with its run in `place`. more: flags."""
    flags = ["--data", out / "packed", "--out", place, "--model-tag", tag, "--depth", depth, "--num-iterations", steps]
    return Job(
        name=variant.label,
        module="nanochat_gka.train",
        flags=[*flags, *MODEL_FLAGS, *RATE_FLAGS, *PACE_FLAGS, *more, *variant.flags],
        folder=place / tag,
        steps=steps,
        cost=START_SECONDS + SECONDS_PER_STEP * steps * depth / DEPTH,
        finish_keys=Trainer.FINISH_KEYS,
    )


def train_jobs(out: Path, depth: int, steps: int, ranks: int, wandb: str) -> dict[str, Job]:
    """Label -> the command that trains this language model."""
    more = *REPORT_FLAGS, "--results", out / "train.jsonl", "--wandb", wandb
    jobs = [
        train_job(out, out / "runs", v, run_tag(name, depth, steps), depth, steps, *more)
        for name, v in VARIANTS.items()
    ]
    return {job.name: replace(job, ranks=ranks) for job in jobs}


def timing_jobs(out: Path, folder: Path, depth: int, steps: int, ranks: int, count: int) -> list[Job]:
    """The commands that train `count` models for some steps, to see how long a step takes with all of them at work."""
    brief = "--eval-tokens", STEP_TOKENS, "--log-every", steps, "--results", folder / "timed.jsonl"
    chosen = zip(range(count), itertools.cycle(VARIANTS.values()))
    jobs = [train_job(out, folder, variant, f"timing-{n}", depth, steps, *brief) for n, variant in chosen]
    return [replace(job, name=job.folder.name, ranks=ranks, cost=1.0) for job in jobs]


def sample_jobs(trained: dict[str, Job]) -> list[Job]:
    """The commands that continue the prompts, for the models that have no samples yet."""
    flags = ["--eval", "sample", "--prompt", *PROMPTS, *SAMPLE_FLAGS]
    return [
        Job(
            name=f"text by {label}",
            module="nanochat_gka.evaluate",
            flags=["--run", job.folder, *flags, "--results", job.folder / SAMPLES],
            folder=job.folder / "text",  # not the run's, whose log counts the training's steps
            steps=1,
            cost=SECONDS_PER_SAMPLE,
        )
        for label, job in trained.items()
        if not read_results(job.folder / SAMPLES, "samples")
    ]


def show(jobs: dict[str, Job], out: Path) -> None:
    """Print the table and the texts; draw the losses, and the bandwidths over training."""
    rows = {label: {**job.finish(), "log": job.folder / "log.jsonl"} for label, job in jobs.items()}
    notes = [OFFSETS_NOTE, *remarks(rows)]
    table(rows, title="Measured here, equal tokens for all; then the paper's depth 20, as printed", notes=notes).show()
    for label, job in jobs.items():
        console.rule(f"text by {label}", align="left")
        for prompt, texts in read_results(job.folder / SAMPLES, "samples")[-1]["metrics"]["samples"].items():
            console.print(f"{(prompt + texts[0])!r}", highlight=False, markup=False)
    print(draw_losses(rows, out / "loss_curves.png"))
    ours, *others = (job.folder for label, job in jobs.items() if label != KINDS["softmax"].label)
    draw.main(draw.DrawConfig(run=ours, twin=tuple(others), family=("sigma",), out=out / "figures"))


def draw_losses(rows: dict[str, dict[str, Any]], path: Path) -> Path:
    """Training loss and validation bits per byte over tokens. rows: label -> the run's `finish` record and its log."""
    figure, (losses, bpbs) = panels(1, 2, 3.8)
    for label, row in rows.items():
        millions = row["train_tokens"] / row["step"] / 1e6  # tokens of a step
        train = [(r["step"] * millions, r["smooth_loss"]) for r in read_events(row["log"], "train", "smooth_loss")]
        evaluations = [(r["step"] * millions, r["val_bpb"]) for r in read_events(row["log"], "eval", "val_bpb")]
        style = LOOKS[label]
        losses.plot(*zip(*train), **style(label, marker=None))
        bpbs.plot(*zip(*evaluations), **style(label))
    losses.set(xlabel="training tokens (millions)", ylabel="training loss, nats a token")
    bpbs.set(xlabel="training tokens (millions)", ylabel="validation bits per byte")
    legend(figure, [bpbs], 3)
    return save(figure, "Loss of small language models", path)


def table(records: dict[str, dict[str, Any]], **about: Any) -> Table:
    """A row for each of these models, then the paper's of depth 20 as printed. records: label -> measurements."""
    rows = []
    for label, record in records.items():
        cells = [(form, record[key]) for key, (_, form) in COLUMNS.items()]  # None: too few steps to time
        rows.append([f"**{label}**", *("" if value is None else form.format(value) for form, value in cells)])
    for label, printed in published.LANGUAGE.items():
        figures = [f"*{printed[key]}*" if key in printed else "" for key in COLUMNS]
        rows.append([f"*paper, depth 20: {label}*", *figures])
    return Table.of(["", *(heading for heading, _ in COLUMNS.values())], rows, **about)
