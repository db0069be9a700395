"""The chart that the page begins with, from runs/results: speed over machines."""

from pathlib import Path

from runs.frames import RESULTS
from runs.report.blocks import Picture
from runs.report.charts import WIDTH, drawn
from runs.table import Table
from runs.tables import speedups


def speed(results: Path = RESULTS) -> list[Picture]:
    """How many times as fast GKA is, on every machine; none without measurements."""
    frame = speedups.speedups(results)
    if frame.empty:
        return []
    rows = [[row.case, row.machine, str(row.threads), f"{row.ratio:.2f}"] for row in frame.itertuples()]
    table = Table.of(["case", "machine", "threads", "ratio"], rows, title=speedups.TITLE, words=2)
    about = speedups.caption(frame)
    return [drawn(speedups.TITLE, about, lambda: speedups.draw(frame, WIDTH), table)]
