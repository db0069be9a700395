"""A table: rows of text with a title, notes and sources, written for a terminal or as Markdown.

Cells, titles and notes may hold `code`, *italics* (figures that others published) and **bold**. The writers are ours:
a page's rows must not change their width when one of them grows, as those of pandas and tabulate do.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from trainkit_gka.progress import console
from trainkit_gka.results import hardware_of

NOT_RUN = "not run"
WIDE = 160  # letters of a line in a file or a pipe
INLINE = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<bold>[^*]+)\*\*|\*(?P<italics>[^*]+)\*")
Row = list[str]


@dataclass
class Table:
    """frame: cells of text. words: how many columns, from the left, are words; the others are numbers.

    A table without rows is written as "not run".
    """

    frame: pd.DataFrame
    title: str = ""
    notes: Row = field(default_factory=list)
    sources: Row = field(default_factory=list)
    words: int = 1

    @classmethod
    def of(cls, headings: Iterable[str], rows: Iterable[Row], **about: Any) -> "Table":
        """From rows of cells."""
        return cls(pd.DataFrame(list(rows), columns=list(headings)), **about)

    @property
    def headings(self) -> Row:
        return list(self.frame.columns)

    @property
    def rows(self) -> list[Row]:
        return self.frame.values.tolist()

    def aligned(self, word: str, number: str) -> Row:
        """For each column `word` or `number`, the two names of an alignment."""
        return [word if place < self.words else number for place in range(len(self.headings))]

    def markdown(self) -> str:
        """The title, the table, the notes and the sources, each a paragraph."""
        lines = [_line(self.headings), "|" + "|".join(self.aligned("---", "---:")) + "|", *map(_line, self.rows)]
        table = "\n".join(lines) if self.rows else NOT_RUN
        return "\n\n".join(filter(None, [self.title, table, *self.notes, *self.sources]))

    def show(self, width: int = WIDE) -> None:
        """Print the table in the width of the terminal, or in `width` letters a line into a file or a pipe."""
        output = console if console.is_terminal else Console(width=width)
        table = RichTable(box=box.SIMPLE, padding=(0, int(width >= WIDE), 0, 0))
        for heading, side in zip(self.headings, self.aligned("left", "right")):
            table.add_column(_rich(heading), justify=side, overflow="fold")
        for row in self.rows:
            table.add_row(*map(_rich, row))
        texts = [_rich(text) for text in (self.title, *self.notes, *self.sources)]
        for part in filter(None, [texts[0], table if self.rows else NOT_RUN, *texts[1:], " "]):
            output.print(part, highlight=False, soft_wrap=False)


def by_machine(records: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[str], int]]:
    """Of each machine that measured records: its name, the days in words, the commits, and how many records."""
    machines: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        machines.setdefault(f"{hardware_of(record)}, torch {record['torch']}", []).append(record)
    for machine, rows in machines.items():
        days, commits = sorted({row["date"][:10] for row in rows}), list(dict.fromkeys(row["commit"] for row in rows))
        yield machine, days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}", commits, len(rows)


def measured(records: list[dict[str, Any]], file: str) -> str:
    """A sentence: on which days, commits and machines the records were measured. file: of runs/results."""
    parts = []
    for machine, when, commits, _ in by_machine(records):
        which = f"{commits[0]} and {len(commits) - 1} others" if len(commits) > 3 else ", ".join(commits)
        parts.append(f"{when} at commit{'s' * (len(commits) > 1)} {which} on {machine}")
    return f"Measured {'; '.join(parts)} (`runs/results/{file}`)."


def _line(cells: Row) -> str:
    """A row of Markdown."""
    escaped = [re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in cells]
    return f"| {' | '.join(escaped)} |"


def styled(text: str, plain: Callable[[str], str], marks: dict[str, str]) -> str:
    """The text with its marked parts put into the templates of `marks`, all words written by `plain`."""
    parts, end = [], 0
    for match in INLINE.finditer(text):
        kind = match.lastgroup
        parts += [plain(text[end : match.start()]), marks[kind] % plain(match[kind])]
        end = match.end()
    return "".join([*parts, plain(text[end:])])


def _rich(text: str) -> str:
    return styled(text, escape, {"code": "%s", "bold": "[bold]%s[/]", "italics": "[italic]%s[/]"})
