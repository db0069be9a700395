"""A table: rows of text with a title, notes and sources, written for a terminal, Markdown, LaTeX or HTML.

Cells, titles and notes may hold `code`, *italics* (what others published) and **bold**; each writer sets them its way.
The writers are our own: a page's rows must not change their width when one of them grows, and neighbouring rows of one
model share their first cell, which neither pandas nor tabulate does.
"""

import html as escapes
import re
import textwrap
from collections.abc import Callable, Iterable
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
NAME = 20  # letters of a name
WIDE = 160  # letters of a line in a file or a pipe
HEADING = 16  # letters in a line of a heading in LaTeX
INLINE = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<bold>[^*]+)\*\*|\*(?P<italics>[^*]+)\*")
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "Δ": r"$\Delta$",
    "σ": r"$\sigma$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "²": r"$^2$",
    "³": r"$^3$",
} | {character: f"\\{character}" for character in "&%$#_{}"}
# Matrices and bandwidths with an index, a minus sign (not a hyphen), powers of ten, any other character.
TOKEN = re.compile(r"(?P<symbol>[Wσ]_\w)|(?P<sign>(?<!\w)[-+](?=[ \d]))|(?<=\d)e(?P<power>\d+)\b|.", re.DOTALL)
Row = list[str]


@dataclass
class Table:
    """frame: cells of text, whose first `words` columns are words and the others numbers. label: of LaTeX and HTML.

    A table without rows is written as "not run".
    """

    frame: pd.DataFrame
    title: str = ""
    notes: Row = field(default_factory=list)
    sources: Row = field(default_factory=list)
    words: int = 1
    label: str = ""

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

    def groups(self) -> list[list[Row]]:
        """Neighbouring rows with the same first cell, which only the first of them keeps."""
        groups: list[list[Row]] = []
        for number, row in enumerate(self.rows):
            if number and row[0] == self.rows[number - 1][0]:
                groups[-1].append(["", *row[1:]])
            else:
                groups.append([row])
        return groups

    def aligned(self, word: str, number: str) -> Row:
        """What stands for the alignment of each column."""
        return [word if place < self.words else number for place in range(len(self.headings))]

    def markdown(self) -> str:
        """The title, the table, the notes and the sources, each a paragraph."""
        lines = [_line(self.headings), "|" + "|".join(self.aligned("---", "---:")) + "|", *map(_line, self.rows)]
        shown = "\n".join(lines) if self.rows else NOT_RUN
        return "\n\n".join(filter(None, [self.title, shown, *self.notes, *self.sources]))

    def show(self, width: int = WIDE) -> None:
        """Print the table in the width of the terminal; a file or a pipe gets so many letters a line."""
        output = console if console.is_terminal else Console(width=width)
        shown = RichTable(box=box.SIMPLE, padding=(0, int(width >= WIDE), 0, 0))
        for place, (heading, side) in enumerate(zip(self.headings, self.aligned("left", "right"))):
            names = place == 0 and all(len(row[0]) <= NAME for row in self.rows)  # that stay in one line
            shown.add_column(_rich(heading), justify=side, overflow="fold", no_wrap=names)
        for rows in self.groups():
            for row in rows:
                shown.add_row(*map(_rich, row), end_section=row is rows[-1] and len(rows) > 1)
        texts = [_rich(text) for text in (self.title, *self.notes, *self.sources)]
        for part in filter(None, [texts[0], shown if self.rows else NOT_RUN, *texts[1:], " "]):
            output.print(part, highlight=False, soft_wrap=False)

    def latex(self) -> str:
        """A table environment for booktabs and graphicx, not wider than the text; its notes are below the table."""
        lines = [r"\begin{table}[htbp]", r"  \centering", rf"  \caption{{{_latex(self.title)}}}"]
        lines += [rf"  \label{{{self.label}}}"] if self.label else []
        lines += [r"  \resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"]
        columns = self.aligned("l", "r")
        lines += [rf"  \begin{{tabular}}{{{''.join(columns)}}}", r"    \toprule"]
        lines += ["    " + " & ".join(map(_latex_heading, self.headings, columns)) + r" \\"]
        for rows in self.groups():
            lines += [r"    \midrule", *("    " + " & ".join(map(_latex, row)) + r" \\" for row in rows)]
        lines += [r"    \bottomrule", r"  \end{tabular}}"]
        if notes := _latex(" ".join([*self.notes, *self.sources])):
            lines += [r"  \par\smallskip", rf"  \parbox{{\textwidth}}{{\footnotesize\raggedright {notes}}}"]
        return "\n".join([*lines, r"\end{table}", ""])

    def html(self) -> str:
        """A table element without style. Columns of numbers have the class `number`; what is in italics is `i`."""
        caption = _html(" ".join(filter(None, [self.title, *self.notes, *self.sources])))
        kinds = self.aligned("", ' class="number"')
        heads = "".join(f'<th scope="col"{kind}>{_html(cell)}</th>' for kind, cell in zip(kinds, self.headings))
        name = f' id="{escapes.escape(self.label)}"' if self.label else ""
        lines = [f"<table{name}>", f"<caption>{caption}</caption>", f"<thead>\n<tr>{heads}</tr>\n</thead>"]
        for rows in self.groups():
            scope = f'rowgroup" rowspan="{len(rows)}' if len(rows) > 1 else "row"
            lines.append("<tbody>")
            for row in rows:
                first = f'<th scope="{scope}">{_html(row[0])}</th>' if row is rows[0] else ""
                others = "".join(f"<td{kind}>{_html(cell)}</td>" for kind, cell in zip(kinds[1:], row[1:]))
                lines.append(f"<tr>{first}{others}</tr>")
            lines.append("</tbody>")
        return "\n".join([*lines, "</table>", ""])


def measured(records: dict[str, Any] | list[dict[str, Any]], file: str) -> str:
    """When, where and of which commits the numbers of a file of runs/results are, of one record or of several."""
    by_machine: dict[str, list[dict[str, Any]]] = {}
    for record in [records] if isinstance(records, dict) else records:
        by_machine.setdefault(f"{hardware_of(record)}, torch {record['torch']}", []).append(record)
    parts = []
    for machine, rows in by_machine.items():
        days, commits = sorted({row["date"][:10] for row in rows}), list(dict.fromkeys(row["commit"] for row in rows))
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        which = f"{commits[0]} and {len(commits) - 1} others" if len(commits) > 3 else ", ".join(commits)
        parts.append(f"{when} at commit{'s' * (len(commits) > 1)} {which} on {machine}")
    return f"Measured {'; '.join(parts)} (`runs/results/{file}`)."


def _line(cells: Row) -> str:
    """A row of Markdown."""
    escaped = [re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _inline(text: str, plain: Callable[[str], str], marks: dict[str, str], code: Callable[[str], str]) -> str:
    """The text written by `plain`, its code by `code`; marked parts are put into the templates of `marks`."""
    parts, end = [], 0
    for match in INLINE.finditer(text):
        kind = match.lastgroup
        inner = (code if kind == "code" else plain)(match[kind])
        parts += [plain(text[end : match.start()]), marks[kind] % inner]
        end = match.end()
    return "".join([*parts, plain(text[end:])])


def _rich(text: str) -> str:
    return _inline(text, escape, {"code": "%s", "bold": "[bold]%s[/]", "italics": "[italic]%s[/]"}, escape)


def _html(text: str) -> str:
    marks = {"code": "<code>%s</code>", "bold": "<b>%s</b>", "italics": "<i>%s</i>"}
    return _inline(text, escapes.escape, marks, escapes.escape)


def _latex(text: str) -> str:
    """Everything that LaTeX reads as its own is escaped."""
    marks = {"code": r"\texttt{%s}", "bold": r"\textbf{%s}", "italics": r"\textit{%s}"}
    return _inline(text, lambda words: TOKEN.sub(_latex_token, words), marks, _latex_code)


def _latex_code(text: str) -> str:
    """Two hyphens would become a dash."""
    return "".join(LATEX.get(character, character) for character in text).replace("--", "-{}-")


def _latex_token(token: re.Match[str]) -> str:
    if token["symbol"] or token["sign"]:
        return f"${token[0].replace('σ', LATEX['σ'][1:-1])}$"
    return rf"$\times 10^{{{token['power']}}}$" if token["power"] else LATEX.get(token[0], token[0])


def _latex_heading(text: str, side: str) -> str:
    """A heading, in several lines if it is long."""
    lines = [_latex(line) for line in textwrap.wrap(text, HEADING, break_long_words=False)]
    stacked = r" \\ ".join(lines)
    return rf"\shortstack[{side}]{{{stacked}}}" if len(lines) > 1 else stacked
