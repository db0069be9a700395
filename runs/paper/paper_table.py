"""A table of the paper beside ours, and how its cells are written."""

import itertools
from dataclasses import dataclass, field, replace

NOT_RUN = "not run"
HEADINGS = ["Measure", "Paper", "Ours", "Ours - paper"]
SOURCES = ["paper", "ours", "difference"]
Row = list[str]


@dataclass
class PaperTable:
    """A table of the paper beside ours: rows of what it is about, measure, paper, ours, difference.

    text_columns: how many of the first columns are text.
    """

    number: int
    title: str
    headings: Row
    rows: list[Row]
    remarks: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    text_columns: int = 2

    def is_papers(self, row: Row, place: int) -> bool:
        """Whether a cell is the paper's figure, which is set in italics."""
        return self.headings[place] == HEADINGS[1] or (place > 0 and row[1] == SOURCES[0])

    @property
    def groups(self) -> list[list[Row]]:
        """Neighbouring rows with the same first cell."""
        return [list(rows) for _, rows in itertools.groupby(self.rows, key=lambda row: row[0])]

    @property
    def notes(self) -> str:
        """Remarks, and the commands that would fill the cells that nobody measured; code is in backticks."""
        lacking = [f'Cells with "{NOT_RUN}" are filled by {", ".join(f"`{name}`" for name in self.commands)}.']
        return " ".join([*self.remarks, *(lacking * bool(self.commands))])

    @property
    def caption(self) -> str:
        """Which table this is, and the notes."""
        return f"Table {self.number} of the paper. {self.title} {self.notes}".strip()

    def by_measure(self) -> "PaperTable":
        """The same as the paper lays it out, a column for each measure; paper, ours and difference are rows.

        Rows in which nothing stands are left out.
        """
        measures = list(dict.fromkeys(row[1] for row in self.rows))
        rows = []
        for group in self.groups:
            cells = {row[1]: row[2:] for row in group}
            for place, name in enumerate(SOURCES):
                values = [cells[measure][place] if measure in cells else "" for measure in measures]
                rows += [[group[0][0], name, *values]] if any(values) else []
        return replace(self, headings=[self.headings[0], "", *measures], rows=rows)


def decimals(printed: str) -> int:
    return len(printed.partition("e")[0].partition(".")[2])


def thousands(printed: str) -> str:
    """Whole numbers with a comma, as the paper sets them."""
    return f"{int(printed):,}" if printed.isdigit() else printed


def written(value: float, printed: str) -> str:
    """Our number with one digit more than the paper's; whole numbers and thousands as they are."""
    places = decimals(printed)
    if "e" in printed:
        return f"{value:.{places + 1}e}".replace("e+", "e").replace("e0", "e")
    if isinstance(value, int) or (abs(value) >= 1000 and not places):
        return f"{value:,.0f}"
    return f"{value:,.{places + 1}f}"


def alone(value: float, printed: str) -> str:
    """Our number of a run of any size, which the paper has no figure for; `printed` is another in its column."""
    return written(value, printed) if "e" in printed else f"{value:,.5g}"


def signed(value: float, places: int) -> str:
    text = f"{value:+,.{places}f}"
    return text if text.strip("+-0.,") else "0"


def compare(printed: str | None, ours: float | None) -> Row:
    """Paper, ours, difference; relative from a thousand up."""
    if printed is None or ours is None:
        return [thousands(printed or ""), NOT_RUN if ours is None else f"{ours:,.4g}", ""]
    paper = float(printed)
    if "e" in printed or abs(paper) >= 1000:
        relative = signed(100 * (ours / paper - 1), 2)
        return [thousands(printed), written(ours, printed), relative if relative == "0" else f"{relative} %"]
    return [
        printed,
        written(ours, printed),
        signed(ours - paper, 0 if isinstance(ours, int) else decimals(printed) + 1),
    ]


def percent(ours: float, base: float) -> float:
    return 100 * (ours / base - 1)
