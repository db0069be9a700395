"""How long the demo trains: it times a few steps of both halves on this machine and keeps to about five minutes."""

import shutil
import statistics
from pathlib import Path
from typing import NamedTuple

from runs.demo import language, vision
from runs.jobs import START_SECONDS, run_side_by_side
from trainkit_gka.files import read_json, write_json
from trainkit_gka.progress import console

GOAL_SECONDS = 300.0
OTHER_SECONDS = 45.0  # documents, tokenizer, rows, timing, tables and pictures
EVALUATING_STEPS = 50  # that the evaluations of a language model take as long as
TIMED_STEPS = 20
FILE = "length.json"


class Length(NamedTuple):
    """How many steps each language model takes, and how many epochs each vision model."""

    steps: int
    epochs: int


def choose_length(out: Path, depth: int, ranks: int, at_once: int, parts: list[str]) -> Length:
    """The length that an earlier start chose for this folder, or one that takes about five minutes here.

    Models train for a few steps, as many side by side as later. Where a step takes longer, all models get fewer steps
    and epochs.
    """
    path = out / FILE
    if path.exists():
        return Length(**read_json(path, "the demo's length"))
    folder = out / "timing"
    jobs = language.timing_jobs(out, folder, depth, TIMED_STEPS, ranks, at_once)
    images = [vision.timing_job(folder)] if "vision" in parts else []
    run_side_by_side([*jobs[:1], *images, *jobs[1:]], at_once)  # so that images are not timed alone
    step = statistics.fmean(language.STEP_TOKENS / job.finish()["tokens_per_second"] for job in jobs)
    epochs = [vision.num_images() / job.finish()["images_per_second"] for job in images]
    shutil.rmtree(folder)
    factor = step / (language.SECONDS_PER_STEP * depth / language.DEPTH)
    models = len(language.VARIANTS)
    fixed = models * (step * EVALUATING_STEPS + factor * (START_SECONDS + language.SECONDS_PER_SAMPLE))
    work = models * step * language.STEPS
    for epoch in epochs:
        fixed += factor * vision.MODELS * START_SECONDS
        work += vision.MODELS * epoch * vision.EPOCHS
    fixed, work = OTHER_SECONDS + fixed / at_once, work / at_once
    share = min(1.0, max(0.1, (GOAL_SECONDS - fixed) / work))
    length = Length(_rounded(share * language.STEPS, 20), _rounded(share * vision.EPOCHS, 5))
    minutes = (fixed + share * work) / 60
    console.print(
        f"{step:.2f} s for a step here: {length.steps} steps and {length.epochs} epochs, which takes about "
        f"{minutes:.0f} minutes (the usual length is {language.STEPS} and {vision.EPOCHS}; --steps and --epochs fix it)"
    )
    write_json(path, length._asdict())
    return length


def _rounded(number: float, multiple: int) -> int:
    return max(multiple, round(number / multiple) * multiple)
