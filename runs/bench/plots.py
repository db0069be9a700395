"""Pictures of the operator's benchmark: throughput and memory against N, and measured time against the roofline."""

from dataclasses import dataclass
from pathlib import Path

from gka.kinds import KINDS
from runs.bench.results import Comparison, slug
from trainkit_gka.plots import save, subplots


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
COLOURS = {"softmax": "tab:grey", "gka": "tab:blue"}


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
    sweep = {
        key: c
        for key, c in comparisons.items()
        if key[0].startswith("sweep-") and any(line["metrics"]["median_ms"] for line in c.lines)
    }
    pictures = [draw_sweep(sweep, hardware, out)] if sweep else []
    peaks = peaks_of(hardware)
    rest = [c for key, c in comparisons.items() if key not in sweep and c.fastest("ours") and c.fastest("baseline")]
    return pictures + ([draw_roofline(rest, hardware, peaks, out)] if peaks and rest else [])


def draw_sweep(sweep: dict[tuple[str, str], Comparison], hardware: str, out: Path) -> Path:
    """Tokens per second and memory against N, a column for each phase."""
    phases = list(dict.fromkeys(phase for _, phase in sweep))
    with_memory = any(line["metrics"]["peak_mib"] is not None for c in sweep.values() for line in c.lines)
    rows, columns = 1 + with_memory, len(phases)
    figure, axes = subplots(rows, columns, figsize=(6 * columns, 4 * rows), squeeze=False)
    for column, phase in enumerate(phases):
        curves: dict[str, list[tuple[int, float, float | None]]] = {}
        for (_, where), comparison in sweep.items():
            for line in comparison.lines if where == phase else []:
                config, metrics = line["config"], line["metrics"]
                if metrics["median_ms"] is not None:
                    speed = config["batch"] * config["tokens"] / metrics["median_ms"] * 1e3
                    curves.setdefault(config["candidate"], []).append((config["tokens"], speed, metrics["peak_mib"]))
        for name, points in sorted(curves.items()):
            points.sort(key=lambda point: point[0])
            style = dict(marker="o", label=name, linestyle="--" if name.startswith("softmax") else "-")
            axes[0][column].plot([n for n, _, _ in points], [speed for _, speed, _ in points], **style)
            if with_memory:
                axes[1][column].plot([n for n, _, _ in points], [memory for _, _, memory in points], **style)
        for row, label in enumerate(("tokens per second", "memory of one call, MiB")[:rows]):
            length = "N, tokens in a sequence (equal tokens in all)"
            axes[row][column].set(yscale="log", xlabel=length, ylabel=label, title=phase)
            axes[row][column].set_xscale("log", base=2)
            axes[row][column].grid(alpha=0.3)
            axes[row][column].legend(fontsize=7)
    return _save(figure, hardware, out / f"sweep_{slug(hardware)}.png")


def draw_roofline(comparisons: list[Comparison], hardware: str, peaks: Peaks, out: Path) -> Path:
    """Two bars for every comparison, softmax's fastest and ours, each with the shortest time that is possible."""
    figure, axes = subplots(figsize=(max(8, 0.9 * len(comparisons)), 5))
    labels = []
    for place, comparison in enumerate(comparisons):
        labels.append(f"{comparison.case}\n{comparison.phase}")
        for offset, role, family in ((-0.2, "baseline", "softmax"), (0.2, "ours", "gka")):
            line = comparison.fastest(role)
            bound = bound_ms(line["config"], comparison.phase, family, peaks)
            middle, name = place + offset, KINDS[family].label if place == 0 else None
            axes.bar(middle, line["metrics"]["median_ms"], width=0.38, color=COLOURS[family], label=name)
            bound_name = "bound" if name and family == "softmax" else None
            axes.hlines(bound, middle - 0.19, middle + 0.19, color="black", linewidth=2, label=bound_name)
    axes.set_xticks(range(len(labels)), labels, rotation=60, fontsize=7, ha="right")
    flops, moved, exps = (peak / 1e12 for peak in (peaks.flops, peaks.bytes, peaks.exps))
    assumed = f"assuming {flops:.0f} TFLOP/s, {moved:.1f} TB/s, {exps:.1f}e12 exp/s"
    axes.set(yscale="log", ylabel="ms", title=f"measured and bound, {assumed}")
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    return _save(figure, hardware, out / f"roofline_{slug(hardware)}.png")


def _save(figure, hardware: str, path: Path) -> Path:
    figure.suptitle(hardware, fontsize=9)
    return save(figure, path)
