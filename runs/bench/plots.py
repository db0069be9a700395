"""The picture of the operator's benchmark: throughput and memory against N."""

import itertools
from pathlib import Path

import pandas as pd

from gka.kinds import KINDS
from runs.bench.results import Comparison, slug, swept
from runs.figures import legend, panels, save, variants


def draw(comparisons: dict[tuple[str, str], Comparison], hardware: str, out: Path) -> list[Path]:
    """Draw what there is data for; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    sweep = swept(one for (case, _), one in comparisons.items() if case.startswith("sweep-"))
    return [draw_sweep(sweep, hardware, out / f"sweep_{slug(hardware)}.png")] if len(sweep) else []


def draw_sweep(sweep: pd.DataFrame, hardware: str, path: Path) -> Path:
    """Tokens per second, and memory where it was measured, against N, a column for each phase. sweep: see `swept`."""
    quantities = {"speed": "tokens per second", "memory": "memory of one call, MiB"}
    shown = [name for name in quantities if sweep[name].notna().any()]
    phases = list(sweep.phase.unique())
    figure, axes = panels(len(shown), len(phases), 1 + 3.6 * len(shown))
    looks = {}
    for family, own in sweep.groupby("family"):
        looks |= variants(KINDS[family].label, own.candidate.unique())
    for axis, (quantity, phase) in zip(axes, itertools.product(shown, phases)):
        for name, line in sweep[sweep.phase == phase].groupby("candidate"):
            axis.plot(line.tokens, line[quantity], **looks[name](name))
        axis.set(yscale="log", xlabel="N, tokens in a sequence", ylabel=quantities[quantity])
        axis.set_title(phase, fontsize=10)
        axis.set_xscale("log", base=2)
    legend(figure, axes, 3)
    return save(figure, f"Equal tokens in all, {hardware}", path)
