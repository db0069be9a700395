"""Measure the methods of the paper's Table 1 side by side: cost, speed, memory, digits, language.

python -m runs.neighbours                              everything; what is in the results is not measured again
python -m runs.neighbours --what digits --seeds 2      a part
python -m runs.neighbours --what speed --tokens 2048   on a quiet machine
"""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runs.demo import language
from runs.neighbours import speed, trainings
from runs.neighbours.layers import ABOUT, DIM, HEADS, check_names
from runs.neighbours.rows import Rows
from trainkit_gka import cli
from trainkit_gka.cli import Count
from trainkit_gka.progress import console

Part = Literal["speed", "memory", "digits", "language"]
SEEDS = {"digits": 5, "language": 3}


@dataclass
class NeighboursConfig:
    """Measure the methods of the paper's Table 1 beside softmax, VLT and GKA.

    A row that is in the results is not measured again.
    """

    what: list[Part] = field(default_factory=lambda: ["speed", "memory", "digits", "language"])
    """What to measure."""
    methods: list[str] = field(default_factory=list)
    """Names of methods; none takes all of them."""
    tokens: list[int] = field(default_factory=lambda: [197, 2048, 8192, 16384])
    """Lengths of the sequences for speed and memory."""
    rounds: Count = 5
    """Turns that every method gets at every length."""
    seeds: int = 0
    """Trainings of each method; 0 takes five for digits and three for language."""
    epochs: Count = 50
    """Epochs of each vision model."""
    steps: Count = trainings.STEPS
    """Steps of each language model."""
    packed: Path = Path("out/neighbours/text/packed")
    """Folder of packed rows for language; missing ones are made of the demo's text."""
    out: Path = Path("out/neighbours")
    """Folder for what the trainings write."""
    results: Path = Path("runs/results/neighbours")
    """Folder of the results, a file of JSON lines for each part."""
    device_type: Literal["cpu"] = "cpu"
    """Device to measure on."""


LAYER = {"batch": 1, "dim": DIM, "heads": HEADS}


def measure_speed(config: NeighboursConfig, rows: Rows) -> None:
    for tokens in config.tokens:
        names = [name for name in check_names(config.methods) if not rows.has(method=name, tokens=tokens)]
        measured = speed.time_layers(names, tokens, config.rounds) if names else {}
        for name, metrics in measured.items():
            rows.add(metrics, {**LAYER, "turns_with": names}, method=name, tokens=tokens)


def measure_memory(config: NeighboursConfig, rows: Rows) -> None:
    for tokens, name in itertools.product(config.tokens, check_names(config.methods)):
        if not rows.has(method=name, tokens=tokens):
            rows.add(speed.measure_peak(name, tokens), LAYER, method=name, tokens=tokens)


def measure_digits(config: NeighboursConfig, rows: Rows) -> None:
    for seed, name in itertools.product(range(config.seeds or SEEDS["digits"]), check_names(config.methods)):
        case = {"method": name, "seed": seed, "epochs": config.epochs}
        if not rows.has(**case):
            trained = trainings.method_on_digits(name, seed, config.epochs, config.out)
            if trained is None:
                return
            settings, numbers = trained
            rows.add(numbers, settings, **case)


def measure_language(config: NeighboursConfig, rows: Rows) -> None:
    if not config.packed.exists():
        language.prepare(config.packed.parent)
    names = [name for name in check_names(config.methods) if ABOUT[name].causal]
    for seed, name in itertools.product(range(config.seeds or SEEDS["language"]), names):
        case = {"method": name, "seed": seed, "steps": config.steps}
        if not rows.has(**case):
            settings, numbers = trainings.method_on_text(name, seed, config.steps, config.packed, config.out)
            rows.add(numbers, settings, **case)


MEASURE = {
    "speed": measure_speed,
    "memory": measure_memory,
    "digits": measure_digits,
    "language": measure_language,
}


def main(config: NeighboursConfig) -> None:
    check_names(config.methods)
    for part in config.what:
        rows = Rows(config.results / f"{part}.jsonl", f"neighbours-{part}")
        MEASURE[part](config, rows)
        if not rows.added:
            console.print(f"{part}: nothing new; rows that {rows.path} has are not measured again", highlight=False)


if __name__ == "__main__":
    cli.run(main, NeighboursConfig)
