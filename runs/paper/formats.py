"""A table of the paper as terminal, Markdown, LaTeX or HTML text; the paper's figures are in italics."""

import html as escapes
import re

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runs.paper.paper_table import PaperTable
from trainkit.progress import console

WIDE = 150  # of a table in a file or a pipe
CODE = re.compile(r"`([^`]*)`")
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
} | {character: f"\\{character}" for character in "&%$#_{}"}


def terminal(table: PaperTable) -> None:
    """Print the table and its caption; a file or a pipe gets them in full width."""
    output = console if console.is_terminal else Console(width=WIDE)
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for place, heading in enumerate(table.headings):
        shown.add_column(escape(heading), justify="left" if place < table.text_columns else "right", overflow="fold")
    last = ""
    for row in table.rows:
        repeated = table.grouped and row[0] == last
        if table.grouped and last and not repeated:
            shown.add_section()
        last = row[0]
        shown.add_row(*map(escape, ["" if repeated else row[0], *row[1:]]))
    output.print(shown)
    output.print(CODE.sub(r"\1", table.caption) + "\n", highlight=False, markup=False)


def markdown(table: PaperTable) -> str:
    """A table and its caption below."""
    alignment = ["---" if place < table.text_columns else "---:" for place in range(len(table.headings))]
    rows = [[cell.replace("|", "\\|") for cell in row] for row in (table.headings, alignment, *table.rows)]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", table.caption, ""])


def latex_text(text: str) -> str:
    """Text with everything escaped that LaTeX reads as its own; code in backticks is set in typewriter."""
    parts = CODE.split(text)
    escaped = ["".join(LATEX.get(character, character) for character in part) for part in parts]
    # Two hyphens would become a dash.
    return "".join(
        rf"\texttt{{{part.replace('--', '-{}-')}}}" if place % 2 else part for place, part in enumerate(escaped)
    )


def latex_cell(text: str) -> str:
    """A cell; the hyphen of a negative number is a minus sign."""
    return f"${text}$" if re.fullmatch(r"[+-][\d.]+", text) else latex_text(text)


def latex(table: PaperTable, label: str) -> str:
    """A table environment for booktabs and graphicx, as wide as the text."""
    lines = [r"\begin{table}[htbp]", r"  \centering", rf"  \caption{{{latex_text(table.caption)}}}"]
    lines += [rf"  \label{{{label}}}", r"  \resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"]
    numbers = len(table.headings) - table.text_columns
    lines += [rf"  \begin{{tabular}}{{{'l' * table.text_columns}{'r' * numbers}}}", r"    \toprule"]
    lines.append("    " + " & ".join(map(latex_text, table.headings)) + r" \\")
    lines.append(r"    \midrule")
    last = table.rows[0][0]
    for row in table.rows:
        if table.grouped and row[0] != last:
            lines.append(r"    \midrule")
        last = row[0]
        lines.append("    " + " & ".join(map(latex_cell, row)) + r" \\")
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}}", r"\end{table}", ""])


def html_text(text: str) -> str:
    """Escaped text; code in backticks becomes a code element."""
    parts = CODE.split(escapes.escape(text))
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def html(table: PaperTable) -> str:
    """A table element without style. Classes: `paper` on the paper's figures, `number` on columns of numbers."""

    def cell(place: int, text: str) -> str:
        paper, number = place in table.paper_columns, place >= table.text_columns
        names = " ".join(name for name, given in (("paper", paper), ("number", number)) if given)
        inside = f"<i>{html_text(text)}</i>" if paper and text else html_text(text)
        return f'<td class="{names}">{inside}</td>' if names else f"<td>{inside}</td>"

    lines = [f'<table id="table-{table.number}">', f"<caption>{html_text(table.caption)}</caption>", "<thead>"]
    lines.append("<tr>" + "".join(f'<th scope="col">{html_text(text)}</th>' for text in table.headings) + "</tr>")
    lines.append("</thead>")
    for rows in table.groups:
        scope = f'rowgroup" rowspan="{len(rows)}' if len(rows) > 1 else "row"
        lines.append("<tbody>")
        for place, row in enumerate(rows):
            first = "" if place else f'<th scope="{scope}">{html_text(row[0])}</th>'
            lines.append("<tr>" + first + "".join(cell(1 + n, text) for n, text in enumerate(row[1:])) + "</tr>")
        lines.append("</tbody>")
    return "\n".join([*lines, "</table>", ""])
