"""A table in Markdown, whatever its cells hold, and the sentence that names its sources."""

import re

from runs.table import NOT_RUN, Table, measured

ROWS = [["\\a", "<m>", "*3.0e9*", "-0.5 ~^"], ["\\a", "W_Q of {x}", "", "±2"], ["b$|", "a-b", "5 - 4", "**1**"]]
SMALL = Table.of(["", "of", "50 %", "ours"], ROWS, title="#1 & a_b", notes=["`make a_b --c`"], words=2)


def test_markdown_keeps_its_columns_whatever_a_cell_holds():
    title, content, note = SMALL.markdown().split("\n\n")
    heads, alignment, *rows = content.splitlines()
    assert (title, note) == ("#1 & a_b", "`make a_b --c`") and alignment == "|---|---|---:|---:|"
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in (heads, *rows)} == {5} and r"b$\|" in rows[-1]
    assert Table.of(["a"], [], sources=["of nothing"]).markdown() == f"{NOT_RUN}\n\nof nothing"


def test_sources_name_each_machine_with_its_days_and_commits():
    record = {"date": "2026-11-21 17:04", "commit": "a", "hardware": "a CPU, 1 threads", "torch": "2"}
    later = {**record, "date": "2026-11-22 09:00", "commit": "b", "hardware": "a CPU, 1 thread"}
    assert measured([record, later, {**record, "hardware": "a GPU"}], "x.jsonl") == (
        "Measured 2026-11-21 to 2026-11-22 at commits a, b on a CPU, 1 thread, torch 2; "
        "2026-11-21 at commit a on a GPU, torch 2 (`runs/results/x.jsonl`)."
    )
