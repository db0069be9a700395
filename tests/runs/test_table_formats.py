"""The paper's tables as Markdown, LaTeX and HTML: valid text, equal rows, the paper's figures in italics."""

import re
from html.parser import HTMLParser

from runs.paper import formats, tables
from runs.paper.paper_table import PaperTable


def test_latex_escapes_everything_and_closes_what_it_opens(tmp_path, capsys):
    table = PaperTable(9, "50 % of #1 & a_b", ["{x}", "~^"], [["\\a", "-0.5"], ["b$", "±2"]], ["`make a_b --c`"])
    text = formats.latex(table, "tab:x")
    assert r"50 \% of \#1 \& a\_b \texttt{make a\_b -{}-c}" in text
    assert r"\{x\} & \textasciitilde{}\textasciicircum{} \\" in text and r"\textbackslash{}a & $-0.5$ \\" in text
    assert r"b\$ & $\pm$2" in text
    tables.main(tables.PaperTablesConfig(tmp_path, "latex"))
    printed = capsys.readouterr().out
    begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", printed) for word in ("begin", "end"))
    assert begun.count("tabular") == begun.count("table") == 8 and sorted(begun) == sorted(ended)
    bare = re.sub(r"\\[\\{}%&#$_]", "", printed)
    assert bare.count("{") == bare.count("}") and not re.search(r"[^\x00-\x7fö]", printed)
    for body in re.findall(r"\\begin{tabular}{(\w+)}(.*?)\\end{tabular}", printed, re.DOTALL):
        rows = [line for line in body[1].splitlines() if line.endswith(r"\\")]
        assert rows and all(row.replace(r"\&", "").count("&") == len(body[0]) - 1 for row in rows)


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
    assert {"72.2", "43182", "0.818256", "3.0042e9", "Softmax dot Product"} <= figures and "not run" not in figures


def test_html_escapes_text_and_marks_commands_and_the_papers_figures():
    table = PaperTable(9, "a < b & c", ["Model", "Measure", "Paper", "Ours"], [["<m>", "x", "1", "2"]], ["`make a<b`"])
    text = formats.html(table)
    assert "a &lt; b &amp; c <code>make a&lt;b</code>" in text and '<th scope="row">&lt;m&gt;</th>' in text
    assert '<td class="paper number"><i>1</i></td><td class="number">2</td>' in text
