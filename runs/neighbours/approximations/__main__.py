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
from typing import Annotated, Any, Literal

import torch

from runs.bench.measurement import Plan
from runs.neighbours.approximations import rows, training
from runs.neighbours.approximations.case import random_case
from runs.neighbours.approximations.forms import FORMS
from runs.neighbours.approximations.measure import CPU, EXACT, Truth, time_in_turns
from runs.neighbours.approximations.pictures import draw
from runs.neighbours.approximations.rows import FUSED, Approximations
from runs.neighbours.approximations.sources import RANDOM, case_of
from trainkit_gka.cli import Bounds, Count, UserError, run
from trainkit_gka.progress import console
from trainkit_gka.results import append_line, append_result, read_results

RUNS = [Path("out/demo/runs") / name for name in ("d4-gka-paper-400", "d4-gka-offsets-400", "digits-gka-50-seed0")]
KIND = "approximation"


@dataclass
class ApproximationsConfig:
    """Measure approximations of Gaussian kernel attention. What the file of the results has is not measured again."""

    parts: list[Literal["errors", "time", "picture", "training"]] = field(default_factory=lambda: ["errors"])
    """What to do: errors against the float64 oracle, time and memory (on a quiet machine), the picture of both,
    trainings with the best forms beside the exact operator."""
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
    """Time exact fused attention and fused softmax attention in turns with the forms; train with exact attention."""
    rounds: Annotated[int, Bounds(1)] = 5
    """Timed rounds."""
    warmup: Annotated[int, Bounds(0)] = 1
    """Rounds before them that are not timed."""
    threads: Annotated[int, Bounds(0)] = 0
    """Threads; 0 leaves torch's own number."""
    nice: Annotated[int, Bounds(0, 19)] = 0
    """How far other programs go first."""
    tasks: list[training.Task] = field(default_factory=lambda: list(training.TRAIN))
    """What is trained."""
    epochs: Count = 12
    """Epochs of each vision model."""
    steps: Count = 300
    """Steps of each language model."""
    out: Path = Path("out/neighbours")
    """Folder for what the trainings write."""
    results: Path = Path("runs/results/neighbours/approximations.jsonl")
    """File of the results."""
    pictures: Path = Path("runs/results/pictures")
    """Folder of the picture."""


class Results:
    """The file of the results, and what it has."""

    def __init__(self, path: Path):
        self.path = path
        self.record: dict[str, Any] = {}  # the first of this process; asking git for every one takes longest of all
        self.rows = {key_of(record["config"]) for record in read_results(path)}

    def has(self, config: dict[str, Any]) -> bool:
        return key_of(config) in self.rows

    def add(self, config: dict[str, Any], metrics: dict[str, Any]) -> None:
        if self.record:
            append_line(self.path, {**self.record, "config": config, "metrics": metrics})
        else:
            self.record = append_result(self.path, KIND, config, metrics, CPU)
        self.rows.add(key_of(config))
        told = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, (int, float)))
        console.print(f"{' '.join(str(value) for value in config.values())}: {told}", highlight=False, markup=False)


def key_of(config: dict[str, Any]) -> tuple:
    return tuple(sorted((name, str(value)) for name, value in config.items()))


def grid(config: ApproximationsConfig, tokens: int) -> list[tuple[str, int]]:
    """Forms and sizes that fit a number of tokens."""
    sizes = [size for size in config.sizes if size <= tokens]
    return [(name, size) for name in config.forms for size in FORMS[name].sizes or sizes]


@torch.inference_mode()
def measure_errors(config: ApproximationsConfig, results: Results) -> None:
    """A row for every source, length, form, size and seed, and one for the fused operator itself."""
    for source in (*(RANDOM if config.random else ()), *map(str, config.run)):
        label = source if source in RANDOM else Path(source).name
        for tokens in config.lengths:
            left = []
            for name, size in [(FUSED, 0), *grid(config, tokens)]:
                seeds = range(config.seeds if name in FORMS and FORMS[name].random else 1)
                wanted = [dict(part="error", source=label, tokens=tokens, form=name, size=size, seed=s) for s in seeds]
                left += [row for row in wanted if not results.has(row)]
            if not left:
                continue
            case = case_of(source, tokens)
            truth, sigma = Truth(case), case.sigma.square().tolist()
            for row in left:
                if row["form"] == FUSED:
                    results.add(row, {**truth.errors(case.fused()), "causal": case.causal, "sigma_squared": sigma})
                else:
                    results.add(row, truth.judge(FORMS[row["form"]](case, row["size"], row["seed"], truth.places)))


def measure_time(config: ApproximationsConfig, results: Results) -> None:
    """A row for every length, form and size: one batch, 3 heads of 64 channels, random features, all in turns.

    Exact attention is timed again beside what is left, so that ratios are of one process, which `group` names.
    """
    for tokens in config.lengths:
        left = [key for key in grid(config, tokens) if not results.has(timed(tokens, config.causal, *key))]
        chosen = [(name, 0) for name in EXACT if config.exact] + left
        if not left:
            continue
        case, plan = random_case(tokens, config.causal, seed=0), Plan(rounds=config.rounds, warmup=config.warmup)
        group = uuid.uuid4().hex[:12]
        for key, metrics in time_in_turns(case, chosen, 0, plan).items():
            results.add(timed(tokens, config.causal, *key), {**metrics, "group": group})


def measure_training(config: ApproximationsConfig, results: Results) -> None:
    """A row for every task, seed and form, the exact operator's first."""
    forms = [rows.EXACT] * config.exact + [form for form in rows.APPROXIMATE if form in config.forms]
    for task, seed, form in itertools.product(config.tasks, range(config.seeds), forms):
        length = config.epochs if task == "digits" else config.steps
        row = dict(part="training", task=task, form=form, seed=seed, length=length)
        if results.has(row):
            continue
        numbers = training.TRAIN[task](form, seed, length, config.out)
        if numbers is None:
            return
        results.add(row, numbers)


def timed(tokens: int, causal: bool, form: str, size: int) -> dict[str, Any]:
    """The configuration of a row of time."""
    return dict(part="time", tokens=tokens, causal=causal, form=form, size=size)


def main(config: ApproximationsConfig) -> None:
    unknown = [name for name in config.forms if name not in FORMS]
    if unknown:
        raise UserError(f"--forms {unknown[0]}: the forms are {', '.join(FORMS)}")
    os.nice(config.nice)
    if config.threads:
        torch.set_num_threads(config.threads)
    results = Results(config.results)
    if "errors" in config.parts:
        measure_errors(config, results)
    if "time" in config.parts:
        measure_time(config, results)
    if "training" in config.parts:
        measure_training(config, results)
    if "picture" in config.parts:
        config.pictures.mkdir(parents=True, exist_ok=True)
        figure = draw(Approximations.read(config.results), config.pictures)
        console.print(f"drew {figure.path}" if figure else "nothing to draw: not run", highlight=False)


if __name__ == "__main__":
    run(main, ApproximationsConfig)
