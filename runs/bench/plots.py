"""Pictures of the operator's benchmark: throughput and memory against N, and measured time against the roofline."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from gka.kinds import KINDS
from runs.bench.results import Comparison, slug, swept
from runs.figures import SKY, legend, look, panels, save, variants


@dataclass(frozen=True)
class Peaks:
    """What a device sustains: assumptions, each read once off such a card with random data, not a data sheet's."""

    flops: float  # bf16 matrix products, FLOP/s
    bytes: float  # device-to-device copy, read + written, byte/s
    exps: float  # exponentials per second: 16 a clock and multiprocessor


PEAKS = {"H200": Peaks(790e12, 4.3e12, 3.9e12), "H100": Peaks(798e12, 3.0e12, 3.9e12)}
# Tensors of B*T*H*D that a backward pass moves. Softmax: q k v y dy, dq dk dv, delta's pass over two, float32 dq as
# four. GKA: x y, dx, delta's two.
BACKWARD_UNITS = {"softmax": 14, "gka": 5}


def peaks_of(hardware: str) -> Peaks | None:
    """The table's entry for a device's name (or its file's); None if it has none."""
    return next((peaks for name, peaks in PEAKS.items() if name.lower() in slug(hardware).split("-")), None)


def pairs(config: dict) -> int:
    """Query-key pairs of one head and sequence that the mask leaves."""
    tokens, queries, window = config["tokens"], config["queries"], config["window"]
    if queries == 1:
        return tokens if window is None else min(tokens, window + 1)
    reach = tokens if window is None else window + 1
    if config["causal"]:
        return sum(min(i + 1, reach) for i in range(tokens))
    return sum(min(i + reach, tokens) - max(i - reach + 1, 0) for i in range(tokens))


def bound_ms(config: dict, phase: str, family: str, peaks: Peaks) -> float:
    """The arithmetic bound of a perfect kernel, ms, forward plus backward.

    It is the largest of its matrix products, its traffic and its exponentials.

    Forward: 2 matrix products a pair; softmax moves q k v y, GKA x y. Backward: 5 products, for causal GKA 7 and the
    exponentials twice (rows and columns apart, no atomics). A decode query's own bytes are left out.
    """
    heads, dim = config["batch"] * config["heads"], config["head_dim"]
    products, exps = 4 * heads * pairs(config) * dim, heads * pairs(config)
    unit = heads * config["tokens"] * dim * 2  # bytes of one bf16 tensor
    decode = config["queries"] == 1 < config["tokens"]
    units = KINDS[family].cached_tensors if decode else KINDS[family].operator_tensors

    def slowest(flops: float, moved: float, exponentials: float) -> float:
        return 1e3 * max(flops / peaks.flops, moved / peaks.bytes, exponentials / peaks.exps)

    forward = slowest(products, units * unit, exps)
    if phase == "forward":
        return forward
    two_passes = family == "gka" and config["causal"]
    return forward + slowest(
        (3.5 if two_passes else 2.5) * products, BACKWARD_UNITS[family] * unit, (2 if two_passes else 1) * exps
    )


def draw(comparisons: dict[tuple[str, str], Comparison], hardware: str, out: Path) -> list[Path]:
    """Draw what there is data for; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    sweep = swept(one for (case, _), one in comparisons.items() if case.startswith("sweep-"))
    pictures = [draw_sweep(sweep, hardware, out / f"sweep_{slug(hardware)}.png")] if len(sweep) else []
    peaks, bars = peaks_of(hardware), measured_and_bound(comparisons, hardware)
    if peaks and len(bars):
        pictures.append(draw_roofline(bars, hardware, peaks, out / f"roofline_{slug(hardware)}.png"))
    return pictures


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


def measured_and_bound(comparisons: dict[tuple[str, str], Comparison], hardware: str) -> pd.DataFrame:
    """A row for both sides of every comparison outside sweeps: milliseconds, and the fewest that are possible."""
    peaks, rows = peaks_of(hardware), []
    for (case, phase), comparison in comparisons.items():
        sides = {"softmax": comparison.fastest("baseline"), "gka": comparison.fastest("ours")}
        if peaks and not case.startswith("sweep-") and all(sides.values()):
            for family, line in sides.items():
                bound = bound_ms(line["config"], phase, family, peaks)
                rows.append([f"{case}, {phase}", family, line["metrics"]["median_ms"], bound])
    return pd.DataFrame(rows, columns=["case", "family", "ms", "bound"])


def draw_roofline(bars: pd.DataFrame, hardware: str, peaks: Peaks, path: Path) -> Path:
    """Two bars for every comparison, softmax's fastest and ours, each with the shortest time that is possible."""
    cases = list(bars.case.unique())
    figure, [axis] = panels(1, 1, 1.4 + 0.32 * len(cases))
    for shift, family in ((-0.2, "softmax"), (0.2, "gka")):
        own = bars[bars.family == family]
        heights, label = np.arange(len(own)) + shift, KINDS[family].label
        axis.barh(heights, own.ms, height=0.38, color=look(label).colour, alpha=0.7, label=label)
        axis.vlines(own.bound, heights - 0.19, heights + 0.19, color=SKY, linewidth=3, label="bound")
    axis.set_yticks(range(len(cases)), cases)
    axis.set(xscale="log", xlabel="ms", ylim=(len(cases) - 0.4, -0.6))
    axis.grid(visible=False, axis="y")
    legend(figure, [axis], 3)
    flops, moved, exps = (peak / 1e12 for peak in (peaks.flops, peaks.bytes, peaks.exps))
    assumed = f"{flops:.0f} TFLOP/s, {moved:.1f} TB/s, {exps:.1f}e12 exp/s"
    return save(figure, f"Measured and bound, {hardware}, assuming {assumed}", path)
