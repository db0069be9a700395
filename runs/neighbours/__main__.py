"""Measure the methods of the paper's Table 1 side by side: cost, speed, memory, digits, language.

python -m runs.neighbours                              everything; what is in the results is not measured again
python -m runs.neighbours --what digits --seeds 2      a part
python -m runs.neighbours --what speed --tokens 2048   on a quiet machine
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from runs.demo import language
from runs.neighbours import speed, trainings
from runs.neighbours.layers import ABOUT, DIM, HEADS, check_names
from trainkit_gka import cli
from trainkit_gka.cli import Count
from trainkit_gka.progress import console
from trainkit_gka.results import append_result, read_results

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


class Rows:
    """The rows of one part, and where new ones go."""

    def __init__(self, config: NeighboursConfig, part: str):
        self.path, self.part = config.results / f"{part}.jsonl", part
        configs = [line["config"] for line in read_results(self.path)]
        # A language model of another depth is another case; the other parts state no depth.
        current = [config["case"] for config in configs if config.get("depth", trainings.DEPTH) == trainings.DEPTH]
        self.done = {tuple(sorted(case.items())) for case in current}

    def has(self, **case: Any) -> bool:
        return tuple(sorted(case.items())) in self.done

    def add(self, settings: dict[str, Any], metrics: dict[str, Any], **case: Any) -> None:
        about = {**settings, "case": case}
        append_result(self.path, f"neighbours-{self.part}", about, metrics, torch.device("cpu"))
        self.done.add(tuple(sorted(case.items())))


def measure_speed(config: NeighboursConfig) -> None:
    rows = Rows(config, "speed")
    for tokens in config.tokens:
        names = [name for name in check_names(config.methods) if not rows.has(method=name, tokens=tokens)]
        if not names:
            continue
        measured, elsewhere = speed.time_layers(names, tokens, config.rounds)
        for name in names:
            metrics = {**measured[name], "elsewhere": elsewhere}
            rows.add({"batch": 1, "dim": DIM, "heads": HEADS, "turns_with": names}, metrics, method=name, tokens=tokens)
            said = metrics.get("failed") or f"{metrics['forward_ms']:.1f} / {metrics['both_ms']:.1f} ms"
            console.print(f"{name} at {tokens:,} tokens: {said}", highlight=False)


def measure_memory(config: NeighboursConfig) -> None:
    rows = Rows(config, "memory")
    for tokens in config.tokens:
        for name in check_names(config.methods):
            if not rows.has(method=name, tokens=tokens):
                metrics = speed.measure_peak(name, tokens)
                rows.add({"batch": 1, "dim": DIM, "heads": HEADS}, metrics, method=name, tokens=tokens)


def measure_digits(config: NeighboursConfig) -> None:
    rows = Rows(config, "digits")
    for seed in range(config.seeds or SEEDS["digits"]):
        for name in check_names(config.methods):
            case = {"method": name, "seed": seed, "epochs": config.epochs}
            if not rows.has(**case):
                trained = trainings.train_digits(name, seed, config.epochs, config.out)
                if trained is None:
                    return
                rows.add(*trained, **case)


def measure_language(config: NeighboursConfig) -> None:
    if not config.packed.exists():
        language.prepare(config.packed.parent)
    rows = Rows(config, "language")
    for seed in range(config.seeds or SEEDS["language"]):
        for name in check_names(config.methods):
            case = {"method": name, "seed": seed, "steps": config.steps}
            if ABOUT[name].causal and not rows.has(**case):
                rows.add(*trainings.train_language(name, seed, config.steps, config.packed, config.out), **case)


MEASURE = {
    "speed": measure_speed,
    "memory": measure_memory,
    "digits": measure_digits,
    "language": measure_language,
}


def main(config: NeighboursConfig) -> None:
    check_names(config.methods)
    for part in config.what:
        path = config.results / f"{part}.jsonl"
        size = path.stat().st_size if path.exists() else 0
        MEASURE[part](config)
        if size and path.stat().st_size == size:
            console.print(f"{part}: nothing new; rows that {path} has are not measured again", highlight=False)


if __name__ == "__main__":
    cli.run(main, NeighboursConfig)
