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
from runs.neighbours.cases import Cases
from runs.neighbours.layers import ABOUT, DIM, HEADS, check_names
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


LAYER = {"batch": 1, "dim": DIM, "heads": HEADS}


def measure_speed(config: NeighboursConfig, cases: Cases) -> None:
    """All methods that have no row at a length take turns."""
    for tokens in config.tokens:
        wanted = ({"method": name, "tokens": tokens} for name in check_names(config.methods))
        left = {case["method"]: case for case in wanted if not cases.has(case)}
        measured = speed.time_layers(list(left), tokens, config.rounds) if left else {}
        for name, numbers in measured.items():
            cases.append(left[name], {**LAYER, "turns_with": list(left)}, numbers)


def measure_memory(config: NeighboursConfig, cases: Cases) -> None:
    pairs = itertools.product(config.tokens, check_names(config.methods))
    wanted = [{"method": name, "tokens": tokens} for tokens, name in pairs]
    cases.fill(wanted, lambda case: (LAYER, speed.measure_peak(**case)))


def measure_digits(config: NeighboursConfig, cases: Cases) -> None:
    pairs = itertools.product(range(config.seeds or SEEDS["digits"]), check_names(config.methods))
    wanted = [{"method": name, "seed": seed, "epochs": config.epochs} for seed, name in pairs]
    cases.fill(wanted, lambda case: trainings.method_on_digits(**case, out=config.out))


def measure_language(config: NeighboursConfig, cases: Cases) -> None:
    if not config.packed.exists():
        language.prepare(config.packed.parent)
    names = [name for name in check_names(config.methods) if ABOUT[name].causal]
    pairs = itertools.product(range(config.seeds or SEEDS["language"]), names)
    wanted = [{"method": name, "seed": seed, "steps": config.steps} for seed, name in pairs]
    cases.fill(wanted, lambda case: trainings.method_on_text(**case, packed=config.packed, out=config.out))


MEASURE = {
    "speed": measure_speed,
    "memory": measure_memory,
    "digits": measure_digits,
    "language": measure_language,
}


def main(config: NeighboursConfig) -> None:
    check_names(config.methods)
    for part in config.what:
        cases = Cases(config.results / f"{part}.jsonl", f"neighbours-{part}")
        MEASURE[part](config, cases)
        if not cases.added:
            console.print(f"{part}: nothing new; rows that {cases.path} has are not measured again", highlight=False)


if __name__ == "__main__":
    cli.run(main, NeighboursConfig)
