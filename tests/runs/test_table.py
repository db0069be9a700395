"""A table as a terminal, Markdown, LaTeX and HTML show it: valid text, equal rows, everything escaped."""

import re

from html_elements import Elements
from runs import table
from runs.comparison import tables
from runs.table import NOT_RUN, Table, measured

STACKED = re.compile(r"\\shortstack\[[lr]\]{(.*?)}(?= [&\\])")  # headings in several lines
ROWS = [["\\a", "<m>", "*3.0e9*", "-0.5 ~^"], ["\\a", "W_Q of {x}", "", "±2"], ["b$|", "a-b", "5 - 4", "**1**"]]
SMALL = Table.of(["", "of", "50 %", "ours"], ROWS, title="#1 & a_b", notes=["`make a_b --c`"], words=2, label="tab:x")


def test_latex_escapes_everything_and_groups_rows():
    lines = [line.strip() for line in SMALL.latex().splitlines()]
    assert r"\caption{\#1 \& a\_b}" in lines and r"\label{tab:x}" in lines
    assert any(r"\texttt{make a\_b -{}-c}" in line for line in lines)
    start = lines.index(r"\toprule")
    assert lines[start + 1 : lines.index(r"\bottomrule")] == [
        r"& of & 50 \% & ours \\",
        r"\midrule",
        r"\textbackslash{}a & \textless{}m\textgreater{} & \textit{3.0$\times 10^{9}$} & "
        r"$-$0.5 \textasciitilde{}\textasciicircum{} \\",
        r"& $W_Q$ of \{x\} &  & $\pm$2 \\",
        r"\midrule",
        r"b\$\textbar{} & a-b & 5 $-$ 4 & \textbf{1} \\",
    ]


def test_markdown_keeps_its_columns_whatever_a_cell_holds():
    title, shown, note = SMALL.markdown().split("\n\n")
    heads, alignment, *rows = shown.splitlines()
    assert (title, note) == ("#1 & a_b", "`make a_b --c`") and alignment == "|---|---|---:|---:|"
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in (heads, *rows)} == {5} and r"b$\|" in rows[-1]
    assert Table.of(["a"], [], sources=["of nothing"]).markdown() == f"{NOT_RUN}\n\nof nothing"


def test_the_terminal_gets_its_own_width_and_no_marks(monkeypatch, capsys):
    wide = Table.of(["", "of"], [["word " * 60, "*1*"], ["[b]", "`2`"]], title="a `b`")
    wide.show()
    assert max(map(len, capsys.readouterr().out.splitlines())) <= table.WIDE
    monkeypatch.setattr(table, "console", table.Console(force_terminal=True, width=40, color_system=None))
    wide.show()
    printed = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert max(map(len, printed.splitlines())) <= 40 and "[b]" in printed and not set("*`") & set(printed)


def test_html_is_whole_and_every_heading_says_what_it_heads():
    text = SMALL.html()
    cells = Elements(text).tagged("th", "td")
    head, first, second, third = cells[:4], cells[4:8], cells[8:11], cells[11:]
    assert "<caption>#1 &amp; a_b <code>make a_b --c</code></caption>" in text and len(third) == 4
    assert [cell["scope"] for cell in head] == ["col"] * 4
    assert (first[0]["scope"], first[0]["rowspan"], third[0]["scope"]) == ("rowgroup", "2", "row")
    assert first[1]["text"] == "<m>" and second[1].get("class") == "number"
    assert '<td class="number"><i>3.0e9</i></td>' in text


def test_latex_of_the_papers_tables_closes_what_it_opens_and_has_equal_rows(tmp_path, capsys):
    tables.main(tables.PaperTablesConfig(tmp_path, "latex"))
    printed = STACKED.sub(lambda match: match[1].replace(r" \\ ", " "), capsys.readouterr().out)
    begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", printed) for word in ("begin", "end"))
    assert begun.count("tabular") == begun.count("table") == 8 and sorted(begun) == sorted(ended)
    bare = re.sub(r"\\[\\{}%&#$_]|\\label{.*}|^% Needs .*", "", printed)
    assert bare.count("{") == bare.count("}") and not re.search(r"[^\x00-\x7fö]", printed)
    outside = re.sub(r"\$[^$]*\$", "", bare)
    assert not re.search(r"[$_^~#]|%.", outside), re.search(r".*[$_^~#].*|.*%.+", outside)
    for columns, body in re.findall(r"\\begin{tabular}{(\w+)}(.*?)\\end{tabular}", printed, re.DOTALL):
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(rows) > 2 and all(row.replace(r"\&", "").count("&") == len(columns) - 1 for row in rows)


def test_sources_name_each_machine_with_its_days_and_commits():
    record = {"date": "2026-11-21 17:04", "commit": "a", "hardware": "a CPU, 1 threads", "torch": "2"}
    later = {**record, "date": "2026-11-22 09:00", "commit": "b", "hardware": "a CPU, 1 thread"}
    said = measured([record, later, {**record, "hardware": "a GPU"}], "x.jsonl")
    assert said == (
        "Measured 2026-11-21 to 2026-11-22 at commits a, b on a CPU, 1 thread, torch 2; "
        "2026-11-21 at commit a on a GPU, torch 2 (`runs/results/x.jsonl`)."
    )
