"""What the demo and the tables stand on: commands side by side, the ablation's table."""

import json
import time

import pytest
import tiny
import torch

from gka.runtime.cli import UserError
from gka.runtime.results import append_result
from runs import ablation, demo, demo_report, demo_vision, tables
from runs.commands import Job, run_side_by_side


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


def test_reports_pass_over_lines_that_say_nothing(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in (
        {"event": "train", "step": 3, "smooth_loss": 2.0}, {"event": "eval", "step": 3, "val_bpb": 1.0},
        {"event": "train", "step": 4, "smooth_loss": 1.5}, {"event": "eval", "step": 4, "val_bpb": 0.5})))  # fmt: skip
    tiny.damage_log(log, train="smooth_loss", eval="val_bpb")
    assert Job("job", "timeit", [], tmp_path).steps() == 4
    row = {"train_tokens": 400, "step": 4, "log": log, "sigma": {}}
    assert [path.exists() for path in demo_report.plot({"softmax": row}, tmp_path)] == [True]
    assert demo_vision._finished(tmp_path) is None
    with pytest.raises(UserError, match="holds no finished run"):
        ablation.finished(tmp_path)


def test_the_demo_samples_again_when_its_samples_were_cut_short(tmp_path, monkeypatch):
    def evaluate(*command):
        append_result(command[-1], "evaluate", {}, {"samples": {"The ": ["end"]}}, torch.device("cpu"))

    monkeypatch.setattr(demo, "run", evaluate)
    (tmp_path / "samples.jsonl").write_text('{"kind": "evaluate", "metr')
    assert demo.sample(tmp_path) == {"The ": "end"}
    monkeypatch.setattr(demo, "run", lambda *command: pytest.fail("sampled again"))
    assert demo.sample(tmp_path) == {"The ": "end"}


def test_a_result_that_is_not_whole_is_named_by_its_table(tmp_path, monkeypatch):
    (tmp_path / "demo.jsonl").write_text('{"label": "softmax"}\n')
    monkeypatch.setattr(tables, "DEMO_RESULTS", tmp_path / "demo.jsonl")
    with pytest.raises(SystemExit, match=r"error: the results behind the table demo of README.md are not whole"):
        tables.render("README.md", (tables.ROOT / "README.md").read_text())


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
