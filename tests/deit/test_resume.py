"""Vision runs that resume in half precision, with other models, ranks or places of the data, or are refused."""

import json
import shutil

import pytest
import torch

import tiny_vision
from deit_gka import train as training
from deit_gka.training.config import TrainConfig
from vision_runs import (
    STEPS,
    checkpoint,
    final,
    flags,
    in_process,
    records,
    steps_of,
    train,
)


def test_a_run_without_an_average_in_half_precision_resumes(pictures, tmp_path):
    """float16 with its loss scale, whose growth is part of the state."""
    at_once, parts = tmp_path / "whole", tmp_path / "parts"
    common = ["--amp", "float16", "--model-ema-decay", 0, "--epochs", 1]
    train(pictures, at_once, *common)
    for stop in (3, -1):
        train(pictures, parts, *common, "--stop-after", stop)
    assert final(parts, 6, ("model", "optimizer")) == final(at_once, 6, ("model", "optimizer"))
    place = "run/checkpoints/step_00000006"
    assert not (at_once / place / "ema.safetensors").exists()
    scaler, resumed = (json.loads((out / place / "state.json").read_text())["scaler"] for out in (at_once, parts))
    assert scaler == resumed and scaler["_growth_tracker"] == 6
    result = json.loads((at_once / "results.jsonl").read_text())["metrics"]
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
    by_ranks = {}
    for ranks, device_batch_size in ((1, 24), (3, 6)):
        out = tmp_path / str(ranks)
        train(pictures, out, *common, "--stop-after", 1, "--device-batch-size", device_batch_size, ranks=ranks)
        state = {name: t for name, t in checkpoint(out, 1, "optimizer").items() if name.startswith("exp_avg/")}
        by_ranks[ranks] = state, records(out, "train")[0]
    (one, record), (three, other) = by_ranks[1], by_ranks[3]
    assert len(one) == len(checkpoint(tmp_path / "1", 1, "model"))
    norm = torch.stack([value.norm() for value in one.values()]).norm().item() * 10
    assert norm == pytest.approx(record["grad_norm"], rel=1e-4)
    assert all((three[name] - one[name]).norm() < 3e-5 * one[name].norm() for name in one)
    assert other["loss"] == pytest.approx(record["loss"], rel=1e-6)
    done = train(pictures, tmp_path / "3", *common, "--stop-after", 2)
    assert "resuming at update 1" in done.stdout and steps_of(tmp_path / "3") == [1, 2]


def test_a_moved_copy_of_the_data_continues_a_run_and_other_data_is_refused(uninterrupted, pictures, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(pictures, data)
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints" / f"step_{STEPS:08d}")
    done = train(data, tmp_path)
    assert f"resuming at update {STEPS - 2}" in done.stdout and final(tmp_path) == final(uninterrupted)
    old, new = (json.loads((out / "results.jsonl").read_text())["metrics"] for out in (uninterrupted, tmp_path))
    assert all(new[key] == old[key] for key in ("best", "top1", "ema_top1", "images", "sigma"))
    spare = (data / "train/class_1/000.jpg").rename(tmp_path / "000.jpg")
    assert "77 training images" in in_process(training.main, TrainConfig, *flags(data, tmp_path), capsys=capsys)
    spare.rename(data / "train/class_1/000.jpg")
    for split in ("train", "val"):
        (data / split / "class_1").rename(data / split / "class_9")
    assert "other classes" in in_process(training.main, TrainConfig, *flags(data, tmp_path), capsys=capsys)
