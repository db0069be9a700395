"""Charts as SVG inside the page: colours that follow light and dark mode, alternative text, a table of the points."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup, escape

from runs.figures import PALETTE, Look
from runs.report.blocks import Picture, number
from runs.table import Row, Table
from trainkit_gka.plots import subplots

WIDTH, HEIGHT = 5.4, 3.3  # inches; a phone shows the text at nearly its own size
INK = "#00fe01"  # stands for the page's text colour
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 10,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.15,
    "legend.frameon": False,
} | dict.fromkeys(
    ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"),
    INK,
)


@dataclass(frozen=True)
class Series:
    """A line: its points (x, y) in order.

    band: for every point the lowest and highest of what y is the mean of.
    """

    label: str
    points: list[tuple[float, float]]
    look: Look
    band: list[tuple[float, float]] | None = None
    marker: bool = False


def lines(title: str, caption: str, x: str, y: str, series: list[Series]) -> Picture:
    """A chart of lines over x; its table has a row for every x."""
    with matplotlib.rc_context(STYLE):
        figure, axis = subplots(figsize=(WIDTH, HEIGHT))
        for line in series:
            marker = line.look.marker if line.marker or len(line.points) < 2 else None
            axis.plot(*zip(*line.points), **line.look(line.label, marker=marker, markersize=3.5, linewidth=1.6))
            if line.band:
                xs = [place for place, _ in line.points]
                axis.fill_between(xs, *zip(*line.band), color=line.look.colour, alpha=0.15, linewidth=0)
        axis.set(xlabel=x, ylabel=y)
        axis.grid()
        _legend(figure, axis, len(series))
        ends = [f"{line.label} from {number(line.points[0][1])} to {number(line.points[-1][1])}" for line in series]
        alternative = f"Line chart, {title}: {y} over {x}. {'; '.join(ends)}."
        return Picture(title, caption, svg(figure, alternative), table_of(title, x, series))


def _legend(figure, axis, count: int) -> None:
    """The legend above the axes, where it hides no line, in as many rows as it needs."""
    columns = 2 if count > 1 else 1
    rows = -(-count // columns)
    figure.set_size_inches(WIDTH, HEIGHT + 0.19 * rows)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2, handlelength=2.2)


def table_of(title: str, x: str, series: list[Series]) -> Table:
    """The points of a chart: a row for every x, a column for every line, its range beside it where it has one."""
    places = sorted({place for line in series for place, _ in line.points})
    headings, columns = [x], []
    for line in series:
        headings.append(line.label)
        columns.append({place: number(value) for place, value in line.points})
        if line.band:
            headings.append("range")
            ranges = zip(line.points, line.band)
            columns.append({place: f"{number(low)} to {number(high)}" for (place, _), (low, high) in ranges})
    rows: list[Row] = [[number(place), *(column.get(place, "") for column in columns)] for place in places]
    return Table.of(headings, rows, title=title)


def drawn(title: str, caption: str, draw: Callable[[], Any], table: Table) -> Picture:
    """A figure of another room as a chart of the page. draw: makes it."""
    with matplotlib.rc_context(STYLE):
        figure = draw()
        return Picture(title, caption, svg(figure, f"Chart, {title}: {caption}"), table)


def svg(figure, alternative: str) -> Markup:
    """The figure as an svg element for a page: as wide as its box, the same bytes each time, in the page's colours."""
    if figure.get_layout_engine() is None:
        figure.tight_layout(pad=0.4)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for part in ("metadata", "style"):  # the style would be of the whole page; ours has it
        text = re.sub(rf"<{part}.*?</{part}>", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)[0]
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    rest = _own_ids(rest, re.sub(r"\W+", "-", alternative.split(":")[0].lower()))
    rest = rest.replace(INK, "currentColor")
    for place, colour in enumerate(PALETTE):  # the style sheet has others for dark mode
        rest = rest.replace(colour, f"var(--series-{place})")
    return Markup(f'<svg class="chart" {names} {box} role="img" aria-label="{escape(alternative)}">{rest}')


def _own_ids(text: str, prefix: str) -> str:
    """The SVG without the ids that nothing refers to; the others are the chart's own among all on a page."""
    used = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    return re.sub(r'(?<= id=")([\w-]+)(?=")|(?<=[("]#)([\w-]+)', lambda found: f"{prefix}-{found[0]}", text)
