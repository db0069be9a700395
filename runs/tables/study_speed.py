"""The study's table of speed: training steps of its main families, timed in turns."""

from pathlib import Path

from runs.study.grid import CONTROL
from runs.study.speed import SPEEDS, TIMED, newest
from runs.table import Table, measured
from runs.tables.study import ROWS


def speed(folder: Path = ROWS) -> list[Table]:
    """Tokens per second of a training step, and how many times those of the control that is."""
    timed = newest(folder.with_name(SPEEDS.name))
    if timed.empty:
        return []
    speeds = timed.pivot(index="family", columns="depth", values="tokens_per_second").reindex(TIMED)
    ratios = speeds / speeds.loc[CONTROL]
    cells = speeds.map("{:,.0f}".format) + ratios.map(" ({:.2f}x)".format).where(ratios.notna(), "")
    shown = cells.where(speeds.notna(), "").rename(columns="{} layers".format).reset_index(names="")
    return [Table(shown, sources=[measured(list(timed.record), SPEEDS.name)])]


TABLES = {"study-speed": speed}
