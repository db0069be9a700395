"""The READMEs' measured tables: blocks of pages, and the reader of result files."""

import json
import shlex

import pytest

from bench_lines import write_lines
from runs import frames, pages, tables
from runs.bench import report
from runs.demo.language import COLUMNS
from runs.study import analyse
from trainkit_gka.cli import UserError

RECORD = {"date": "2026-11-21 17:04", "commit": "a14f06e", "hardware": "a CPU, 2 threads", "torch": "2.14"}


def test_the_pages_say_what_the_result_files_say():
    tables.main(tables.TablesConfig(check=True))


def test_commands_of_results_can_be_given_anywhere():
    """They are of the repository's root, and no path of the machine that ran them is in them."""
    for path in sorted(frames.RESULTS.rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            words = shlex.split(json.loads(line).get("command", ""))
            assert not [word for word in words if word.startswith(("/", "~")) or "=/" in word], (path, words)


def test_every_block_of_a_page_has_one_program_that_writes_it():
    written = {*tables.PAGES, *report.PAGES, "docs/accuracy.md"}
    blocks = [name for page in written for name in pages.block().findall((pages.ROOT / page).read_text())]
    assert sorted(blocks) == sorted([*tables.TABLES, *report.TABLES, "errors"])
    blocks = [name for page in analyse.PAGES for name in pages.block("study").findall((pages.ROOT / page).read_text())]
    assert sorted(blocks) == sorted(analyse.TABLES)


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
    for line, reason in (("{", "is not JSON"), ("[]", "is not a record"), (json.dumps(incomplete), "has no gap")):
        (tmp_path / "demo.jsonl").write_text(json.dumps(row) + "\n" + line + "\n")
        with pytest.raises(UserError, match=rf"demo\.jsonl, line 2: {reason}; delete the line and measure again"):
            tables.TABLES["demo"]()
    row = {**row, "kind": "bench_gpt", "config": {"case": "d4"}}
    write_lines(tmp_path / "bench_gpt_a-cpu-2-threads.jsonl", {**row, "kind": "other"}, row)
    with pytest.raises(UserError, match=r"bench_gpt_a-cpu-2-threads\.jsonl, line 2: has no phase"):
        report.decode()
