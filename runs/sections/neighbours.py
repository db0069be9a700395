"""The paper's Table 1 with measured columns, from the rows of `python -m runs.neighbours`."""

import statistics
from pathlib import Path
from typing import Any

from runs.neighbours.layers import ABOUT, cost
from runs.paper import published
from runs.sections.sources import RESULTS, measured, table
from trainkit.results import read_results

NOT_RUN, NOT_BUILT = "not run", "not built"
LENGTHS = (197, 2048, 8192, 16384)
FULL = {"digits": ("epochs", 50), "language": ("steps", 400)}  # what a row of a table is trained for
Row = dict[str, Any]


def rows_of(folder: Path, part: str) -> list[Row]:
    return read_results(folder / f"{part}.jsonl")


def table_1(folder: Path = RESULTS / "neighbours") -> str:
    """The paper's methods in its order, with what this project knows and measured of each."""
    by_label = {about.label: name for name, about in ABOUT.items()}
    kernels = {label: row["kernel"] for label, row in published.rows("related_methods").items()}
    shown = []
    for label in [*kernels, *(label for label in by_label if label not in kernels)]:
        about = ABOUT.get(by_label.get(label, ""))
        if about is None:
            shown.append([label, f"*{kernels[label]}*", *[NOT_BUILT] * 8])
            continue
        name = by_label[label]
        short, long = cost(name, LENGTHS[0]), cost(name, LENGTHS[-1])
        counts = [f"{short['parameters']:,}", *(f"{_flops(known):,.1f}" for known in (short, long))]
        words = [about.projections or "none", "yes" if about.causal else "no", about.complexity]
        trained = [trained_cell(folder, "digits", name, "ema_top1", ".2f")]
        trained += [trained_cell(folder, "language", name, "val_bpb", ".4f") if about.causal else "no causal form"]
        shown.append([label, f"*{kernels[label]}*" if label in kernels else "", *words, *counts, *trained])
    headings = ["", "kernel, the paper's words", "learns W of", "causal form", "complexity of mixing", "parameters"]
    headings += [f"MFLOPs, N = {length:,}" for length in (LENGTHS[0], LENGTHS[-1])]
    headings += ["digits: top-1 %", "language: bits per byte"]
    return "\n".join([table(headings, shown, left=5), *_sources(folder, "digits", "language")])


def _flops(known: dict[str, int]) -> float:
    return (known["flops"] + known["other_flops"]) / 1e6


def trained_cell(folder: Path, part: str, name: str, key: str, form: str) -> str:
    """The mean over seeds with their standard deviation and number, of runs of full length."""
    setting, length = FULL[part]
    cases = {}
    for row in rows_of(folder, part):
        case = row["config"]["case"]
        if case["method"] == name and case[setting] == length:
            cases[case["seed"]] = row["metrics"][key]
    if not cases:
        return NOT_RUN
    values = list(cases.values())
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread} ({len(values)} seed{'s' * (len(values) > 1)})"


def speed(folder: Path = RESULTS / "neighbours") -> str:
    """Forward and forward + backward milliseconds and MiB of a layer, by length."""
    rows = {part: {_case(row): row for row in rows_of(folder, part)} for part in ("speed", "memory")}
    shown = []
    for name, about in ABOUT.items():
        cells = []
        for tokens in LENGTHS:
            timed, peak = (rows[part].get((name, tokens), {"metrics": {}})["metrics"] for part in ("speed", "memory"))
            times = f"{timed['forward_ms']:,.1f} / {timed['both_ms']:,.1f}" if "both_ms" in timed else ""
            held = f"{peak['peak_mib']:,.0f}" if "peak_mib" in peak else ""
            cells += [times or timed.get("failed", NOT_RUN), held or peak.get("failed", NOT_RUN)]
        shown.append([about.label, *cells])
    headings = [""] + [heading for tokens in LENGTHS for heading in (f"N = {tokens:,}: ms", "MiB")]
    return "\n".join([table(headings, shown), *_sources(folder, "speed", "memory")])


def _sources(folder: Path, *parts: str) -> list[str]:
    """A line for each part that has rows: when and where the newest was measured."""
    return [measured(row, f"neighbours/{part}.jsonl") for part in parts for row in rows_of(folder, part)[-1:]]


def _case(row: Row) -> tuple[str, int]:
    case = row["config"]["case"]
    return case["method"], case["tokens"]


TABLES = {"neighbours": table_1, "neighbours-speed": speed}
