"""Vision runs that are killed, stopped or damaged go on where they were, to the bit, on any number of processes."""

import json
import os
import random
import re
import shutil
import signal
import time

import pytest
import torch

import tiny
import tiny_vision
from deit_gka import train as training
from deit_gka.training.config import TrainConfig
from processes import still_there
from vision_runs import (
    STEPS,
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


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


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
    assert evaluations(tmp_path) == evaluations(uninterrupted)
    assert names_in(tmp_path / "run/best") == names_in(uninterrupted / "run/best")


def test_two_ranks_stopped_and_killed_resume_bit_identically(pictures, tmp_path):
    whole, parts, common = tmp_path / "whole", tmp_path / "parts", ["--epochs", 3, "--save-every", 2]
    train(pictures, whole, *common, ranks=2)
    for number, reached in ((signal.SIGTERM, 3), (signal.SIGKILL, 9)):
        process = begin(pictures, parts, *common, ranks=2)
        wait_for_step(process, parts, reached)
        loaders = [pid for rank in process.processes for pid in tiny_vision.descendants(rank.pid)]
        if number == signal.SIGKILL:
            process.kill()
            assert reached <= steps_of(parts)[-1] < 18
        else:
            os.kill(process.processes[-1].pid, number)  # one rank is enough
            done, step = process.wait(), steps_of(parts)[-1]
            assert done.returncode == 0 and f"stopped at update {step} of 18, saved; continue with: " in done.stdout
            assert step < 18 and names_in(parts / "run/checkpoints")[-1] == f"step_{step:08d}"
        assert len(loaders) >= 6 and not still_there(loaders)  # of each rank: a server and 2 loaders
    done = train(pictures, parts, *common, ranks=2)
    assert "resuming at update" in done.stdout and "2 x cpu" in done.stdout
    assert final(parts, 18) == final(whole, 18)
    assert evaluations(parts) == evaluations(whole) and evaluations(whole)[-1]["images"] == 27


def linked_pictures(folder, count):
    """Three classes with `count` validation images each, which are one file."""
    tiny_vision.write_pictures(folder, val=1)
    for image in list(folder.glob("val/*/*.jpg")):
        for number in range(1, count):
            os.link(image, image.with_name(f"{number:05d}.jpg"))
    return folder


def test_sigterm_ends_a_validation_which_is_made_again(tmp_path):
    data, parts, whole = linked_pictures(tmp_path / "data", 250), tmp_path / "parts", tmp_path / "whole"
    words = ["--epochs", 2, "--device-batch-size", 2]
    process = begin(data, parts, *words, ranks=2)
    while process.alive() and not (parts / "run/checkpoints/step_00000006/manifest.json").exists():
        time.sleep(0.002)
    os.kill(process.processes[-1].pid, signal.SIGTERM)  # one rank is enough
    began = time.monotonic()
    done = process.wait()
    assert time.monotonic() - began < 10 and done.returncode == 0, done.stderr
    assert "stopped at update 6 of 12, saved; continue with: " in done.stdout and not evaluations(parts)
    for out in (parts, whole):
        train(data, out, *words, "--stop-after", 7, ranks=2)
    assert evaluations(parts) == evaluations(whole) != []
    assert final(parts, 7) == final(whole, 7)


def test_a_run_without_an_average_in_half_precision_resumes(pictures, tmp_path):
    """float16 with its loss scale, whose growth is part of the state."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = ["--amp", "float16", "--model-ema-decay", 0, "--epochs", 1]
    train(pictures, whole, *common)
    for stop in (3, -1):
        train(pictures, parts, *common, "--stop-after", stop)
    assert final(parts, 6, ("model", "optimizer")) == final(whole, 6, ("model", "optimizer"))
    place = "run/checkpoints/step_00000006"
    assert not (whole / place / "ema.safetensors").exists()
    scaler, resumed = (json.loads((out / place / "state.json").read_text())["scaler"] for out in (whole, parts))
    assert scaler == resumed and scaler["_growth_tracker"] == 6
    result = json.loads((whole / "results.jsonl").read_text())["metrics"]
    assert result["best"]["metric"] == "top1" and "ema_top1" not in result


def test_a_model_without_attention_of_ours_trains_and_resumes(pictures, tmp_path):
    """Also one whose buffers are part of its state: those of batch norms."""
    words = ["--data", pictures, "--out", tmp_path, "--model", "mobilenetv3_small_050", "--model-tag", "run"]
    words += ["--input-size", 32, "--device-type", "cpu", "--epochs", 2, "--batch-size", 24, "--group-size", 24]
    words += ["--warmup-epochs", 0, "--repeated-aug", 1, "--num-workers", 0, "--results", tmp_path / "results.jsonl"]
    for stop in (4, -1):
        done = tiny_vision.call("deit_gka.train", *words, "--stop-after", stop, folder=tmp_path / "output")
    assert "resuming" in done.stdout and [record["epoch"] for record in records(tmp_path, "eval")] == [1, 2]


def test_ranks_take_the_same_first_step_and_fewer_may_continue(pictures, tmp_path):
    """Adam's first moment after one update is a tenth of the gradient, here of 24 images on 1 and on 3 ranks."""
    common = ["--batch-size", 24, "--drop-path", 0, "--warmup-epochs", 0, "--clip-grad", 0]
    found = {}
    for ranks, device_batch_size in ((1, 24), (3, 6)):
        out = tmp_path / str(ranks)
        train(pictures, out, *common, "--stop-after", 1, "--device-batch-size", device_batch_size, ranks=ranks)
        state = {name: t for name, t in checkpoint(out, 1, "optimizer").items() if name.startswith("exp_avg/")}
        found[ranks] = state, records(out, "train")[0]
    (one, record), (three, other) = found[1], found[3]
    assert len(one) == len(checkpoint(tmp_path / "1", 1, "model"))
    norm = torch.stack([value.norm() for value in one.values()]).norm().item() * 10
    assert norm == pytest.approx(record["grad_norm"], rel=1e-4)
    assert all((three[name] - one[name]).norm() < 3e-5 * one[name].norm() for name in one)
    assert other["loss"] == pytest.approx(record["loss"], rel=1e-6)
    done = train(pictures, tmp_path / "3", *common, "--stop-after", 2)
    assert "resuming at update 1" in done.stdout and steps_of(tmp_path / "3") == [1, 2]


def test_a_moved_copy_of_the_data_and_incomplete_log_records_change_nothing(uninterrupted, pictures, tmp_path):
    """The last evaluation and the numbers of the end are made again; lines that say nothing are passed over."""
    shutil.copytree(pictures, tmp_path / "elsewhere")
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints" / f"step_{STEPS:08d}")
    tiny.damage_log(tmp_path / "run/log.jsonl", eval="broken", finish="sigma")
    done = train(tmp_path / "elsewhere", tmp_path)
    assert f"resuming at update {STEPS - 2}" in done.stdout and final(tmp_path) == final(uninterrupted)
    old, new = (json.loads((out / "results.jsonl").read_text())["metrics"] for out in (uninterrupted, tmp_path))
    assert all(new[key] == old[key] for key in ("best", "top1", "ema_top1", "images", "sigma"))


def test_other_data_is_refused_on_resume(uninterrupted, pictures, tmp_path, capsys):
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    shutil.copytree(pictures, tmp_path / "data")
    argv = flags(tmp_path / "data", tmp_path)

    def message():
        return in_process(training.main, TrainConfig, *argv, capsys=capsys)

    spare = tmp_path / "data/train/class_1/000.jpg"
    spare.rename(tmp_path / "000.jpg")
    said = r"has 77 training images where the run in .* had 78; give it its own data, .*, or another --model-tag"
    assert re.search(said, message())
    (tmp_path / "000.jpg").rename(spare)
    for split in ("train", "val"):
        (tmp_path / "data" / split / "class_1").rename(tmp_path / "data" / split / "class_9")
    assert "has other classes than the run in" in message()
