"""Vision runs that are killed, stopped or damaged go on where they were, to the bit, on any number of processes."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time

import pytest
import torch

import tiny
import tiny_vision
from deit_gka import train as training
from deit_gka.training.config import TrainConfig
from processes import still_there
from trainkit_gka.cli import as_typed
from vision_runs import (
    EPOCHS,
    STEPS,
    TRAIN,
    begin,
    checkpoint,
    evaluations,
    final,
    flags,
    in_process,
    records,
    steps_of,
    train,
    wait_for_step,
)


def test_a_run_killed_at_random_resumes_bit_identically(uninterrupted, pictures, tmp_path):
    rng = random.Random(11)
    for kill_at in sorted(rng.sample(range(2, STEPS - 3), 3)):
        process = begin(pictures, tmp_path)
        wait_for_step(process, tmp_path, kill_at)
        process.kill()
        assert process.processes[0].exitcode == -signal.SIGKILL
    done = train(pictures, tmp_path)
    assert "resuming at update" in done.stdout
    assert final(tmp_path) == final(uninterrupted)
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    assert evaluations(tmp_path) == evaluations(uninterrupted)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1
    assert [path.name for path in (tmp_path / "run/best").iterdir()] == [
        path.name for path in (uninterrupted / "run/best").iterdir()
    ]


def test_two_ranks_killed_resume_bit_identically(pictures, tmp_path):
    whole, killed, common = tmp_path / "whole", tmp_path / "killed", ["--epochs", 3, "--save-every", 2]
    train(pictures, whole, *common, ranks=2)
    process = begin(pictures, killed, *common, ranks=2)
    wait_for_step(process, killed, 9)
    workers = [pid for rank in process.processes for pid in tiny_vision.descendants(rank.pid)]
    process.kill()
    assert 9 <= steps_of(killed)[-1] < 18 and len(workers) >= 6  # of each rank: a server and 2 loaders
    assert not still_there(workers)
    done = train(pictures, killed, *common, ranks=2)
    assert "resuming at update" in done.stdout and "2 x cpu" in done.stdout
    assert final(killed, 18) == final(whole, 18)
    assert evaluations(killed) == evaluations(whole) and evaluations(whole)[-1]["images"] == 27


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_says_how_to_continue(uninterrupted, pictures, tmp_path, ranks):
    process = begin(pictures, tmp_path, "--save-every", "-1", ranks=ranks)
    wait_for_step(process, tmp_path, 9)
    loaders = [pid for member in process.processes for pid in tiny_vision.descendants(member.pid)]
    for pid in loaders if ranks == 1 else []:  # as when a whole group is told
        os.kill(pid, signal.SIGTERM)
    os.kill(process.processes[-1].pid, signal.SIGTERM)  # one rank is enough
    done = process.wait()
    assert done.returncode == 0 and len(loaders) >= 2 * ranks and not still_there(loaders)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("stopped at update")]
    step = steps_of(tmp_path)[-1]
    assert line.startswith(f"stopped at update {step} of {STEPS}, saved; continue with: ") and step < STEPS
    assert [path.name for path in sorted((tmp_path / "run/checkpoints").iterdir())][-1] == f"step_{step:08d}"
    command = shlex.split(line.split("continue with: ")[1])
    torchrun = [] if ranks == 1 else ["-m", "trainkit_gka.torchrun", "--standalone", "--nproc-per-node", "2"]
    dashes = ["--"] if ranks > 1 else []
    python = as_typed(sys.executable)
    given = map(str, flags(pictures, tmp_path, "--save-every", "-1"))
    assert command == [python, *torchrun, "-m", *dashes, TRAIN, *given]
    if ranks == 1:
        train(pictures, tmp_path, "--save-every", "-1")
        assert final(tmp_path) == final(uninterrupted)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_ends_a_validation_which_is_made_again(tmp_path, ranks):
    data = tiny_vision.write_pictures(tmp_path / "data", val=250)  # of three classes
    words = ["--epochs", 2, "--device-batch-size", 2]
    process = begin(data, tmp_path / "parts", *words, ranks=ranks)
    while process.alive() and not (tmp_path / "parts/run/checkpoints/step_00000006/manifest.json").exists():
        time.sleep(0.002)
    os.kill(process.processes[-1].pid, signal.SIGTERM)  # one rank is enough
    began = time.monotonic()
    done = process.wait()
    assert time.monotonic() - began < 10 and done.returncode == 0, done.stderr
    assert "stopped at update 6 of 12, saved; continue with: " in done.stdout and not evaluations(tmp_path / "parts")
    train(data, tmp_path / "parts", *words, ranks=ranks)
    train(data, tmp_path / "whole", *words, ranks=ranks)
    assert evaluations(tmp_path / "parts") == evaluations(tmp_path / "whole")
    assert final(tmp_path / "parts", 12) == final(tmp_path / "whole", 12)


def test_sigterm_ends_an_evaluation_with_one_line(uninterrupted, tmp_path):
    data = tiny_vision.write_pictures(tmp_path / "data", val=1500, train=1)
    words = ["--run", uninterrupted / "run", "--data", data, "--device-batch-size", 1, "--num-workers", 2]
    words += ["--device-type", "cpu", "--results", tmp_path / "results.jsonl"]
    process = tiny_vision.start("deit_gka.evaluate", *words, folder=tmp_path / "output")
    pid = process.processes[0].pid
    while process.alive() and len(tiny_vision.descendants(pid)) < 3:  # the server and two loading workers
        time.sleep(0.002)
    started = tiny_vision.descendants(pid)
    os.kill(pid, signal.SIGTERM)
    began = time.monotonic()
    done = process.wait()
    assert time.monotonic() - began < 10 and done.returncode == 128 + signal.SIGTERM
    assert done.stderr == "stopped by SIGTERM\n" and not (tmp_path / "results.jsonl").exists()
    assert not still_there(started)


def test_a_run_without_an_average_in_half_precision_resumes(pictures, tmp_path):
    """float16 with its loss scale, whose growth is part of the state."""
    common = ["--amp", "float16", "--model-ema-decay", 0, "--epochs", 2]
    train(pictures, tmp_path / "whole", *common)
    train(pictures, tmp_path / "parts", *common, "--stop-after", 7)
    train(pictures, tmp_path / "parts", *common)
    names = ("model", "optimizer")
    assert final(tmp_path / "parts", 12, names) == final(tmp_path / "whole", 12, names)
    folder = tmp_path / "whole/run/checkpoints/step_00000012"
    assert not (folder / "ema.safetensors").exists()
    scaler, resumed = (
        json.loads((out / "run/checkpoints" / folder.name / "state.json").read_text())["scaler"]
        for out in (tmp_path / "whole", tmp_path / "parts")
    )
    assert scaler == resumed and scaler["scale"] > 0 and scaler["_growth_tracker"] == 12
    result = json.loads((tmp_path / "whole/results.jsonl").read_text())["metrics"]
    assert result["best"]["metric"] == "top1" and "ema_top1" not in result


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "twins_svt_small"])
def test_a_model_whose_blocks_have_no_attention_of_ours_trains_and_resumes(name, pictures, tmp_path):
    """Both its report after an epoch and its restart looked for the attention of every block."""
    words = ["--data", pictures, "--out", tmp_path, "--model", name, "--model-tag", "run", "--input-size", 32]
    words += ["--device-type", "cpu", "--epochs", 2, "--batch-size", 12, "--group-size", 6, "--num-workers", 0]
    words += ["--warmup-epochs", 0, "--repeated-aug", 1, "--results", tmp_path / "results.jsonl"]
    if name.startswith("twins"):
        words += ["--model-kwargs", "embed_dims=[8,8,8,8]", "num_heads=[1,1,1,1]", "depths=[1,1,1,1]"]
    first = tiny_vision.call(TRAIN, *words, "--stop-after", 8, folder=tmp_path / "output")
    second = tiny_vision.call(TRAIN, *words, folder=tmp_path / "output")
    assert "resuming" not in first.stdout and "resuming" in second.stdout
    result = json.loads((tmp_path / "results.jsonl").read_text())["metrics"]
    assert result["sigma"] == {} and result["flops"] is None
    assert [record["epoch"] for record in records(tmp_path, "eval")] == [1, 2]


def test_ranks_take_the_same_first_step(pictures, tmp_path):
    """Adam's first moment after one update is a tenth of the gradient, here of 24 images on 1 to 3 ranks."""
    common = ["--batch-size", 24, "--drop-path", 0, "--warmup-epochs", 0, "--stop-after", 1, "--clip-grad", 0]
    states = {}
    for ranks, device_batch_size in ((1, 24), (1, 4), (2, 24), (3, 6)):
        out = tmp_path / f"{ranks}-{device_batch_size}"
        train(pictures, out, *common, "--device-batch-size", device_batch_size, ranks=ranks)
        states[ranks, device_batch_size] = (
            checkpoint(out, 1, "optimizer"),
            checkpoint(out, 1, "model"),
            records(out, "train")[0],
        )
    one, weights, record = states[1, 24]
    moments = [name for name in one if name.startswith("exp_avg/")]
    assert len(moments) == len(weights)
    norm = torch.stack([one[name].norm() for name in moments]).norm().item() * 10
    assert norm == pytest.approx(record["grad_norm"], rel=1e-4)
    for how, (state, _, line) in states.items():
        for name in moments:
            assert (state[name] - one[name]).norm() < 3e-5 * one[name].norm(), f"{name} with {how}"
        assert line["loss"] == pytest.approx(record["loss"], rel=1e-6)


def test_another_number_of_ranks_may_continue(pictures, tmp_path):
    train(pictures, tmp_path, "--stop-after", 3, ranks=3)
    done = train(pictures, tmp_path, "--epochs", EPOCHS, "--stop-after", 6)
    assert "resuming at update 3" in done.stdout and steps_of(tmp_path) == list(range(1, 7))


def test_incomplete_log_records_are_made_again(uninterrupted, pictures, tmp_path):
    """The last evaluation and the numbers of the end are made again; lines that say nothing are passed over."""
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    tiny.damage_log(tmp_path / "run/log.jsonl", eval="broken", finish="sigma")
    done = train(pictures, tmp_path)
    assert "finished, top-1" in done.stdout and "Traceback" not in done.stderr
    old, new = (json.loads((out / "results.jsonl").read_text())["metrics"] for out in (uninterrupted, tmp_path))
    assert all(new[key] == old[key] for key in ("best", "top1", "ema_top1", "images", "sigma"))


def test_other_data_is_refused_on_resume(uninterrupted, pictures, tmp_path, capsys):
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    shutil.copytree(pictures, tmp_path / "data")
    spare = tmp_path / "data/train/class_1/000.jpg"
    spare.rename(tmp_path / "000.jpg")
    message = in_process(training.main, TrainConfig, *flags(tmp_path / "data", tmp_path), capsys=capsys)
    assert re.search(
        r"has 77 training images where the run in .* had 78; give it its own data, .*, or another --model-tag", message
    )
    (tmp_path / "000.jpg").rename(spare)
    for split in ("train", "val"):
        (tmp_path / "data" / split / "class_1").rename(tmp_path / "data" / split / "class_9")
    message = in_process(training.main, TrainConfig, *flags(tmp_path / "data", tmp_path), capsys=capsys)
    assert "has other classes than the run in" in message
    (tmp_path / "data/val/class_9").rename(tmp_path / "data/val/class_1")
    assert "is in train but not in val" in in_process(
        training.main, TrainConfig, *flags(tmp_path / "data", tmp_path), capsys=capsys
    )


def test_a_moved_copy_of_the_data_is_fine(uninterrupted, pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "elsewhere")
    train(pictures, tmp_path, "--stop-after", 7)
    train(tmp_path / "elsewhere", tmp_path)
    assert final(tmp_path) == final(uninterrupted)
