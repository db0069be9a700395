"""The demo: which models it trains, commands side by side, how much is left, what is sampled again."""

import json

import pytest
import torch
import tyro

import tiny
from gka.kinds import KINDS
from nanochat_gka.model.config import ModelFlags
from runs.demo import language, outlook, pictures, report, vision
from runs.demo.commands import run_side_by_side
from runs.demo.language import VARIANTS, run_tag
from runs.demo.outlook import Outlook
from runs.jobs import Job
from trainkit_gka.results import append_result


def job(folder, name, code):
    return Job(name, "timeit", ["-n", 1, "-r", 1, code], folder, steps=1)


def test_commands_run_side_by_side_and_keep_their_output(tmp_path):
    """Each command waits until all three have started."""
    meet = f"import pathlib, time, os; here = pathlib.Path({str(tmp_path)!r}); (here / str(os.getpid())).touch()\n"
    meet += "while len([path for path in here.iterdir() if path.is_file()]) < 3: time.sleep(0.01)"
    jobs = [job(tmp_path / f"job-{number}", f"job {number}", meet) for number in range(3)]
    run_side_by_side(jobs, 3, Outlook({"training": 3.0}))
    assert all("1 loop" in (job.folder / "output.txt").read_text() for job in jobs)


def test_a_failing_command_ends_all_with_its_last_line_and_code(tmp_path, capfd):
    code = "import os, sys; print('more', 'error: it failed', sep='\\n', file=sys.stderr, flush=True); os._exit(2)"
    fails = job(tmp_path / "fails", "fails", code)
    sleeps = job(tmp_path / "sleeps", "sleeps", "import time; time.sleep(600)")
    with pytest.raises(SystemExit) as left:
        run_side_by_side([fails, sleeps], 2, Outlook({"training": 2.0}))
    assert left.value.code == 2
    assert capfd.readouterr().err.startswith("error: it failed")
    assert sleeps.process.poll() is not None


def test_a_killed_command_is_named_without_older_output(tmp_path, capfd):
    (tmp_path / "output.txt").write_text("of an earlier start\n")
    with pytest.raises(SystemExit) as left:
        run_side_by_side([job(tmp_path, "dies", "import os; os.kill(os.getpid(), 9)")], 1, Outlook({"training": 1.0}))
    assert left.value.code == 128 + 9
    said = capfd.readouterr().err
    assert said.startswith("error: dies ended with exit code -9;") and str(tmp_path / "output.txt") in said
    assert said.count("\n") == 1


def test_the_outlook_corrects_what_is_left_by_the_pace(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(outlook.time, "monotonic", lambda: now[0])
    plan = Outlook({"preparing": 20.0, "training": 200.0})
    assert plan.left() == 220
    with plan.during("preparing"):
        now[0] += 60  # three times as long as expected
    with plan.during("training"):
        assert plan.left() == pytest.approx(200 * (60 + outlook.TRUST) / (20 + outlook.TRUST))
        now[0] += 300
        plan.advance(0.5)
        assert plan.left() == pytest.approx(100 * (360 + outlook.TRUST) / (120 + outlook.TRUST))
        plan.say("step 5 of 10")
        now[0] += 1
        plan.say("step 6 of 10")  # too soon after the line before
    assert plan.left() == 0
    printed = capsys.readouterr().out
    assert "[2/2] training; about 6 min 40 s left in all" in printed
    assert "step 5 of 10; about 4 min 31 s left" in printed and "step 6" not in printed


def test_damaged_log_lines_are_left_out(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [
        {"event": "train", "step": 3, "smooth_loss": 2.0, "loss": 3.5},
        {"event": "eval", "step": 3, "val_bpb": 1.0},
        {"event": "train", "step": 4, "smooth_loss": 1.5},
        {"event": "eval", "step": 4, "val_bpb": 0.5},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tiny.damage_log(log, train="smooth_loss", eval="val_bpb")
    job = Job("job", "timeit", [], tmp_path, steps=4, finish_keys=("top1",))
    assert job.progress() == (4, "loss 3.500") and job.finish() is None
    row = {"train_tokens": 400, "step": 4, "log": log, "sigma": {}}
    assert pictures.draw_losses({"softmax": row}, tmp_path / "losses.png").stat().st_size > 1000


def test_the_demo_makes_incomplete_samples_again(tmp_path):
    trained = {"GKA": Job("GKA", "nanochat_gka.train", [], tmp_path, steps=1)}
    (tmp_path / "log.jsonl").write_text('{"event": "train", "step": 400, "loss": 3.5}\n')
    (tmp_path / language.SAMPLES).write_text('{"kind": "evaluate", "metr')
    [job] = language.sample_jobs(trained)
    assert job.module == "nanochat_gka.evaluate" and job.flags[:2] == ["--run", tmp_path]
    assert job.progress() == (0, "")  # not the training's 400 steps of the 1 that it takes
    append_result(tmp_path / language.SAMPLES, "evaluate", {}, {"samples": {"The ": ["end"]}}, torch.device("cpu"))
    assert language.sample_jobs(trained) == []


def test_the_demo_names_our_form_beside_the_papers():
    """d4-gka-400 of older demos is another form, which must not be taken for the paper's."""
    forms = {name: tyro.cli(ModelFlags, args=variant.flags) for name, variant in VARIANTS.items()}
    assert (forms["gka-paper"].gka_values, forms["gka-paper"].head_offsets) == ("rotated", "")
    assert (forms["gka-offsets"].gka_values, forms["gka-offsets"].head_offsets) == ("normalised", "PS")
    assert [variant.label for variant in VARIANTS.values()] == ["softmax", "GKA", "GKA + offsets"]
    assert run_tag("gka-paper") == "d4-gka-paper-400" and "gka" not in VARIANTS


def test_the_vision_half_trains_every_kind_with_every_seed(tmp_path):
    jobs = vision.train_jobs(tmp_path, 50, "disabled")
    assert list(jobs) == [kind.label for kind in KINDS.values()]
    names = [job.folder.name for seeds in jobs.values() for job in seeds]
    assert names == [f"digits-{kind}-50-seed{seed}" for kind in ("softmax", "vlt", "gka") for seed in (0, 1)]
    [model] = {job.flags[job.flags.index("--model") + 1] for job in jobs["VLT"]}
    assert model == "deit_tiny_vlt_patch16_224" and jobs["VLT"][0].steps == 50 * (1198 // 32)


def test_the_tables_of_the_demo(capsys):
    """Of runs too short to time, too; and of which rows the figures are."""
    numbers = {"parameters": 5, "flops": 7.0, "top1": 50.0, "ema_top1": 60.0}
    assert vision.cells([{**numbers, "images_per_second": None}])[-1] == ""
    assert vision.cells([{**numbers, "images_per_second": speed} for speed in (None, 30.0)])[-1] == "30 ±0"
    row = {**dict.fromkeys(report.COLUMNS, 2.0), "sigma": {}}
    told = {**row, "eval_rows": "first", "val_bpb_utf8": 2.5}
    report.show({"softmax": told, "gka": {**row, "tokens_per_second": None}}, {})
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if "tokens/s" in line]
    assert line.split()[1:] and "None" not in line and "0" not in line
    assert "softmax: first rows, val bpb 2.000000 (2.500000 of" in " ".join(printed.split()) and "gka:" not in printed
