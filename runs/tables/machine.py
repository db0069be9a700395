"""The table of speed on one machine, that with the most measurements: the operator and whole models, both dtypes."""

import pandas as pd

from runs import frames
from runs.table import Row, Table
from runs.tables.speed import GKA, SOFTMAX, by, by_size, flops_ratio, model_label, operator_label, row, table

CASES = r"vit-|lm-|decode-"  # of windows and sweeps speed.operator and the files have rows
TIMES = slice(3, 6)  # in a row of speed.row: threads and milliseconds of both sides


def one_machine() -> list[Table]:
    """A row for each case and phase: milliseconds in float32, the speed-up in both dtypes, and the FLOPs ratio."""
    operator = frames.bench("attention")
    models = pd.concat([by_size(frames.bench("deit")), frames.bench("gpt")])
    operator = operator[operator.case.str.match(CASES) & operator.window.isna()]
    models = models[~models.phase.str.startswith("decode")]
    known = pd.concat([operator.assign(label=labels(operator, False)), models.assign(label=labels(models, True))])
    if known.empty:
        return []
    of_machine = known[known.machine == known.machine.value_counts().idxmax()]
    rows = []
    for (label, _), timed in by(of_machine, "label", "phase"):
        rows += both_dtypes(label, timed, flops_ratio(timed))
        offsets = timed[(timed.family == "softmax") | (timed.form == "offsets")].replace({"role": {"variant": "ours"}})
        rows += both_dtypes("the same with head offsets (ours)", offsets, flops_ratio(timed))
    headings = ["", "phase", "threads", f"{SOFTMAX}, ms", f"{GKA}, ms", "speed-up", "in bfloat16", "FLOPs ratio"]
    return table(headings, rows, of_machine, words=3)


def labels(lines: pd.DataFrame, model: bool) -> list[str]:
    return [model_label(line) if model else operator_label(line.case, line) for _, line in lines.iterrows()]


def both_dtypes(label: str, timed: pd.DataFrame, flops: float | None) -> list[Row]:
    """The row of a case and phase, in a list; none where float32 was not measured on both sides."""
    single, half = (
        [shown for _, one in by(timed[timed["dtype"] == name], "case") for shown in row(label, one)]
        for name in ("float32", "bfloat16")
    )
    if not single:
        return []
    first = single[0]
    return [[*first[:2], *first[TIMES], first[6], half[0][6] if half else "", f"{flops:.2f}x" if flops else ""]]
