"""A table of the paper as terminal, Markdown, LaTeX or HTML text; the paper's figures are in italics."""

import html as escapes
import re
import textwrap

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runs.paper.paper_table import PaperTable, Row
from trainkit_gka.progress import console

WIDE = 150  # of a table in a file or a pipe
HEADING = 16  # letters in a line of a heading in LaTeX
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
    "²": r"$^2$",
    "³": r"$^3$",
} | {character: f"\\{character}" for character in "&%$#_{}"}
# Matrices and bandwidths with an index, a minus sign (not a hyphen), powers of ten, any other character.
TOKEN = re.compile(r"(?P<symbol>[Wσ]_\w)|(?P<sign>(?<!\w)[-+](?=[ \d]))|(?<=\d)e(?P<power>\d+)\b|.", re.DOTALL)


def terminal(table: PaperTable) -> None:
    """Print the table and its caption; a file or a pipe gets them in full width."""
    output = console if console.is_terminal else Console(width=WIDE)
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for place, heading in enumerate(table.headings):
        shown.add_column(escape(heading), justify="left" if place < table.text_columns else "right", overflow="fold")
    for rows in table.groups:
        for number, row in enumerate(rows):
            cells = [f"[italic]{escape(c)}[/]" if table.is_papers(row, n) else escape(c) for n, c in enumerate(row)]
            shown.add_row("" if number else cells[0], *cells[1:])
        shown.add_section()
    output.print(shown)
    output.print(CODE.sub(r"\1", table.caption) + "\n", highlight=False, markup=False, soft_wrap=False)


def markdown(table: PaperTable) -> str:
    """A table and its caption below."""
    alignment = ["---" if place < table.text_columns else "---:" for place in range(len(table.headings))]
    rows = [
        [f"*{cell}*" if cell and table.is_papers(row, place) else cell for place, cell in enumerate(row)]
        for row in table.rows
    ]
    rows = [[cell.replace("|", "\\|") for cell in row] for row in (table.headings, alignment, *rows)]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", table.caption, ""])


def latex_token(token: re.Match) -> str:
    if token["symbol"] or token["sign"]:
        return f"${token[0].replace('σ', LATEX['σ'][1:-1])}$"
    return rf"$\times 10^{{{token['power']}}}$" if token["power"] else LATEX.get(token[0], token[0])


def latex_text(text: str) -> str:
    """Text with everything escaped that LaTeX reads as its own; code in backticks is set in typewriter."""
    parts = CODE.split(text)
    parts[::2] = [TOKEN.sub(latex_token, part) for part in parts[::2]]
    # Two hyphens would become a dash.
    code = ["".join(LATEX.get(character, character) for character in part) for part in parts[1::2]]
    parts[1::2] = [rf"\texttt{{{part.replace('--', '-{}-')}}}" for part in code]
    return "".join(parts)


def latex_heading(text: str, alignment: str) -> str:
    """A heading, in several lines if it is long."""
    lines = [latex_text(line) for line in textwrap.wrap(text, HEADING, break_long_words=False)]
    if len(lines) < 2:
        return "".join(lines)
    return rf"\begin{{tabular}}[b]{{@{{}}{alignment}@{{}}}}" + r" \\ ".join(lines) + r"\end{tabular}"


def latex(table: PaperTable, label: str) -> str:
    """A table environment for booktabs and graphicx, not wider than the text; its notes are below the table."""
    title = f"{latex_text(table.title)} (Table {table.number} of the paper, beside ours.)"
    notes = latex_text(table.notes)
    table = table.by_measure()
    columns = "l" * table.text_columns + "r" * (len(table.headings) - table.text_columns)
    lines = [r"\begin{table}[htbp]", r"  \centering", rf"  \caption{{{title}}}", rf"  \label{{{label}}}"]
    lines += [r"  \resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"]
    lines += [rf"  \begin{{tabular}}{{{columns}}}", r"    \toprule"]
    lines.append("    " + " & ".join(map(latex_heading, table.headings, columns)) + r" \\")
    for rows in table.groups:
        lines.append(r"    \midrule")
        for number, row in enumerate(rows):
            cells = [latex_text(text) for text in ("" if number else row[0], *row[1:])]
            cells = [rf"\textit{{{c}}}" if c and table.is_papers(row, n) else c for n, c in enumerate(cells)]
            lines.append("    " + " & ".join(cells) + r" \\")
    lines += [r"    \bottomrule", r"  \end{tabular}}"]
    if notes:
        lines += [r"  \par\smallskip", rf"  \parbox{{\textwidth}}{{\footnotesize\raggedright {notes}}}"]
    return "\n".join([*lines, r"\end{table}", ""])


def html_text(text: str) -> str:
    """Escaped text; code in backticks becomes a code element."""
    parts = CODE.split(escapes.escape(text))
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def html(table: PaperTable) -> str:
    """A table element without style. Classes: `paper` on the paper's figures, `number` on columns of numbers."""

    def cell(row: Row, place: int) -> str:
        text, paper, number = row[place], table.is_papers(row, place), place >= table.text_columns
        names = " ".join(name for name, given in (("paper", paper), ("number", number)) if given)
        inside = f"<i>{html_text(text)}</i>" if paper and text else html_text(text)
        return f'<td class="{names}">{inside}</td>' if names else f"<td>{inside}</td>"

    lines = [f'<table id="table-{table.number}">', f"<caption>{html_text(table.caption)}</caption>", "<thead>"]
    kinds = ["" if place < table.text_columns else ' class="number"' for place in range(len(table.headings))]
    headings = [f'<th scope="col"{kind}>{html_text(text)}</th>' for kind, text in zip(kinds, table.headings)]
    lines.append(f"<tr>{''.join(headings)}</tr>")
    lines.append("</thead>")
    for rows in table.groups:
        scope = f'rowgroup" rowspan="{len(rows)}' if len(rows) > 1 else "row"
        lines.append("<tbody>")
        for place, row in enumerate(rows):
            first = "" if place else f'<th scope="{scope}">{html_text(row[0])}</th>'
            lines.append("<tr>" + first + "".join(cell(row, n) for n in range(1, len(row))) + "</tr>")
        lines.append("</tbody>")
    return "\n".join([*lines, "</table>", ""])
