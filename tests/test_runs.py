"""What the demo and the tables stand on: commands side by side, the ablation's table."""

import json
import time

import pytest

from gka.runtime.cli import UserError
from runs import ablation
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
