"""The paper's Table 1 with measured columns, from the rows of `python -m runs.neighbours`."""

from pathlib import Path

import pandas as pd

from runs.frames import RESULTS, frame
from runs.neighbours.layers import ABOUT, cost
from runs.neighbours.trainings import STEPS
from runs.paper import published
from runs.table import NOT_RUN, Table, measured

NOT_BUILT, LEARNED = "not built", "learns W of"
LENGTHS = (197, 2048, 8192, 16384)
LONGEST = {"digits": ("epochs", 50), "language": ("steps", STEPS)}  # shorter trainings are not compared with these
TRAINED = {"digits: top-1 %": ("digits", "ema_top1", ".2f"), "language: bits per byte": ("language", "val_bpb", ".4f")}
BY_LABEL = {about.label: name for name, about in ABOUT.items()}


def rows_of(folder: Path, part: str) -> pd.DataFrame:
    """The newest line of every method and length or seed; of trainings the longest."""
    known = frame(folder / f"{part}.jsonl", "method")
    if len(known) and part in LONGEST:
        column, length = LONGEST[part]
        known = known[known[column] == length]
    keys = ["method", "seed" if part in LONGEST else "tokens"]
    return known.drop_duplicates(keys, keep="last") if len(known) else pd.DataFrame(columns=[*keys, "record"])


def table_1(folder: Path = RESULTS / "neighbours") -> list[Table]:
    """The paper's methods in its order, with what this project knows and measured of each."""
    kernels = {label: row["kernel"] for label, row in published.rows("related_methods").items()}
    headings = ["", "kernel, the paper's words", *counts("gka"), *TRAINED]
    shown = []
    for label in dict.fromkeys([*kernels, *BY_LABEL]):
        cells = [NOT_BUILT] * len(headings[2:])
        if name := BY_LABEL.get(label):
            cells = (counts(name) | trained(folder, name)).values()
        shown.append([label, f"*{kernels[label]}*" if label in kernels else "", *cells])
    return [Table.of(headings, shown, words=5, sources=_sources(folder, "digits", "language"))]


def measures(label: str, folder: Path) -> dict[str, str]:
    """Measure -> cell: a row of the paper's Table 1 as known, counted and measured here."""
    if label not in BY_LABEL:
        return {LEARNED: NOT_BUILT}
    name = BY_LABEL[label]
    times = {
        f"{'ms, forward / both' if unit == 'ms' else unit}, N = {tokens:,}": cell
        for (tokens, unit), cell in timed(folder).loc[name].items()
    }
    return counts(name) | times | trained(folder, name)


def counts(name: str) -> dict[str, str]:
    """What is known of a method, the parameters of a layer, of both lengths where they differ, and its MFLOPs."""
    about, costs = ABOUT[name], {tokens: cost(name, tokens) for tokens in (LENGTHS[0], LENGTHS[-1])}
    return {
        LEARNED: about.projections or "none",
        "causal form": "yes" if about.causal else "no",
        "complexity of mixing": about.complexity,
        "parameters": " / ".join(dict.fromkeys(f"{known['parameters']:,}" for known in costs.values())),
        **{f"MFLOPs, N = {n:,}": f"{(k['flops'] + k['other_flops']) / 1e6:,.1f}" for n, k in costs.items()},
    }


def trained(folder: Path, name: str) -> dict[str, str]:
    """For each task the mean over seeds with their standard deviation and number."""
    cells = {}
    for heading, (part, key, form) in TRAINED.items():
        known = rows_of(folder, part)
        known = known[known.method == name]
        if part == "language" and not ABOUT[name].causal:
            cells[heading] = "no causal form"
        elif known.empty:
            cells[heading] = NOT_RUN
        else:
            spread = f" ± {known[key].std():{form}}" if len(known) > 1 else ""
            cells[heading] = f"{known[key].mean():{form}}{spread} ({len(known)} seed{'s' * (len(known) > 1)})"
    return cells


def timed(folder: Path) -> pd.DataFrame:
    """Cells by method: for every length milliseconds, forward / forward and backward, and MiB; or why there are none.

    Columns are pairs of a length and a unit.
    """
    shown = pd.DataFrame(NOT_RUN, list(ABOUT), pd.MultiIndex.from_product([LENGTHS, ["ms", "MiB"]]))
    for part, unit in (("speed", "ms"), ("memory", "MiB")):
        for line in rows_of(folder, part).itertuples():
            if isinstance(reason := getattr(line, "failed", None), str):
                cell = reason
            else:
                both = f"{line.forward_ms:,.1f} / {line.both_ms:,.1f}" if unit == "ms" else ""
                cell = both or f"{line.peak_mib:,.0f}"
            if (line.tokens, unit) in shown:
                shown.loc[line.method, (line.tokens, unit)] = cell
    return shown


def speed(folder: Path = RESULTS / "neighbours") -> list[Table]:
    """Forward and forward + backward milliseconds and MiB of a layer, by length."""
    cells = timed(folder)
    rows = [[ABOUT[name].label, *row] for name, row in zip(cells.index, cells.to_numpy())]
    headings = [f"N = {tokens:,}: ms" if unit == "ms" else unit for tokens, unit in cells.columns]
    return [Table.of(["", *headings], rows, sources=_sources(folder, "speed", "memory"))]


def _sources(folder: Path, *parts: str) -> list[str]:
    """A line for each part that has rows: when and where they were measured."""
    rows = {part: list(rows_of(folder, part).record) for part in parts}
    return [measured(rows[part], f"neighbours/{part}.jsonl") for part in parts if rows[part]]


TABLES = {"neighbours": table_1, "neighbours-speed": speed}
