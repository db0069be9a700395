"""Tables that are still written as text take from here what the others have from runs/table.py."""

from runs.frames import RESULTS
from runs.table import Table
from runs.table import measured as measured_line

__all__ = ["RESULTS", "line", "measured", "table"]


def measured(records: dict | list[dict], file: str) -> str:
    """The line under a table: when, where and of which commits its numbers are."""
    return f"\n{measured_line(records, file)}"


def table(headings: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A markdown table; the first `left` columns are text, the others numbers."""
    return Table.of(headings, rows, words=left).markdown()


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
