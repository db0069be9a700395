"""A short table of speed on one CPU, that with the most measurements, and the operator on every GPU."""

import pandas as pd

from runs import frames
from runs.table import Row, Table
from runs.tables.speed import (
    GKA,
    PHASES,
    SOFTMAX,
    WITH_OFFSETS,
    by,
    by_size,
    flops_ratio,
    label,
    row,
    table,
    with_offsets,
)

# Of attention, decoding and whole models, the hard cases among them; the tables of `speed` have all.
CASES = [
    ("vit-s", "forward+backward"),
    ("lm-full", "forward"),
    ("lm-full", "forward+backward"),
    ("decode-b1-1024", "forward"),
    ("decode-derived-b1-1024", "forward"),
    ("deit-ti-b8", "inference"),
    ("deit-ti-b8", "training"),
    ("d6", "training"),
]
TIMES = slice(3, 6)  # in a row of speed.row: threads and milliseconds of both sides


def one_machine() -> list[Table]:
    """A row for each case and phase: milliseconds in float32, the speed-up in both dtypes, and the FLOPs ratio."""
    known = pd.concat([frames.bench("attention"), by_size(frames.bench("deit")), frames.bench("gpt")])
    known = known[known.threads.notna()]
    if known.empty:
        return []
    of_machine = known[known.machine == known.machine.value_counts().idxmax()]
    cases = of_machine.case.str.removesuffix("-bf16")
    of_machine = of_machine[[place in CASES for place in zip(cases, of_machine.phase)]]
    rows = []
    for (name, _), timed in by(of_machine.assign(label=of_machine.apply(label, axis=1)), "label", "phase"):
        rows += both_dtypes(name, timed, flops_ratio(timed))
        rows += both_dtypes(WITH_OFFSETS, with_offsets(timed), flops_ratio(timed))
    headings = ["", "phase", "threads", f"{SOFTMAX}, ms", f"{GKA}, ms", "speed-up", "in bfloat16", "FLOPs ratio"]
    return table(headings, rows, of_machine, words=3)


def gpus() -> list[Table]:
    """The operator on each GPU: the fastest attention of torch, its default, and ours, all in bfloat16."""
    tables, lines = [], frames.bench("attention")
    for _, own in by(lines[lines.threads.isna()], "machine"):
        rows = []
        for (_, phase), timed in by(own, "case", "phase"):
            right = timed[timed.status == "ok"]
            times = right.set_index("kernel").median_ms
            mine, baselines = right[right.role == "ours"].median_ms, right[right.role == "baseline"]
            if mine.empty or baselines.empty:
                continue
            ours = mine.iloc[0]
            fastest = baselines.loc[baselines.median_ms.idxmin()]
            shown = [f"{fastest.median_ms / ours:.2f}x", f"{times['flash'] / ours:.2f}x" if "flash" in times else ""]
            milliseconds = [f"{fastest.median_ms:.3g} ({fastest.kernel})", f"{ours:.3g}"]
            rows.append([label(timed.iloc[0]), PHASES.get(phase, phase), *milliseconds, *shown])
        headings = ["", "phase", f"fastest {SOFTMAX}, ms", f"{GKA}, ms", "speed-up", "beside torch's default"]
        tables += table(headings, rows, own)
    return tables


def both_dtypes(name: str, timed: pd.DataFrame, flops: float | None) -> list[Row]:
    """The row of a case and phase, in a list; none where float32 was not measured on both sides."""
    single, half = (
        [shown for _, one in by(timed[timed["dtype"] == dtype], "case") for shown in row(name, one)]
        for dtype in ("float32", "bfloat16")
    )
    if not single:
        return []
    first = single[0]
    return [[*first[:2], *first[TIMES], first[6], half[0][6] if half else "", f"{flops:.2f}x" if flops else ""]]
