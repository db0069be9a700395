"""The main experiment in miniature, on real text, without GPU or network: softmax, GKA as the paper has it, and GKA with head offsets.

    make demo            (python -m runs.demo)

It runs the commands a full run would (corpus, tokenizer, pack, train, evaluate), prints each, then the paper's tables beside ours.
Everything is reused the second time; an interrupted demo continues where it stopped.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from gka.runtime.progress import console, read_lines
from runs import demo_report

VOCAB, SEQUENCE_LEN = 2048, 256
TOKENS_PER_STEP = 2048
# nanochat's rule would shrink the rates 16-fold at this batch; these undo it, times the 2 at which the softmax baseline is best (runs/LOG.md).
TRAIN_FLAGS = {
    "depth": 4, "aspect-ratio": 32, "head-dim": 32, "total-batch-size": TOKENS_PER_STEP, "device-batch-size": 8,
    "matrix-lr": 0.64, "embedding-lr": 9.6, "unembedding-lr": 0.128, "scalar-lr": 16.0, "sigma-lr": 0.08,
    "eval-every": 200, "eval-tokens": 51200, "sample-every": -1, "save-every": 100, "log-every": 20, "device-type": "cpu",
}  # fmt: skip
VARIANTS = {
    "softmax": ("softmax", ["--attention", "softmax"]),
    "gka": ("GKA", ["--attention", "gka"]),
    "gka-offsets": ("GKA + offsets", ["--attention", "gka", "--head-offsets", "PS"]),
}
PROMPTS = ["The ", "Return the ", "If the "]


def run(module: str, *flags) -> None:
    """Run one of the project's commands, showing it; leave with its exit code if it fails."""
    words = [module, *map(str, flags)]
    console.print(f"\n$ python -m {' '.join(words)}", style="bold", highlight=False, markup=False)
    code = subprocess.run([sys.executable, "-m", *words]).returncode
    if code:
        sys.exit(code)


def prepare(out: Path) -> Path:
    """Corpus, tokenizer and packed rows; returns the folder of rows."""
    run("nanochat_gka.corpus", "--source", "builtin", "--out", out / "corpus")
    run("nanochat_gka.tokenizer", "--corpus", out / "corpus", "--out", out / "tokenizer", "--vocab-size", VOCAB)
    run("nanochat_gka.pack", "--corpus", out / "corpus", "--tokenizer", out / "tokenizer", "--out", out / "packed", "--sequence-len", SEQUENCE_LEN)
    return out / "packed"


def train(out: Path, packed: Path, name: str, steps: int) -> Path:
    """Train one variant, then sample from it; returns its run folder."""
    tag = f"{name}-{steps}"
    flags = [word for key, value in TRAIN_FLAGS.items() for word in (f"--{key}", value)]
    run("nanochat_gka.train", "--data", packed, "--out", out / "runs", "--results", out / "train.jsonl", "--model-tag", tag, "--num-iterations", steps,
        *VARIANTS[name][1], *flags)  # fmt: skip
    return out / "runs" / tag


def sample(out: Path, run_folder: Path) -> dict[str, str]:
    """One continuation of every prompt."""
    results = run_folder / "samples.jsonl"
    if not results.exists():
        run("nanochat_gka.evaluate", "--run", run_folder, "--eval", "sample", "--prompt", *PROMPTS, "--max-tokens", 40, "--device-type", "cpu",
            "--results", results)  # fmt: skip
    return {prompt: texts[0] for prompt, texts in read_lines(results)[-1]["metrics"]["samples"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for everything the demo makes; delete it to start over")
    parser.add_argument("--steps", type=int, default=400, help=f"training steps of {TOKENS_PER_STEP} tokens for each model")
    parser.add_argument(
        "--results", type=Path, help="also append the three results to this file (the README's table comes from runs/results/demo.jsonl)"
    )
    config = parser.parse_args()
    if config.steps < 1:
        parser.error(f"--steps must be at least 1, got {config.steps}")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")

    started = time.perf_counter()
    packed = prepare(config.out)
    rows, samples = {}, {}
    for name, (label, _) in VARIANTS.items():
        folder = train(config.out, packed, name, config.steps)
        finish = next(record for record in reversed(read_lines(folder / "log.jsonl")) if record["event"] == "finish")
        rows[label] = {**finish, "log": folder / "log.jsonl"}
        samples[label] = sample(config.out, folder)
    demo_report.show(rows, samples)
    pictures = demo_report.plot(rows, config.out)
    if config.results:
        trained = {record["config"]["model_tag"]: record for record in read_lines(config.out / "train.jsonl")}
        config.results.parent.mkdir(parents=True, exist_ok=True)
        with open(config.results, "a") as file:
            for name, (label, _) in VARIANTS.items():
                file.write(json.dumps({**trained[f"{name}-{config.steps}"], "label": label}) + "\n")
    console.print(
        f"\nPictures: {', '.join(map(str, pictures))}. Logs and checkpoints: {config.out / 'runs'}. {time.perf_counter() - started:.0f} s in all."
    )


if __name__ == "__main__":
    main()
