"""Measure approximations of GKA: errors on the features of trained models, time and memory against N, the picture.

python -m runs.neighbours.approximations                                         errors; the models are the demo's
python -m runs.neighbours.approximations --parts time --lengths 16384            on a quiet machine
python -m runs.neighbours.approximations --parts picture
"""

import itertools
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch

from runs.bench.measurement import Plan
from runs.neighbours.approximations.case import random_case
from runs.neighbours.approximations.forms import FORMS
from runs.neighbours.approximations.measure import EXACT, FUSED, Truth, time_in_turns
from runs.neighbours.approximations.picture import draw
from runs.neighbours.approximations.sources import RANDOM, case_of
from runs.neighbours.cases import Cases
from trainkit_gka.cli import Bounds, UserError, run
from trainkit_gka.progress import console

RUNS = [Path("out/demo/runs") / name for name in ("d4-gka-paper-400", "d4-gka-offsets-400", "digits-gka-50-seed0")]


@dataclass
class ApproximationsConfig:
    """Measure approximations of Gaussian kernel attention. What the file of the results has is not measured again."""

    parts: list[Literal["errors", "time", "picture"]] = field(default_factory=lambda: ["errors"])
    """What to do: errors against the float64 oracle, time and memory (on a quiet machine), the picture of both."""
    run: list[Path] = field(default_factory=lambda: list(RUNS))
    """Folders of trained runs, whose features and bandwidths are taken; random features are measured beside them."""
    random: bool = True
    """Measure random features too."""
    forms: list[str] = field(default_factory=lambda: list(FORMS))
    """Names of the forms to measure."""
    lengths: list[int] = field(default_factory=lambda: [1024])
    """Numbers of tokens."""
    sizes: list[int] = field(default_factory=lambda: [64, 256, 1024])
    """Numbers of features, landmarks or keys; those above the number of tokens are left out."""
    seeds: Annotated[int, Bounds(1)] = 2
    """Seeds of directions and landmarks, from 0. Time is measured with the first."""
    causal: bool = True
    """Whether the random features that are timed have a causal mask."""
    exact: bool = True
    """Time exact fused attention and fused softmax attention in turns with the forms."""
    rounds: Annotated[int, Bounds(1)] = 5
    """Timed rounds."""
    warmup: Annotated[int, Bounds(0)] = 1
    """Rounds before them that are not timed."""
    threads: Annotated[int, Bounds(0)] = 0
    """Threads; 0 leaves torch's own number."""
    nice: Annotated[int, Bounds(0, 19)] = 0
    """How far other programs go first."""
    results: Path = Path("runs/results/neighbours/approximations.jsonl")
    """File of the results."""
    pictures: Path = Path("runs/results/pictures")
    """Folder of the picture."""


def grid(config: ApproximationsConfig, tokens: int) -> list[tuple[str, int]]:
    """Forms and sizes that fit a number of tokens."""
    sizes = [size for size in config.sizes if size <= tokens]
    return [(name, size) for name in config.forms for size in FORMS[name].sizes or sizes]


@torch.inference_mode()
def measure_errors(config: ApproximationsConfig, cases: Cases) -> None:
    """A row for every source, length, form, size and seed, and one for the fused operator itself."""
    sources = [*(RANDOM if config.random else ()), *map(str, config.run)]
    for source, tokens in itertools.product(sources, config.lengths):
        about = dict(part="error", source=source if source in RANDOM else Path(source).name, tokens=tokens)
        wanted = [dict(about, form=FUSED, size=0, seed=0)]
        for name, size in grid(config, tokens):
            seeds = range(config.seeds if FORMS[name].random else 1)
            wanted += [dict(about, form=name, size=size, seed=seed) for seed in seeds]
        left = [case for case in wanted if not cases.has(case)]
        truth = Truth(case_of(source, tokens)) if left else None
        cases.fill(left, lambda case, truth=truth: ({}, truth.of_form(case["form"], case["size"], case["seed"])))


def measure_time(config: ApproximationsConfig, cases: Cases) -> None:
    """A row for every length, form and size: one batch, 3 heads of 64 channels, random features, all in turns.

    Exact attention is timed again beside what is left, so that ratios are of one process, which `group` names.
    """
    plan = Plan(rounds=config.rounds, warmup=config.warmup)
    for tokens in config.lengths:

        def case(name: str, size: int, tokens: int = tokens) -> dict:
            return dict(part="time", tokens=tokens, causal=config.causal, form=name, size=size)

        left = [pair for pair in grid(config, tokens) if not cases.has(case(*pair))]
        if left:
            chosen, group = [(name, 0) for name in EXACT if config.exact] + left, uuid.uuid4().hex[:12]
            for pair, numbers in time_in_turns(random_case(tokens, config.causal, seed=0), chosen, plan).items():
                cases.append(case(*pair), {}, {**numbers, "group": group})


def draw_picture(config: ApproximationsConfig, cases: Cases) -> None:
    config.pictures.mkdir(parents=True, exist_ok=True)
    figure = draw(cases.path, config.pictures)
    console.print(f"drew {figure.path}" if figure else "nothing to draw: not run", highlight=False)


PARTS = {"errors": measure_errors, "time": measure_time, "picture": draw_picture}


def main(config: ApproximationsConfig) -> None:
    unknown = [name for name in config.forms if name not in FORMS]
    if unknown:
        raise UserError(f"--forms {unknown[0]}: the forms are {', '.join(FORMS)}")
    os.nice(config.nice)
    if config.threads:
        torch.set_num_threads(config.threads)
    cases = Cases(config.results, "approximation")
    for part, work in PARTS.items():
        if part in config.parts:
            work(config, cases)


if __name__ == "__main__":
    run(main, ApproximationsConfig)
