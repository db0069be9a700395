"""The demo: which models it trains, commands side by side, how much is left, what is sampled again."""

import json

import pytest
import torch
import tyro

import tiny
from nanochat_gka.model.config import ModelFlags
from runs.demo import language, pictures
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
