"""The READMEs' measured tables: what the result files say, of today's models alone."""

import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from bench_lines import write_lines
from runs import frames
from runs.bench import gpt as bench_gpt
from runs.bench.results import facts_of
from runs.demo.report import COLUMNS
from runs.examples import text_classifier
from runs.tables import __main__ as tables
from runs.tables import benchmarks, demo, log, machine, sentences, speed, speedups
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
            words = shlex.split(json.loads(line)["command"])
            assert not [word for word in words if word.startswith(("/", "~")) or "=/" in word], (path, words)


def test_every_table_and_sentence_is_on_one_page():
    names = [found for page in tables.PAGES for found in tables.BLOCK.findall((ROOT / page).read_text())]
    known = [("table", name) for name in tables.TABLES] + [("text", name) for name in tables.SENTENCES]
    assert sorted(names) == sorted(known)


def test_the_index_of_the_log_has_each_entry_under_its_kind_with_the_first_sentence_of_its_verdict(tmp_path):
    """The index itself is one of the pages that are checked above."""
    parts = "# {}\n\n*{}.*\n\n**Question.** Why? Who?\n\n{}**Outcome.** 1.5x.\n\n| a |\n|---|\n\n**Verdict.** {}\n"
    old = parts.format("Old", "Research finding", "", "Off by 0.5 in\none row. More of it.")
    text = parts.format("New", "Research finding", "**Prediction.** No.\n\n", "Kept.")
    note = parts.format("Note", "Engineering note", "", "Faster.")
    names = {"2026-11-21-old.md": old, "2026-11-22-new.md": text, "2026-11-23-note.md": note, "README.md": "# Log\n"}
    for name, written in names.items():
        (tmp_path / name).write_text(written)
    assert log.research(tmp_path)[0].rows == [
        ["2026-11-22", "[New](2026-11-22-new.md)", "Kept."],
        ["2026-11-21", "[Old](2026-11-21-old.md)", "Off by 0.5 in one row."],
    ]
    assert log.engineering(tmp_path)[0].rows == [["2026-11-23", "[Note](2026-11-23-note.md)", "Faster."]]
    swapped = text.replace("Verdict", "X").replace("Outcome", "Verdict").replace("X", "Outcome")
    for name, damaged in (
        ("new.md", text),
        ("2026-11-22-new.md", text.partition("**V")[0]),
        ("2026-11-22-new.md", text.replace("Research finding", "Finding")),
        ("2026-11-22-new.md", swapped),
    ):
        (tmp_path / name).write_text(damaged)
        for index in (log.research, log.engineering):
            with pytest.raises(UserError, match=rf"{name} is not an entry"):
                index(tmp_path)
        (tmp_path / name).unlink()


def test_the_contents_of_the_page_of_tables_name_each_of_its_headings():
    text = (RESULTS / "TABLES.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert re.findall(r"\]\(#(\S+)\)", text) == anchors and len(tables.BLOCK.findall(text)) == len(headings)


def test_any_page_takes_any_table_between_its_markers():
    empty = "before\n<!-- table:errors -->\n<!-- /table -->\nafter\n"
    filled = tables.render("runs/README.md", empty)
    start, end = empty.splitlines(keepends=True)[:2], empty.splitlines(keepends=True)[2:]
    assert filled.startswith("".join(start) + "| features |") and filled.endswith("".join(end))
    assert tables.render("runs/README.md", filled) == filled
    assert tables.render("runs/README.md", 2 * empty) == 2 * filled
    with pytest.raises(UserError, match=r"README\.md has a block table:speeds; known are results, demo,"):
        tables.render("README.md", empty.replace("errors", "speeds"))


def test_a_page_out_of_date_ends_the_check_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
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
            tables.block("table", "demo", "README.md")
    write_lines(
        tmp_path / "bench_gpt_a-cpu-2-threads.jsonl", *[{**whole, "kind": "bench_gpt", "config": {"case": "d4"}}]
    )
    with pytest.raises(UserError, match=r"bench_gpt_a-cpu-2-threads\.jsonl, line 1: has no phase"):
        tables.block("table", "decode", "runs/README.md")


def test_a_mistake_in_a_table_is_not_taken_for_a_damaged_file(monkeypatch):
    monkeypatch.setitem(tables.TABLES, "errors", lambda: {}["a mistake"])
    with pytest.raises(KeyError, match="a mistake"):
        tables.block("table", "errors", "gka/README.md")


@pytest.mark.parametrize("name", ["attention", "deit", "gpt", "onnx"])
def test_rows_say_what_their_candidates_are(name):
    """As their names do, which nothing else reads."""
    lines = [line for path in RESULTS.glob(f"bench_{name}_*.jsonl") for line in frames.records(path)]
    assert len(lines) > 20
    for record in lines:
        config = record["config"]
        facts = facts_of(config["candidate"], config["phase"], config, record["hardware"])
        assert facts.items() <= config.items() and facts["family"] in ("softmax", "gka"), config


def test_the_demos_table_leaves_out_older_forms(tmp_path, monkeypatch):
    """Before rotated values were the default, d4-gka-400 was the name of another form of GKA."""
    runs = {"d4-softmax-400": 7001, "d4-gka-400": 7002, "d4-gka-paper-400": 7003}
    metrics = dict.fromkeys(COLUMNS, 1)
    lines = [
        {**RECORD, "config": {"model_tag": tag}, "metrics": {**metrics, "parameters": count}, "label": "GKA"}
        for tag, count in runs.items()
    ]
    write_lines(tmp_path / "demo.jsonl", *lines)
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    said = shown(demo.language())
    assert "| **softmax** | 7,001 |" in said and "| **GKA** | 7,003 |" in said and "7,002" not in said


def test_the_decoding_table_leaves_out_results_of_other_kinds(tmp_path, monkeypatch):
    def compared(kinds, speed):
        for phase in bench_gpt.DECODE:
            for kind in kinds:
                config = {"case": "d4", "phase": phase, "role": "ours", "group": f"{phase}-{speed}", "quick": False}
                config |= facts_of(kind, phase, {"dtype": "float32", "compile": "off"}, RECORD["hardware"])
                metrics = {"status": "ok", "items_per_second": speed, "cache_mib": 16.0}
                yield {**RECORD, "kind": "bench_gpt", "config": {**config, "candidate": kind}, "metrics": metrics}

    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    path, older = tmp_path / "bench_gpt_a-cpu-2-threads.jsonl", ["softmax", "gka", "gka-keys", "gka-rotated"]
    write_lines(path, *compared(older, 111))
    assert "111" not in shown(benchmarks.decode())
    write_lines(path, *compared(older, 111), *compared(benchmarks.DECODERS, 222))
    assert shown(benchmarks.decode()).count("| 222 | 222 |") == 4
    assert set(benchmarks.DECODERS) == {"softmax", "gka", *bench_gpt.DECODE_ONLY}


def timed(hardware: str, case: str, phase: str, times: dict[str, tuple[str, float]], **settings):
    """Lines of one comparison; times: candidate -> role and milliseconds."""
    for candidate, (role, milliseconds) in times.items():
        where = {"case": case, "phase": phase, "group": f"{case} {phase}", "quick": False}
        metrics = {"status": "ok", "median_ms": milliseconds, **settings.get("metrics", {}).get(role, {})}
        config = {**where, "candidate": candidate, "role": role, **settings.get("config", {})}
        config |= facts_of(candidate, phase, {"dtype": "float32", **config}, hardware)
        kind = settings.get("kind", "bench_attention")
        yield {**RECORD, "kind": kind, "hardware": hardware, "config": config, "metrics": metrics}


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


def test_the_table_of_one_machine_is_of_the_one_with_the_most_rows_and_has_both_dtypes(tmp_path, monkeypatch):
    shape = {"batch": 1, "tokens": 512, "queries": 512, "heads": 4, "head_dim": 32, "causal": True, "window": None}
    for machine_name, speeds in (("a CPU", {"float32": 2.0, "bfloat16": 1.0}), ("another", {"float32": 9.0})):
        lines = []
        for dtype, ours in speeds.items():
            times, ending = {"softmax": ("baseline", 3.0), "gka cpu": ("ours", ours)}, "-bf16" * (dtype == "bfloat16")
            for case, window in (("lm-short", None), ("lm-window", 64)):
                config = {**shape, "window": window, "dtype": dtype}
                lines += timed(f"{machine_name}, 1 thread", case + ending, "forward", times, config=config)
        write_lines(tmp_path / f"bench_attention_{machine_name.replace(' ', '-')}-1-thread.jsonl", *lines)
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    [table] = machine.one_machine()
    assert table.title == "a CPU:"
    assert table.rows == [["causal, 1 × 512 × 4 × 32", "forward", "1", "3", "2", "1.50x", "3.00x", ""]]


def test_the_sentence_of_speed_has_the_range_over_machines_and_threads(tmp_path, monkeypatch):
    """Of softmax's time over ours; sweeps, padding and narrower instructions have rows in the tables alone."""

    def lines(benchmark, case, phase, ratio, dtype="float32", hardware="a CPU, 1 thread"):
        candidates = {
            "softmax": ("baseline", 10.0 * ratio),
            "gka cpu" if benchmark == "attention" else "gka": ("ours", 10.0),
        }
        config = {"dtype": dtype, "depth": 4, "batch": 1, "sequence_len": 64, "size": "ti", "compile_mode": "default"}
        return timed(hardware, case, phase, candidates, config=config, kind=f"bench_{benchmark}")

    both, train = "forward+backward", "training"
    written = {
        "attention_a-cpu-1-thread": [
            *lines("attention", "vit", both, 3.0),
            *lines("attention", "lm", both, 1.2),
            *lines("attention", "lm", "forward", 9.0),
            *lines("attention", "sweep-1", both, 8.0),
            *lines("attention", "padded", both, 7.0),
            *lines("attention", "vit-bf16", both, 0.5, "bfloat16"),
        ],
        "attention_b-cpu-1-thread": lines("attention", "vit", both, 2.0, hardware="b CPU(R), 1 thread"),
        "attention_c-cpu-1-thread": lines("attention", "vit", both, 6.0, hardware="c CPU held to AVX2, 1 thread"),
        "gpt_a-cpu-1-thread": [
            *lines("gpt", "d4", train, 1.4),
            *lines("gpt", "d4-bf16", train, 1.1, "bfloat16"),
            *lines("gpt", "d4", "decode 1", 5.0),
        ],
        "deit_a-cpu-1-thread": lines("deit", "deit-ti-b1", train, 1.6),
    }
    for name, records in written.items():
        write_lines(tmp_path / f"bench_{name}.jsonl", *records)
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    said = sentences.speed()
    assert "is 1.2 to 3.0 times (median 2.0) as fast" in said and "model 1.4 to 1.6 times (median 1.5);" in said
    assert "in bfloat16 (a CPU) 0.5 to 0.5 times (median 0.5) and 1.1 to 1.1 times (median 1.1)." in said
    assert said.startswith("**Speed.** In float32 (a CPU, b CPU) the operator")


@pytest.mark.parametrize(
    ("gka", "said"),
    [([0.6, 0.5], "behind with every seed"), ([0.9, 0.5], "ahead with some seeds"), ([0.9, 0.8], "ahead with every")],
)
def test_the_sentence_of_the_classifier_goes_by_seed(tmp_path, monkeypatch, gka, said):
    accuracies = {"gka": gka, "softmax": [0.7, 0.7]}
    about = dict(date="2026-11-26", commit="abc", hardware="a CPU, 1 thread", torch="2", kind=text_classifier.KIND)
    lines = []
    for case in text_classifier.cases_of(text_classifier.TextClassifierConfig(seeds=2)):
        accuracy = accuracies[case["attention"]][case["seed"]]
        lines.append({**about, "config": {"case": case}, "metrics": {"accuracy": accuracy}})
    write_lines(tmp_path / text_classifier.FILE, *lines)
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    assert f"GKA is {said}" in sentences.classifier() and "against softmax's 70.0, 70.0 %" in sentences.classifier()


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
    assert "of whole models 0.90 to 0.90 times as fast; of all cases 0.90 to 3.00" in figure.caption
    [axis] = speedups.draw(pd.DataFrame(figure.rows)).axes
    drawn = [(line.get_label(), line.get_markerfacecolor() == "none", [*line.get_xdata()]) for line in axis.lines[:2]]
    assert drawn == [("a CPU, 1 thread", True, [3.0, 0.9]), ("a CPU, 2 threads", False, [2.4])]
    assert speedups.picture(tmp_path, tmp_path / "empty") is None


def test_the_table_of_models_has_the_flops_ratio_as_a_gpts_target_and_its_offsets(tmp_path, monkeypatch):
    config = {"depth": 4, "batch": 4, "sequence_len": 512, "dtype": "float32"}
    flops = {"baseline": {"flops_per_token": 120.0}, "ours": {"flops_per_token": 100.0}}
    times = {"softmax": ("baseline", 1300.0), "gka": ("ours", 1000.0), "gka-offsets": ("variant", 650.0)}
    lines = timed("a CPU, 2 threads", "d4", "training", times, config=config, metrics=flops, kind="bench_gpt")
    write_lines(tmp_path / "bench_gpt_a-cpu-2-threads.jsonl", *lines)
    times = {"softmax": ("baseline", 5.0), "softmax eager": ("baseline", 4.0), "gka": ("ours", 2.0)}
    lines = []
    for size in "b", "ti":
        shape = {"size": size, "batch": 1, "dtype": "float32", "compile_mode": "default"}
        lines += timed("a CPU, 2 threads", f"deit-{size}-b1", "inference", times, config=shape, kind="bench_deit")
    write_lines(tmp_path / "bench_deit_a-cpu-2-threads.jsonl", *lines)
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    rows = [line for line in shown(speed.models()).splitlines() if "float32" in line]
    assert rows == [
        "| DeiT-Ti, 1 image | inference | float32 | 2 | 4 (eager) | 2 | 2.00x | 2.50x |  | ≥ 1.25x |",
        "| DeiT-B, 1 image | inference | float32 | 2 | 4 (eager) | 2 | 2.00x | 2.50x |  | ≥ 1.25x |",
        "| GPT of depth 4, 4 × 512 tokens | training | float32 | 2 | 1,300 | 1,000 | 1.30x |  | 1.20x | ≥ 1.20x |",
        f"| {speed.WITH_OFFSETS} | training | float32 | 2 | 1,300 | 650 | 2.00x |  | 1.20x | ≥ 1.20x |",
    ]


def test_the_table_of_training_gains_over_eager_float32(tmp_path, monkeypatch):
    """Softmax in float32, which takes part beside bfloat16, has no row there."""
    lines = []
    for dtype, eager, compiled in (("float32", 100.0, 125.0), ("bfloat16", 200.0, 300.0)):
        shape = {"depth": 4, "batch": 4, "sequence_len": 512, "dtype": dtype, "compile": "on"}
        case = "d4" if dtype == "float32" else "d4-bf16"
        others = [("softmax, float32", 1.0)] if dtype == "bfloat16" else []
        for name, tokens in (("gka", compiled), ("gka eager", eager), *others):
            role = "ours" if name.startswith("gka") else "baseline"
            own = dict(config=shape, metrics={role: {"items_per_second": tokens}}, kind="bench_gpt")
            lines += timed("a CPU, 2 threads", case, "training", {name: (role, 1.0)}, **own)
    write_lines(tmp_path / "bench_gpt_a-cpu-2-threads.jsonl", *lines)
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    rows = [line for line in shown(speed.training()).splitlines() if line.startswith("| GPT")]
    assert rows == ["| GPT of depth 4, 4 × 512 tokens, GKA | 2 | 100 | 125 | 200 | 300 | 3.00x |"]


def test_the_table_of_onnx_has_its_threads_side_by_side_and_names_the_fused_softmax(tmp_path, monkeypatch):
    lines = []
    for threads, softmax in (("2", 3.0), ("1", 5.0)):
        times = {"softmax": ("baseline", 4.0), "softmax-fused": ("baseline", softmax), "gka": ("ours", 2.0)}
        config = {"size": "ti", "batch": 8, "dtype": "float32", "threads": int(threads)}
        case = f"onnx-ti-b8-t{threads}"
        lines += timed("a CPU, 2 threads", case, "inference float32", times, config=config, kind="bench_onnx")
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    assert speed.onnx() == []
    times = {"softmax": ("baseline", 4.0), "gka": ("ours", 2.0)}
    config["threads"] = 1
    lines += timed("a CPU", "openvino-ti-b8-t1", "inference float32", times, config=config, kind="bench_onnx")
    write_lines(tmp_path / "bench_onnx_a-cpu-2-threads.jsonl", *lines)
    assert "| DeiT-Ti, 8 images, in OpenVINO | inference | float32 | 1 | 4 | 2 | 2.00x |  |" in shown(speed.onnx())
    row = "| DeiT-Ti, 8 images | inference | float32 | 1 / 2 | 4 / 3 (fused) | 2 / 2 | 2.00x / 1.50x | ≥ 1.20x |"
    assert row in shown(speed.onnx())


def test_the_measured_vision_demo_is_as_good_as_promised():
    """Every model, with both seeds, raw and averaged weights, on the third of the digits that was held out."""
    records = [json.loads(line) for line in (ROOT / "runs/results/demo_vision.jsonl").read_text().splitlines()]
    found = sorted((record["label"], record["config"]["seed"]) for record in records)
    assert found == [(label, seed) for label in ("GKA", "VLT", "softmax") for seed in (0, 1)]
    for record in records:
        assert record["metrics"]["images"] == 599 and min(record["metrics"][key] for key in ("top1", "ema_top1")) >= 95
