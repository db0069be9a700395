"""What the demo and the tables stand on: which models, commands side by side, tables of today's models alone, the ablation's table."""

import json
import time

import pytest
import tyro

from gka.runtime.cli import UserError
from nanochat_gka.config import ModelFlags
from runs import ablation, bench_gpt, tables
from runs.commands import Job, run_side_by_side
from runs.demo import VARIANTS, run_tag


def test_commands_run_side_by_side_and_keep_their_output(tmp_path):
    jobs = [Job(f"job {number}", "timeit", ["-n", 1, "-r", 1, "import time; time.sleep(1.5)"], tmp_path / str(number)) for number in range(3)]
    started = time.perf_counter()
    run_side_by_side(jobs, at_once=3, total_steps=1)
    assert time.perf_counter() - started < 3 * 1.5
    assert all("1 loop" in (job.folder / "output.txt").read_text() for job in jobs)


def test_a_failing_command_ends_all_with_its_last_line_and_code(tmp_path, capfd):
    jobs = [
        Job("fails", "deit_gka.export", ["--run", tmp_path / "nothing", "--out", tmp_path / "out"], tmp_path / "fails"),
        Job("sleeps", "timeit", ["-n", 1, "-r", 1, "import time; time.sleep(600)"], tmp_path / "sleeps"),
    ]
    with pytest.raises(SystemExit) as left:
        run_side_by_side(jobs, at_once=2, total_steps=1)
    assert left.value.code == 2
    assert capfd.readouterr().err.startswith(f"error: no checkpoint in {tmp_path / 'nothing'}; train one first")
    assert jobs[1].process.poll() is not None


def test_a_command_that_is_killed_in_silence_is_named_and_not_by_what_an_earlier_one_printed(tmp_path, capfd):
    (tmp_path / "output.txt").write_text("of an earlier start\n")
    job = Job("dies", "timeit", ["-n", 1, "-r", 1, "import os; os.kill(os.getpid(), 9)"], tmp_path)
    with pytest.raises(SystemExit) as left:
        run_side_by_side([job], at_once=1, total_steps=1)
    assert left.value.code == 128 + 9
    assert capfd.readouterr().err == f"error: dies ended with exit code -9; what it printed is in {tmp_path / 'output.txt'}\n"


def test_the_ablation_table_puts_runs_beside_the_paper(tmp_path, capfd):
    with pytest.raises(UserError, match=r"deit_tiny_patch16_224 holds no finished run; make ablate-projections DATA=... trains the three"):
        ablation.main(ablation.AblationConfig(runs=tmp_path))
    for accuracy, (_, model) in zip((70.5, 71.25, 69.75), ablation.MODELS.values()):
        (tmp_path / model).mkdir()
        record = {
            "event": "finish",
            "step": 9,
            "parameters": 5_000_000,
            "flops": None if accuracy > 71 else 2_000_000_000,
            "top1": accuracy,
            "ema_top1": accuracy + 1,
        }
        (tmp_path / model / "log.jsonl").write_text(json.dumps(record) + "\n")
    ablation.main(ablation.AblationConfig(runs=tmp_path))
    lines = [line for line in capfd.readouterr().out.splitlines() if any(label in line for label in ("softmax", "VLT", "GKA"))]
    assert [("70.50" in lines[0], "71.50 (72.2)" in lines[0]), ("72.25 (73.5)" in lines[1], "5.00 (5.28)" in lines[1])] == [(True, True)] * 2
    assert "70.75 (71.54)" in lines[2] and "2.00 (1.98)" in lines[2]


def test_the_demo_trains_the_papers_form_and_names_what_is_ours():
    """Folders of demos before rotated values were the default hold d4-gka-400, another form, which must not be taken for the paper's."""
    forms = {name: tyro.cli(ModelFlags, args=flags) for name, (_, flags) in VARIANTS.items()}
    assert (forms["gka-paper"].gka_values, forms["gka-paper"].head_offsets) == ("rotated", "")
    assert (forms["gka-offsets"].gka_values, forms["gka-offsets"].head_offsets) == ("normalised", "PS")
    assert [label for label, _ in VARIANTS.values()] == ["softmax", "GKA", "GKA + offsets (ours)"]
    assert run_tag("gka-paper") == "d4-gka-paper-400" and "gka" not in VARIANTS


def test_tables_leave_out_what_was_measured_of_other_models(tmp_path, monkeypatch):
    """Results of before the paper's form was the default: its name was another form's in the demo, and another kind's in the benchmark."""
    record = {"date": "2026-11-21 17:04", "commit": "a14f06e", "hardware": "a CPU, 2 threads", "torch": "2.14"}
    metrics = dict.fromkeys(tables.COLUMNS, 1)
    runs = {"d4-softmax-400": 7001, "d4-gka-400": 7002, "d4-gka-paper-400": 7003}
    lines = [{**record, "config": {"model_tag": tag}, "metrics": {**metrics, "parameters": count}, "label": "GKA"} for tag, count in runs.items()]
    (tmp_path / "demo.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(tables, "DEMO_RESULTS", tmp_path / "demo.jsonl")
    shown = tables.demo_table()
    assert "| **softmax** | 7,001 |" in shown and "| **GKA** | 7,003 |" in shown and "7,002" not in shown

    def compared(kinds, speed):
        for phase in bench_gpt.DECODE:
            for kind in kinds:
                config = {"case": "d4", "phase": phase, "candidate": kind, "role": "ours", "group": f"{phase}-{speed}", "quick": False}
                yield {**record, "config": config, "metrics": {"items_per_second": speed, "cache_mib": 16.0}}

    monkeypatch.setattr(tables.bench_results, "RESULTS", tmp_path)
    path, older = tmp_path / "bench_gpt_a-cpu-2-threads.jsonl", list(compared(["softmax", "gka", "gka-keys", "gka-rotated"], 111))
    path.write_text("".join(json.dumps(line) + "\n" for line in older))
    assert "111" not in tables.decode_table()
    path.write_text("".join(json.dumps(line) + "\n" for line in [*older, *compared(tables.DECODERS, 222)]))
    assert tables.decode_table().count("| 222 | 222 |") == 4 and set(tables.DECODERS) == {"softmax", "gka", *bench_gpt.DECODE_ONLY}
