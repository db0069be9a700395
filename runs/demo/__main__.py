"""The paper's experiments in miniature, on real data, without GPU or network: language models on text, vision
transformers on digits.

    make demo            (python -m runs.demo)

It runs the commands a full run would (corpus, tokenizer, pack, train, evaluate), prints each, then the paper's tables
beside ours. Everything is reused the second time; an interrupted demo continues where it stopped.
"""

import itertools
import json
import shutil
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runs.demo import language, vision
from runs.jobs import START_SECONDS, Job, SideBySide
from trainkit_gka import cli
from trainkit_gka.cli import Count, CountOrAutomatic
from trainkit_gka.files import read_json, write_json
from trainkit_gka.progress import console
from trainkit_gka.results import read_results
from trainkit_gka.workers import cores

GOAL_SECONDS = 300.0
OTHER_SECONDS = 45.0  # documents, tokenizer, rows, timing, tables and pictures
EVALUATING_STEPS = 50  # that the evaluations of a language model take as long as
TIMED_STEPS = 20
FILE = "length.json"


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


def run_all(config: DemoConfig) -> None:
    """Prepare, train, sample, show; what exists already is reused."""
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
            SideBySide(jobs, at_once).run()
        if not all(job.finish() for job in training):  # Ctrl-C reached a trainer alone: it has saved and left
            raise KeyboardInterrupt
    announce("tables and pictures")
    if texts:
        language.show(texts, out)
    if digits:
        vision.show(digits, out)
    if config.results:
        seeds = {label: [job] for label, job in texts.items()}
        write_results(seeds, out / "train.jsonl", config.results / "demo.jsonl")
        write_results(digits, out / "train_deit.jsonl", config.results / "demo_vision.jsonl")


def lengths(config: DemoConfig, at_once: int) -> tuple[int, int]:
    """Steps of the language models and epochs of the vision models: the flags', else what this machine can do."""
    steps, epochs = language.STEPS, vision.EPOCHS
    both_given = config.steps > 0 and (config.epochs > 0 or "vision" not in config.parts)
    if "language" in config.parts and not both_given:
        announce("timing of a few steps")
        steps, epochs = choose_length(config.out, config.depth, config.ranks, at_once, config.parts)
    return steps if config.steps < 0 else config.steps, epochs if config.epochs < 0 else config.epochs


def choose_length(out: Path, depth: int, ranks: int, at_once: int, parts: list[str]) -> tuple[int, int]:
    """The steps and epochs that an earlier start chose for this folder, or those that take about five minutes here.

    Language models train for a few steps, as many side by side as later. Where a step takes longer, all models get
    fewer steps and epochs.
    """
    path = out / FILE
    if path.exists():
        length = read_json(path, "the demo's length")
        return length["steps"], length["epochs"]
    folder = out / "timing"
    jobs = language.timing_jobs(out, folder, depth, TIMED_STEPS, ranks, at_once)
    SideBySide(jobs, at_once).run()
    step = statistics.fmean(language.STEP_TOKENS / job.finish()["tokens_per_second"] for job in jobs)
    shutil.rmtree(folder)
    slower = step / (language.SECONDS_PER_STEP * depth / language.DEPTH)  # than the machine of the constants
    models = len(language.VARIANTS)
    fixed = models * (step * EVALUATING_STEPS + slower * (START_SECONDS + language.SECONDS_PER_SAMPLE))
    work = models * step * language.STEPS
    if "vision" in parts:
        fixed += vision.MODELS * slower * START_SECONDS
        work += vision.MODELS * slower * vision.SECONDS_PER_EPOCH * vision.EPOCHS
    fixed, work = OTHER_SECONDS + fixed / at_once, work / at_once
    share = min(1.0, max(0.1, (GOAL_SECONDS - fixed) / work))
    steps = 20 * max(1, round(share * language.STEPS / 20))
    epochs = 5 * max(1, round(share * vision.EPOCHS / 5))
    minutes = (fixed + share * work) / 60
    console.print(
        f"{step:.2f} s for a step here: {steps} steps and {epochs} epochs, which takes about {minutes:.0f} minutes "
        f"(the usual length is {language.STEPS} and {vision.EPOCHS}; --steps and --epochs fix it)"
    )
    write_json(path, {"steps": steps, "epochs": epochs})
    return steps, epochs


def announce(stage: str) -> None:
    """Print the name of the stage that begins."""
    console.print(f"\n== {stage}", style="bold", highlight=False, markup=False)


def write_results(jobs: dict[str, list[Job]], trained: Path, results: Path) -> None:
    """Write the runs' records out of the file `trained`, with their labels, to `results`; no file without jobs."""
    records = {record["config"].get("model_tag"): record for record in read_results(trained)}
    lines = [{**records[job.folder.name], "label": label} for label, seeds in jobs.items() for job in seeds]
    if lines:
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main(config: DemoConfig) -> None:
    started = time.perf_counter()
    run_all(config)
    minutes, seconds = divmod(round(time.perf_counter() - started), 60)
    console.print(f"\nLogs and checkpoints: {config.out / 'runs'}. {minutes} min {seconds:02d} s in all.")


if __name__ == "__main__":
    cli.run(main, DemoConfig)
