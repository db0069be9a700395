"""The study's table of speed: training steps of its main families, timed in turns."""

from pathlib import Path

from runs.sections.sources import measured, table
from runs.sections.study import NOT_RUN, ROWS
from runs.study.grid import CONTROL
from runs.study.speed import SPEEDS, TIMED, newest

Speeds = dict[int, dict[str, float]]  # depth -> family -> tokens/s


def speeds_of(folder: Path = ROWS) -> Speeds:
    """Of the newest comparisons beside a folder of rows."""
    return {
        depth: {family: record["metrics"]["tokens_per_second"] for family, record in records.items()}
        for depth, records in newest(folder.with_name(SPEEDS.name)).items()
    }


def speed(folder: Path = ROWS) -> str:
    """Tokens per second of a training step, and how many times those of the control that is."""
    records, speeds = newest(folder.with_name(SPEEDS.name)), speeds_of(folder)
    if not records:
        return f"{NOT_RUN}: `.venv/bin/python -m runs.study.speed`"
    rows = []
    for name in TIMED:
        rows.append([name, *(_said(of_depth.get(name), of_depth.get(CONTROL)) for of_depth in speeds.values())])
    shown = [record for of_depth in records.values() for record in of_depth.values()]
    return table(["", *(f"{depth} layers" for depth in records)], rows) + "\n" + measured(shown, SPEEDS.name)


def _said(tokens: float | None, control: float | None) -> str:
    if not tokens:
        return ""
    return f"{tokens:,.0f}" + (f" ({tokens / control:.2f}x)" if control else "")


TABLES = {"study-speed": speed}
