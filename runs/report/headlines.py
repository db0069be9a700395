"""The two charts that the page begins with, from runs/results: quality against cost, and speed over machines."""

from pathlib import Path

from runs.frames import RESULTS
from runs.report.blocks import Picture, number
from runs.report.charts import WIDTH, drawn
from runs.study import pictures
from runs.study.scores import Scores
from runs.study.speed import speeds_of
from runs.table import Table
from runs.tables import speedups

TEXT = "text_large"


def quality(results: Path = RESULTS) -> list[Picture]:
    """Bits per byte against minutes of training, of the study's forms; none without its rows."""
    folder = results / "study"
    costs = pictures.costs(Scores.read(folder / f"{TEXT}.jsonl"), speeds_of(folder))
    if costs.minutes.isna().all():
        return []
    rows = [[row.family, *map(number, row[2:])] for row in costs.itertuples()]
    headings = ["form", "parameters, millions", "minutes", pictures.LOSS, "standard deviation"]
    title = "Quality against cost"
    table = Table.of(headings, rows, title=title)
    return [drawn(title, pictures.about_quality(), lambda: pictures.draw_quality(costs, ["minutes"], WIDTH), table)]


def speed(results: Path = RESULTS) -> list[Picture]:
    """How many times as fast GKA is, on every machine; none without measurements."""
    frame = speedups.speedups(results)
    if frame.empty:
        return []
    rows = [[row.case, row.machine, str(row.threads), f"{row.ratio:.2f}"] for row in frame.itertuples()]
    table = Table.of(["case", "machine", "threads", "ratio"], rows, title=speedups.TITLE, words=2)
    about = speedups.caption(frame)
    return [drawn(speedups.TITLE, about, lambda: speedups.draw(frame, WIDTH), table)]
