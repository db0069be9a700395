"""The READMEs' measured tables: what the result files say, of today's models alone."""

import json
import shlex
from pathlib import Path

import pandas as pd
import pytest

from bench_lines import write_lines
from runs import frames, pages
from runs.bench.results import facts_of
from runs.demo.report import COLUMNS
from runs.tables import __main__ as tables
from runs.tables import machine, speed, speedups
from shown import shown
from trainkit_gka.cli import UserError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "runs/results"
RECORD = {"date": "2026-11-21 17:04", "commit": "a14f06e", "hardware": "a CPU, 2 threads", "torch": "2.14"}


def test_the_pages_say_what_the_result_files_say():
    tables.main(tables.TablesConfig(check=True))


def test_commands_of_results_can_be_given_anywhere():
    """They are of the repository's root, and no path of the machine that ran them is in them."""
    for path in sorted(RESULTS.rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            words = shlex.split(json.loads(line).get("command", ""))
            assert not [word for word in words if word.startswith(("/", "~")) or "=/" in word], (path, words)


def test_a_damaged_line_is_named_by_its_place_in_the_file(tmp_path):
    lines = [{**RECORD, "kind": kind, "config": {}, "metrics": {}} for kind in ("a", "b", "a", "b")]
    lines[1]["config"] = {"case": "x"}
    write_lines(tmp_path / "rows.jsonl", *lines)
    assert len(frames.frame(tmp_path / "rows.jsonl", kind="b")) == 2
    with pytest.raises(UserError, match=r"rows\.jsonl, line 4: has no case"):
        frames.frame(tmp_path / "rows.jsonl", "case", kind="b")


def test_every_table_is_on_one_page():
    names = [found for page in tables.PAGES for found in tables.BLOCK.findall((ROOT / page).read_text())]
    assert sorted(names) == sorted(tables.TABLES)


def test_a_block_of_an_unknown_table_is_named():
    with pytest.raises(UserError, match=r"README\.md has a block table:speeds; known are speed, "):
        tables.render("README.md", "<!-- table:speeds -->\n<!-- /table -->\n")


def test_a_page_out_of_date_ends_the_check_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", ["README.md", "gka.md"])
    (tmp_path / "README.md").write_text("<!-- table:errors -->\nold\n<!-- /table -->\n")
    (tmp_path / "gka.md").write_text("<!-- table:sizes -->\nold\n<!-- /table -->\n")
    with pytest.raises(SystemExit) as left:
        tables.main(tables.TablesConfig(check=True))
    said = capsys.readouterr().err
    assert left.value.code == 1 and all(f"{name} is out of date" in said for name in ("README.md", "gka.md"))
    assert "old" in (tmp_path / "gka.md").read_text()
    tables.main(tables.TablesConfig())
    tables.main(tables.TablesConfig(check=True))


def test_a_damaged_line_is_named_with_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    whole = {**RECORD, "config": {"model_tag": "d4-softmax-400"}, "metrics": dict.fromkeys(COLUMNS, 1)}
    holes = {**whole, "metrics": {**whole["metrics"], "kind": 1}}
    del holes["metrics"]["gap"]
    for line, reason in (("{", "is not JSON"), ("[]", "is not a record"), (json.dumps(holes), "has no gap")):
        (tmp_path / "demo.jsonl").write_text(json.dumps(whole) + "\n" + line + "\n")
        with pytest.raises(UserError, match=rf"demo\.jsonl, line 2: {reason}; delete the line and measure again"):
            tables.block("demo", "README.md")
    write_lines(
        tmp_path / "bench_gpt_a-cpu-2-threads.jsonl", *[{**whole, "kind": "bench_gpt", "config": {"case": "d4"}}]
    )
    with pytest.raises(UserError, match=r"bench_gpt_a-cpu-2-threads\.jsonl, line 1: has no phase"):
        tables.block("decode", "runs/README.md")


@pytest.mark.parametrize("name", ["attention", "deit", "gpt"])
def test_rows_say_what_their_candidates_are(name):
    """As their names do, which nothing else reads."""
    lines = [line for path in RESULTS.glob(f"bench_{name}_*.jsonl") for line in frames.records(path)]
    assert len(lines) > 20
    for record in lines:
        config = record["config"]
        facts = facts_of(config["candidate"], config["phase"], config, record["hardware"])
        assert facts.items() <= config.items() and facts["family"] in ("softmax", "gka"), config


def timed(hardware: str, case: str, phase: str, times: dict[str, tuple[str, float]], **settings):
    """Lines of one comparison; times: candidate -> role and milliseconds."""
    for candidate, (role, milliseconds) in times.items():
        where = {"case": case, "phase": phase, "group": f"{case} {phase}", "quick": False}
        metrics = {"status": "ok", "median_ms": milliseconds}
        config = {**where, "candidate": candidate, "role": role, **settings.get("config", {})}
        config |= facts_of(candidate, phase, {"dtype": "float32", **config}, hardware)
        kind = settings.get("kind", "bench_attention")
        yield {**RECORD, "kind": kind, "hardware": hardware, "config": config, "metrics": metrics}


def test_a_benchmark_without_lines_is_passed_over(tmp_path, monkeypatch):
    """As a file is after its damaged and only line was deleted."""
    (tmp_path / "bench_attention_a-cpu-1-thread.jsonl").write_text("")
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    assert speed.operator() == []


def test_the_table_of_the_operator_names_the_baseline_and_has_threads_side_by_side(tmp_path, monkeypatch):
    shape = {"batch": 1, "tokens": 512, "queries": 512, "heads": 4, "head_dim": 32, "causal": True, "window": 64}
    shape["dtype"] = "bfloat16"
    for threads, (dense, blocks, single) in {"1 thread": (90.0, 40.0, 30.0), "2 threads": (50.0, 19.0, 21.0)}.items():
        times = {"gka cpu": ("ours", 10.0), "softmax dense mask": ("baseline", dense)}
        times |= {"softmax blocks of 64": ("baseline", blocks), "softmax blocks of 128, float32": ("baseline", single)}
        lines = timed(f"a CPU, {threads}", "lm-window-bf16", "forward", times, config=shape)
        write_lines(tmp_path / f"bench_attention_a-cpu-{threads.replace(' ', '-')}.jsonl", *lines)
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    best, dense = [line for line in shown(speed.operator()).splitlines() if "forward" in line]
    assert best.startswith("| causal, 1 × 512 × 4 × 32, window 64 | forward | bfloat16 | 1 / 2 |")
    assert "| 30 (blocks of 128, float32) / 19 (blocks of 64, bfloat16) | 10 / 10 | 3.00x / 1.90x |" in best
    assert "| 90 / 50 (dense mask, bfloat16) | 10 / 10 | 9.00x / 5.00x |" in dense


def test_the_picture_of_speed_has_a_point_for_each_case_machine_and_number_of_threads(tmp_path, monkeypatch):
    shape = {"batch": 1, "tokens": 512, "queries": 512, "heads": 4, "head_dim": 32, "causal": True, "window": None}
    for threads, softmax in (("1 thread", 30.0), ("2 threads", 24.0)):
        times = {"gka cpu": ("ours", 10.0), "softmax": ("baseline", softmax), "softmax dense mask": ("baseline", 90.0)}
        config = {**shape, "dtype": "float32"}
        lines = list(timed(f"a CPU, {threads}", "lm-full", "forward+backward", times, config=config))
        lines += timed(f"a CPU, {threads}", "lm-full", "forward", {**times, "gka cpu": ("ours", 1.0)}, config=config)
        write_lines(tmp_path / f"bench_attention_a-cpu-{threads.replace(' ', '-')}.jsonl", *lines)
    config = {"depth": 4, "batch": 4, "sequence_len": 512, "dtype": "float32"}
    times = {"softmax": ("baseline", 9.0), "gka": ("ours", 10.0)}
    lines = timed("a CPU, 1 thread", "d4", "training", times, config=config, kind="bench_gpt")
    write_lines(tmp_path / "bench_gpt_a-cpu-1-thread.jsonl", *lines)
    figure = speedups.picture(tmp_path, tmp_path)
    found = [(row["benchmark"], row["machine"], row["threads"], round(row["ratio"], 3)) for row in figure.rows]
    assert found == [("attention", "a CPU", 1, 3.0), ("attention", "a CPU", 2, 2.4), ("gpt", "a CPU", 1, 0.9)]
    [axis] = speedups.draw(pd.DataFrame(figure.rows)).axes
    drawn = [
        (line.get_label()[:1], line.get_markerfacecolor() == "none", [*line.get_xdata()]) for line in axis.lines[:2]
    ]
    assert drawn == [("_", True, [3.0, 0.9]), ("a", False, [2.4])]
    assert speedups.picture(tmp_path, tmp_path / "empty") is None


def test_a_gpu_is_held_to_the_fastest_attention_and_to_torchs_default():
    """Worked out from the file by hand: a causal step of 2,048 tokens, where cuDNN's is the fastest."""
    lines = map(json.loads, (RESULTS / "bench_attention_nvidia-h200.jsonl").read_text().splitlines())
    times = {
        one["config"]["candidate"]: one["metrics"].get("median_ms")
        for one in lines
        if (one["config"]["case"], one["config"]["phase"]) == ("lm-full", "forward+backward")
    }
    ours, cudnn, flash = (times[name] for name in ("gka triton", "softmax cudnn", "softmax flash"))
    assert ours > cudnn and flash > ours
    [table] = machine.gpus()
    [row] = [row for row in table.rows if row[:2] == ["causal, 16 × 2048 × 10 × 128", "forward + backward"]]
    assert row[2:] == [f"{cudnn:.3g} (cudnn)", f"{ours:.3g}", f"{cudnn / ours:.2f}x", f"{flash / ours:.2f}x"]
