"""A table of the paper beside ours, and how its cells are written."""

import itertools
from dataclasses import dataclass, field

NOT_RUN = "not run"
Row = list[str]


@dataclass
class PaperTable:
    """A table of the paper beside ours. text_columns: how many of the first columns are text."""

    number: int
    title: str
    headings: Row
    rows: list[Row]
    remarks: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    text_columns: int = 2
    paper_columns: frozenset[int] = frozenset()  # those with the paper's figures, which are set in italics

    def __post_init__(self) -> None:
        named = {place for place, heading in enumerate(self.headings) if heading.startswith("Paper")}
        self.paper_columns = self.paper_columns or frozenset(named)

    @property
    def grouped(self) -> bool:
        """Whether rows come in groups of the same first cell."""
        return len({row[0] for row in self.rows}) < len(self.rows)

    @property
    def groups(self) -> list[list[Row]]:
        """Neighbouring rows with the same first cell; every row alone if there are none."""
        return [list(rows) for _, rows in itertools.groupby(self.rows, key=lambda row: row[0])]

    @property
    def caption(self) -> str:
        """Remarks, and the commands that would fill the cells that nobody measured; code is in backticks."""
        lacking = [f'Cells with "{NOT_RUN}" are filled by {", ".join(f"`{name}`" for name in self.commands)}.']
        return " ".join(
            [f"Table {self.number} of the paper. {self.title}", *self.remarks, *(lacking * bool(self.commands))]
        )


def decimals(printed: str) -> int:
    return len(printed.partition("e")[0].partition(".")[2])


def written(value: float, printed: str) -> str:
    """Our number with one digit more than the paper's; whole numbers and thousands as they are."""
    places = decimals(printed)
    if "e" in printed:
        return f"{value:.{places + 1}e}".replace("e+", "e").replace("e0", "e")
    if isinstance(value, int) or (abs(value) >= 1000 and not places):
        return f"{value:,.0f}"
    return f"{value:,.{places + 1}f}"


def signed(value: float, places: int) -> str:
    text = f"{value:+,.{places}f}"
    return text if text.strip("+-0.,") else "0"


def compare(printed: str | None, ours: float | None) -> Row:
    """Paper, ours, difference; relative from a thousand up."""
    if printed is None or ours is None:
        return [printed or "", NOT_RUN if ours is None else f"{ours:,.4g}", ""]
    paper = float(printed)
    if "e" in printed or abs(paper) >= 1000:
        relative = signed(100 * (ours / paper - 1), 2)
        return [printed, written(ours, printed), relative if relative == "0" else f"{relative} %"]
    return [
        printed,
        written(ours, printed),
        signed(ours - paper, 0 if isinstance(ours, int) else decimals(printed) + 1),
    ]


def percent(ours: float, base: float) -> float:
    return 100 * (ours / base - 1)
