"""The paper's tables as Markdown, LaTeX and HTML: valid text, equal rows, the paper's figures in italics."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from runs.paper import formats, tables
from runs.paper.paper_table import HEADINGS, PaperTable

NESTED = re.compile(r"\\begin{tabular}\[b\]{@{}[lr]@{}}(.*?)\\end{tabular}")  # headings in several lines


def test_latex_escapes_everything_and_sets_the_papers_figures_in_italics():
    rows = [["\\a", "W_Q of {x}", "3.0e9", "-0.5 ~^", "a-b"], ["b$", "W_Q of {x}", "", "±2", "5 - 4"]]
    table = PaperTable(9, "50 % of #1 & a_b", ["", *HEADINGS], rows, ["`make a_b --c`"])
    lines = [line.strip() for line in formats.latex(table, "tab:x").splitlines()]
    assert r"\caption{50 \% of \#1 \& a\_b (Table 9 of the paper, beside ours.)}" in lines
    assert r"\parbox{\textwidth}{\footnotesize\raggedright \texttt{make a\_b -{}-c}}" in lines
    start = lines.index(r"\toprule")
    assert lines[start + 1 : lines.index(r"\bottomrule")] == [
        r"&  & $W_Q$ of \{x\} \\",
        r"\midrule",
        r"\textbackslash{}a & \textit{paper} & \textit{3.0$\times 10^{9}$} \\",
        r"& ours & $-$0.5 \textasciitilde{}\textasciicircum{} \\",
        r"& difference & a-b \\",
        r"\midrule",
        r"b\$ & ours & $\pm$2 \\",
        r"& difference & 5 $-$ 4 \\",
    ]


def test_latex_of_every_table_closes_what_it_opens_and_has_equal_rows(tmp_path, capsys):
    tables.main(tables.PaperTablesConfig(tmp_path, "latex"))
    printed = NESTED.sub(lambda match: match[1].replace(r" \\ ", " "), capsys.readouterr().out)
    begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", printed) for word in ("begin", "end"))
    assert begun.count("tabular") == begun.count("table") == 8 and sorted(begun) == sorted(ended)
    bare = re.sub(r"\\[\\{}%&#$_]|\\label{.*}|^% Needs .*", "", printed)
    assert bare.count("{") == bare.count("}") and not re.search(r"[^\x00-\x7fö]", printed)
    outside = re.sub(r"\$[^$]*\$", "", bare)
    assert not re.search(r"[$_^~#]|%.", outside), re.search(r".*[$_^~#].*|.*%.+", outside)
    for columns, body in re.findall(r"\\begin{tabular}{(\w+)}(.*?)\\end{tabular}", printed, re.DOTALL):
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(rows) > 2 and all(row.replace(r"\&", "").count("&") == len(columns) - 1 for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex, booktabs and graphicx")
def test_latex_of_every_table_compiles_and_fits_its_page(tmp_path, capsys):
    tables.main(tables.PaperTablesConfig(tmp_path, "latex"))
    preamble, tables_only = capsys.readouterr().out.split("\n", 1)
    packages = "\n".join(re.findall(r"\\usepackage(?:\[\w+\])?{\w+}", preamble))
    document = f"\\documentclass{{article}}\n{packages}\n\\begin{{document}}\n{tables_only}\n\\end{{document}}\n"
    (tmp_path / "tables.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "tables.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0 and (tmp_path / "tables.pdf").stat().st_size > 10_000, done.stdout[-2000:]
    assert not re.search(r"Overfull|too large|Undefined|Missing character", done.stdout), done.stdout


def test_markdown_rows_have_as_many_cells_as_headings(tmp_path, capsys):
    tables.main(tables.PaperTablesConfig(tmp_path, "markdown"))
    printed = capsys.readouterr().out
    assert printed.count("| ---") >= 8
    for block in re.findall(r"(?:^\|.*\n)+", printed, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1


class Elements(HTMLParser):
    """Checks that elements close, and collects the cells of every row of every table with what they span."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[dict]]] = []
        self.captions = 0

    def handle_starttag(self, tag, attributes):
        if tag in ("html", "meta"):
            return
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append({"tag": tag, "text": "", **dict(attributes)})
        self.captions += tag == "caption"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1]["text"] += data


def test_html_tables_are_whole_and_every_heading_says_what_it_heads(tmp_path, capsys):
    tables.main(tables.PaperTablesConfig(tmp_path, "html"))
    printed = capsys.readouterr().out
    assert printed.startswith("<!doctype html>") and "style" not in printed and "<script" not in printed
    page = Elements()
    page.feed(printed)
    assert not page.open and len(page.tables) == page.captions == 8
    for head, *rows in page.tables:
        assert all((cell["tag"], cell["scope"]) == ("th", "col") for cell in head)
        covered = 0
        for row in rows:
            if not covered:
                assert row[0]["tag"] == "th" and row[0]["scope"] == ("rowgroup" if "rowspan" in row[0] else "row")
                covered = int(row[0].get("rowspan", 1))
                assert len(row) == len(head)
            else:
                assert len(row) == len(head) - 1 and all(cell["tag"] == "td" for cell in row)
            covered -= 1
        assert not covered
    figures = {cell["text"] for rows in page.tables for row in rows for cell in row if "paper" in cell.get("class", "")}
    assert {"72.2", "43,182", "0.818256", "3.0042e9", "Softmax dot Product"} <= figures and "not run" not in figures


def test_html_escapes_text_and_marks_commands_and_the_papers_figures():
    table = PaperTable(9, "a < b & c", ["Model", *HEADINGS], [["<m>", "x", "1", "2", "3"]], ["`make a<b`"])
    text = formats.html(table)
    assert "a &lt; b &amp; c <code>make a&lt;b</code>" in text and '<th scope="row">&lt;m&gt;</th>' in text
    assert '<td class="paper number"><i>1</i></td><td class="number">2</td>' in text
