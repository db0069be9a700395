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

from gka.runtime import cli
from gka.runtime.cli import UserError
from gka.runtime.progress import console, read_lines
from runs import demo_report, demo_vision
from runs.commands import run

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
    "gka-offsets": ("GKA + offsets (ours)", ["--attention", "gka", "--head-offsets", "PS", "--gka-values", "normalised"]),
}
PROMPTS = ["The ", "Return the ", "If the "]


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
    run("nanochat_gka.pack", "--corpus", out / "corpus", "--tokenizer", out / "tokenizer", "--out", out / "packed", "--sequence-len", SEQUENCE_LEN)
    return out / "packed"


def run_tag(name: str, depth: int = DEPTH, steps: int = STEPS) -> str:
    """What a variant's run is called."""
    return f"d{depth}-{name}-{steps}"


def train(config: DemoConfig, packed: Path, name: str) -> Path:
    """Train one variant; returns its run folder."""
    tag = run_tag(name, config.depth, config.steps)
    flags = [word for key, value in TRAIN_FLAGS.items() for word in (f"--{key}", value)]
    run("nanochat_gka.train", "--data", packed, "--out", config.out / "runs", "--results", config.out / "train.jsonl", "--model-tag", tag,
        "--depth", config.depth, "--num-iterations", config.steps, *VARIANTS[name][1], *flags, "--wandb", config.wandb, ranks=config.ranks)  # fmt: skip
    return config.out / "runs" / tag


def sample(run_folder: Path) -> dict[str, str]:
    """One continuation of every prompt."""
    results = run_folder / "samples.jsonl"
    if not results.exists():
        run("nanochat_gka.evaluate", "--run", run_folder, "--eval", "sample", "--prompt", *PROMPTS, "--max-tokens", 40, "--device-type", "cpu",
            "--results", results)  # fmt: skip
    return {prompt: texts[0] for prompt, texts in read_lines(results)[-1]["metrics"]["samples"].items()}


def language(config: DemoConfig) -> list[Path]:
    """The language models; returns the pictures."""
    packed = prepare(config.out)
    rows, samples = {}, {}
    for name, (label, _) in VARIANTS.items():
        folder = train(config, packed, name)
        finish = [record for record in read_lines(folder / "log.jsonl") if record["event"] == "finish"]
        if not finish:  # Ctrl-C reached the trainer alone: it has saved and left
            raise KeyboardInterrupt
        rows[label] = {**finish[-1], "log": folder / "log.jsonl"}
        samples[label] = sample(folder)
    demo_report.show(rows, samples)
    if config.results:
        trained = {record["config"]["model_tag"]: record for record in read_lines(config.out / "train.jsonl")}
        config.results.mkdir(parents=True, exist_ok=True)
        with open(config.results / "demo.jsonl", "w") as file:
            for name, (label, _) in VARIANTS.items():
                file.write(json.dumps({**trained[run_tag(name, config.depth, config.steps)], "label": label}) + "\n")
    return demo_report.plot(rows, config.out)


def vision(config: DemoConfig) -> list[Path]:
    """The vision models; returns the pictures."""
    rows = demo_vision.train(config.out, config.epochs, config.wandb)
    demo_vision.show(rows)
    if config.results:
        demo_vision.write_results(rows, config.out / "train_deit.jsonl", config.results / "demo_vision.jsonl")
    return demo_vision.draw(rows, config.out)


def main(config: DemoConfig) -> None:
    for key in ("steps", "depth", "ranks", "epochs"):
        if getattr(config, key) < 1:
            raise UserError(f"--{key} must be at least 1, got {getattr(config, key)}")
    started = time.perf_counter()
    pictures = [picture for part in dict.fromkeys(config.parts) for picture in {"language": language, "vision": vision}[part](config)]
    console.print(
        f"\nPictures: {', '.join(map(str, pictures))}. Logs and checkpoints: {config.out / 'runs'}. {time.perf_counter() - started:.0f} s in all."
    )


if __name__ == "__main__":
    cli.run(main, DemoConfig)
