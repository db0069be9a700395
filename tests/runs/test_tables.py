"""The pages' measured tables: their blocks, the reader of result files, Markdown; pictures of forms and mathematics."""

import importlib
import json
import re
from pathlib import Path

import pytest

from bench_lines import write_lines
from runs import frames, mathematics, pages, tables
from runs.bench import error, report
from runs.demo.language import COLUMNS
from runs.study import analyse
from runs.table import NOT_RUN, Table, measured
from trainkit_gka.cli import UserError

RECORD = {"date": "2026-11-21 17:04", "commit": "a14f06e", "hardware": "a CPU, 2 threads", "torch": "2.14"}


@pytest.mark.parametrize(
    "main, config",
    [
        (tables.main, tables.TablesConfig),
        (report.main, report.BenchReportConfig),
        (analyse.main, analyse.AnalyseConfig),
        (error.main, error.ErrorConfig),
    ],
)
def test_the_pages_say_what_the_result_files_say(main, config):
    main(config(check=True))


def test_a_page_out_of_date_ends_the_check_with_1_and_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    other = "<!-- table:other -->\nold\n<!-- /table -->\n"
    (tmp_path / "README.md").write_text(f"<!-- table:gpus -->\nold\n<!-- /table -->\n{other}")
    builders = {"gpus": report.gpus}
    with pytest.raises(SystemExit) as stopped:
        pages.write(builders, ["README.md"], "this", check=True)
    assert stopped.value.code == 1 and "README.md is out of date: run this" in capsys.readouterr().err
    pages.write(builders, ["README.md"], "this", check=False)
    pages.write(builders, ["README.md"], "this", check=True)
    text = (tmp_path / "README.md").read_text()
    assert "NVIDIA H200" in text and text.endswith(other)
    with pytest.raises(UserError, match="no page has a block for the table speed"):
        pages.write({"speed": report.one_machine}, ["README.md"], "this", check=True)


def test_a_damaged_line_is_named_with_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    row = {**RECORD, "config": {"model_tag": "d4-softmax-400"}, "metrics": dict.fromkeys(COLUMNS, 1)}
    incomplete = {**row, "metrics": {**row["metrics"], "kind": 1}}
    del incomplete["metrics"]["gap"]
    for line, reason in (("{", "has no date, .*"), ("[]", "has no date, .*"), (json.dumps(incomplete), "has no gap")):
        (tmp_path / "demo.jsonl").write_text(json.dumps(row) + "\n" + line + "\n")
        with pytest.raises(UserError, match=rf"demo\.jsonl, line 2: {reason}; delete the line and measure again"):
            tables.TABLES["demo"]()
    row = {**row, "kind": "bench_gpt", "config": {"case": "d4"}}
    write_lines(tmp_path / "bench_gpt_a-cpu-2-threads.jsonl", {**row, "kind": "other"}, row)
    with pytest.raises(UserError, match=r"bench_gpt_a-cpu-2-threads\.jsonl, line 2: has no phase"):
        report.decode()


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


def test_pictures_of_the_mathematics_are_small(tmp_path):
    for draw in (mathematics.kernel, mathematics.softmax, mathematics.translation):
        assert 0 < draw(tmp_path).stat().st_size < 150_000


@pytest.mark.parametrize("path", sorted(Path("runs").rglob("[a-z]*.py")), ids=str)
def test_every_module_can_be_imported(path):
    """A name that moved is found before a benchmark of an hour ends with it."""
    importlib.import_module(".".join(path.with_suffix("").parts))
