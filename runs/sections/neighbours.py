"""The paper's Table 1 with measured columns, from the rows of `python -m runs.neighbours`."""

import statistics
from pathlib import Path
from typing import Any

from runs.neighbours.layers import ABOUT, cost
from runs.neighbours.trainings import DEPTH, STEPS
from runs.paper import published
from runs.sections.sources import RESULTS, measured, table
from trainkit_gka.results import read_results

NOT_RUN, NOT_BUILT = "not run", "not built"
LEARNED = "learns W of"
LENGTHS = (197, 2048, 8192, 16384)
SHORT_AND_LONG = (LENGTHS[0], LENGTHS[-1])
# Trainings that a table shows: runs of another length, depth or width are not compared with them.
FULL = {"digits": {"epochs": 50}, "language": {"steps": STEPS, "depth": DEPTH, "width": 128}}
TRAINED = {"digits: top-1 %": ("digits", "ema_top1", ".2f"), "language: bits per byte": ("language", "val_bpb", ".4f")}
BY_LABEL = {about.label: name for name, about in ABOUT.items()}
Row = dict[str, Any]


def rows_of(folder: Path, part: str) -> dict[tuple[str, int], Row]:
    """(method, tokens or seed) -> the newest row; of trainings those that FULL describes."""
    rows = {}
    for row in read_results(folder / f"{part}.jsonl"):
        case = row["config"]["case"]
        if FULL.get(part, {}).items() <= (row["config"] | case).items():
            rows[case["method"], case["seed" if part in FULL else "tokens"]] = row
    return rows


def table_1(folder: Path = RESULTS / "neighbours") -> str:
    """The paper's methods in its order, with what this project knows and measured of each."""
    kernels = {label: row["kernel"] for label, row in published.rows("related_methods").items()}
    headings = ["", "kernel, the paper's words", *words("gka"), *costs("gka"), *TRAINED]
    shown = []
    for label in dict.fromkeys([*kernels, *BY_LABEL]):
        cells = [NOT_BUILT] * len(headings[2:])
        if name := BY_LABEL.get(label):
            cells = (words(name) | costs(name) | trained(folder, name)).values()
        shown.append([label, f"*{kernels[label]}*" if label in kernels else "", *cells])
    return "\n".join([table(headings, shown, left=5), *_sources(folder, "digits", "language")])


def measures(label: str, folder: Path) -> dict[str, str]:
    """Measure -> cell: a row of the paper's Table 1 as known, counted and measured here."""
    if label not in BY_LABEL:
        return {LEARNED: NOT_BUILT}
    name = BY_LABEL[label]
    cells = words(name) | costs(name)
    for tokens in LENGTHS:
        ms, mib = timed(folder, name, tokens)
        cells |= {f"ms, forward / both, N = {tokens:,}": ms, f"MiB, N = {tokens:,}": mib}
    return cells | trained(folder, name)


def words(name: str) -> dict[str, str]:
    """What is known of a method without counting."""
    about = ABOUT[name]
    return {
        LEARNED: about.projections or "none",
        "causal form": "yes" if about.causal else "no",
        "complexity of mixing": about.complexity,
    }


def costs(name: str) -> dict[str, str]:
    """Parameters, of both lengths where they differ, and MFLOPs of a layer."""
    known = {tokens: cost(name, tokens) for tokens in SHORT_AND_LONG}
    flops = {f"MFLOPs, N = {n:,}": f"{(k['flops'] + k['other_flops']) / 1e6:,.1f}" for n, k in known.items()}
    counts = dict.fromkeys(f"{k['parameters']:,}" for k in known.values())
    return {"parameters": " / ".join(counts), **flops}


def trained(folder: Path, name: str) -> dict[str, str]:
    """For each task the mean over seeds with their standard deviation and number."""
    cells = {}
    for heading, (part, key, form) in TRAINED.items():
        values = [row["metrics"][key] for (method, _), row in rows_of(folder, part).items() if method == name]
        spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
        seeds = f"{spread} ({len(values)} seed{'s' * (len(values) > 1)})"
        cells[heading] = f"{statistics.fmean(values):{form}}{seeds}" if values else NOT_RUN
        if part == "language" and not ABOUT[name].causal:
            cells[heading] = "no causal form"
    return cells


def timed(folder: Path, name: str, tokens: int) -> tuple[str, str]:
    """Milliseconds forward / forward and backward, and MiB, of a layer; or why it has none."""
    rows = (rows_of(folder, part).get((name, tokens), {"metrics": {}}) for part in ("speed", "memory"))
    timed, peak = (row["metrics"] for row in rows)
    times = f"{timed['forward_ms']:,.1f} / {timed['both_ms']:,.1f}" if "both_ms" in timed else ""
    held = f"{peak['peak_mib']:,.0f}" if "peak_mib" in peak else ""
    return times or timed.get("failed", NOT_RUN), held or peak.get("failed", NOT_RUN)


def speed(folder: Path = RESULTS / "neighbours") -> str:
    """Forward and forward + backward milliseconds and MiB of a layer, by length."""
    shown = [
        [about.label, *(cell for tokens in LENGTHS for cell in timed(folder, name, tokens))]
        for name, about in ABOUT.items()
    ]
    headings = [""] + [heading for tokens in LENGTHS for heading in (f"N = {tokens:,}: ms", "MiB")]
    return "\n".join([table(headings, shown), *_sources(folder, "speed", "memory")])


def _sources(folder: Path, *parts: str) -> list[str]:
    """A line for each part that has rows: when and where they were measured."""
    rows = {part: list(rows_of(folder, part).values()) for part in parts}
    return [measured(rows[part], f"neighbours/{part}.jsonl") for part in parts if rows[part]]


TABLES = {"neighbours": table_1, "neighbours-speed": speed}
