"""The vision trainer: what a run leaves, what it learns, broken images, resuming, and its mistakes."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
import tiny_vision
from deit_gka import train as training
from deit_gka.model.registry import model_name
from deit_gka.training.config import TrainConfig
from deit_gka.training.images import best
from processes import signals_kept
from tiny import events, final, metrics, steps_of
from vision_runs import STEPS, TRAIN, checkpoint, flags, train, train_digits

# What a run leaves


def test_a_run_writes_down_what_it_did(uninterrupted):
    log, evaluations = events(uninterrupted, "train"), events(uninterrupted, "eval")
    assert steps_of(uninterrupted) == list(range(1, STEPS + 1))
    assert log[-1]["weight_decay"] == 0.05 and all(record["grad_norm"] > 0 for record in log)
    assert log[3]["lr"] == pytest.approx(1e-6 + (0.2 * 12 / 1024 - 1e-6) * 3 / 6)
    assert log[-1]["images_per_second"] > 0 and 0 <= log[-1]["waiting"] <= 1
    assert [(record["step"], record["epoch"]) for record in evaluations] == [(6 * n, n) for n in range(1, 6)]
    for record in evaluations:
        assert [record[key] for key in ("images", "broken", "broken_train", "memory_mib")] == [27, 0, 0, 0]
        assert [len(heads) for heads in record["sigma"].values()] == [2, 2]
        assert record["loss"] != record["ema_loss"]
    assert evaluations[0]["sigma"] != evaluations[-1]["sigma"]
    result = json.loads((uninterrupted / "results.jsonl").read_text())
    assert result["kind"] == "train_deit" and result["config"]["batch_size"] == 12
    numbers, highest = result["metrics"], max(evaluations, key=lambda record: record["ema_top1"])
    keys = ("top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss", "images", "sigma")
    assert all(numbers[key] == evaluations[-1][key] for key in keys)
    assert numbers["best"] == {"metric": "ema_top1", "value": highest["ema_top1"], "epoch": highest["epoch"]}
    weights = checkpoint(uninterrupted, STEPS, "model")
    assert numbers["parameters"] == sum(map(torch.numel, weights.values())) and numbers["flops"] > 0
    folder = uninterrupted / "run"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_00000028", "step_00000030"}
    (path,) = (folder / "best").iterdir()
    assert path.name == f"step_{highest['step']:08d}" and not (path / "optimizer.safetensors").exists()


# What an update does


def gradient_norm(out, step=1):
    """Adam's first moment after one update is a tenth of the gradient."""
    moments = [value for name, value in checkpoint(out, step, "optimizer").items() if name.startswith("exp_avg/")]
    return torch.stack([10 * value.norm() for value in moments]).norm().item()


def test_the_average_follows_the_weights_and_the_gradient_is_limited(pictures, tmp_path):
    """After three updates with warm-up it is the mean of the weights after each; and a resume goes on from there."""
    for stop in (2, 3):
        train(pictures, tmp_path, "--save-every", 1, "--keep", 4, "--clip-grad", 0.01, "--stop-after", stop)
    weights, average = [checkpoint(tmp_path, step, "model") for step in (1, 2, 3)], checkpoint(tmp_path, 3, "ema")
    for name, value in average.items():
        mean = torch.stack([update[name] for update in weights]).mean(0)
        torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-7, msg=name)
    assert any(not torch.equal(average[name], weights[2][name]) for name in average)
    assert gradient_norm(tmp_path) == pytest.approx(0.01, rel=1e-3)
    assert events(tmp_path, "train")[0]["grad_norm"] > 0.1


@pytest.mark.parametrize("kind,epochs,least", [("gka", 3, 35), ("vlt", 2, 20)], ids=["gka", "vlt"])
def test_it_learns_digits(tmp_path, kind, epochs, least):
    """The softmax model does for other tests (`digits`)."""
    rates = ["--lr", 0.2, "--epochs", epochs, "--log-every", 1]
    train_digits(tmp_path, "--model", model_name("tiny", kind), *rates)
    (last,), losses = events(tmp_path, "eval"), [record["loss"] for record in events(tmp_path, "train")]
    assert last["top1"] > least and last["ema_top1"] > least and last["top5"] > 70 and last["images"] == 599, last
    assert losses[0] == pytest.approx(2.3, abs=0.2) and sum(losses[-10:]) / 10 < 2.2
    assert bool(last["sigma"]) == (kind == "gka")


@pytest.mark.slow
@tiny.needs_compiler
@pytest.mark.parametrize(
    "compiled", [("default",), ("blocks",), ("blocks", "--grad-checkpointing")], ids=lambda words: "-".join(words)
)
def test_compiled_training_is_the_same_training(pictures, tmp_path, compiled):
    """On two processes, each with two pieces of an update, and then continued uncompiled."""
    common = ["--drop-path", 0, "--device-batch-size", 4]
    train(pictures, tmp_path, *common, "--stop-after", 2, "--compile", *compiled, ranks=2)
    train(pictures, tmp_path, *common, "--stop-after", 3)
    train(pictures, tmp_path / "off", *common, "--stop-after", 3)
    for name, value in checkpoint(tmp_path / "off", 3, "model").items():
        torch.testing.assert_close(checkpoint(tmp_path, 3, "model")[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind, compiled", [("gka", "auto"), ("gka", "max-autotune"), ("vlt", "auto"), ("softmax", "auto")]
)
def test_training_on_cuda_compiled_in_bfloat16(pictures, tmp_path, kind, compiled):
    shape = ["--model-kwargs", "patch_size=4", "embed_dim=64", "depth=2", "num_heads=2"]
    words = ["--device-type", "cuda", "--epochs", 10, "--compile", compiled, "--model", model_name("tiny", kind)]
    assert "finished" in tiny.call(TRAIN, *flags(pictures, tmp_path, *words, *shape)).stdout
    last = events(tmp_path, "eval")[-1]
    assert last["memory_mib"] > 0 and last["top1"] > 40


# Broken images


@pytest.mark.parametrize("ranks", [1, 2])
def test_broken_images_are_counted_and_listed(pictures, tmp_path, ranks):
    shutil.copytree(pictures, tmp_path / "data")
    names = [tmp_path / "data" / name for name in ("train/class_0/1.jpg", "train/class_2/2.jpg", "val/class_1/3.jpg")]
    for name, content in zip(names, (b"no picture", b"", b"no picture")):
        name.write_bytes(content)
    words = ["--epochs", 3, "--repeated-aug", 1, "--save-every", "-1"]
    done = train(tmp_path / "data", tmp_path, *words, ranks=ranks)
    listed = [line.split("\t") for line in (tmp_path / "run/broken_images.txt").read_text().splitlines()]
    reasons = dict(listed)
    assert reasons.keys() == set(map(str, names)) and all(reasons.values())
    if ranks == 1:
        assert len(listed) == 3 and all(done.stderr.count(str(name)) == 1 for name in names)
    last = events(tmp_path, "eval")[-1]
    assert (last["images"], last["broken"]) == (27, 1)
    assert 4 <= last["broken_train"] <= 6  # in 3 epochs, which draw 72 of 80 images
    assert metrics(tmp_path)["broken_train"] == last["broken_train"]


def test_an_evaluation_of_few_images_is_not_the_best():
    disk_trouble, fine = {"images": 500, "broken": 100, "top1": 90.0}, {"images": 598, "broken": 2, "top1": 60.0}
    assert best([disk_trouble, fine], "top1") is best([fine, disk_trouble], "top1") is fine
    always_broken = [{"images": 117, "broken": 3, "top1": accuracy} for accuracy in (10.0, 20.0, 20.0)]
    assert best(always_broken, "top1") is always_broken[1]


# Resuming; tests/trainkit/test_both_trainers.py has kills, signals and ranks


def test_a_run_without_an_average_in_half_precision_resumes(pictures, tmp_path):
    """float16 with its loss scale, whose growth is part of the state."""
    at_once, parts = tmp_path / "whole", tmp_path / "parts"
    common = ["--amp", "float16", "--model-ema-decay", 0, "--epochs", 1]
    train(pictures, at_once, *common)
    for stop in (3, -1):
        train(pictures, parts, *common, "--stop-after", stop)
    assert final(parts, 6) == final(at_once, 6)
    place = "run/checkpoints/step_00000006"
    assert not (at_once / place / "ema.safetensors").exists()
    scaler, resumed = (json.loads((out / place / "state.json").read_text())["scaler"] for out in (at_once, parts))
    assert scaler == resumed and scaler["_growth_tracker"] == 6
    assert metrics(at_once)["best"]["metric"] == "top1" and "ema_top1" not in metrics(at_once)


def test_a_model_without_attention_of_ours_trains_and_resumes(pictures, tmp_path):
    """Also one whose buffers are part of its state: those of batch norms."""
    words = ["--data", pictures, "--out", tmp_path, "--model", "mobilenetv3_small_050", "--model-tag", "run"]
    words += ["--input-size", 32, "--device-type", "cpu", "--epochs", 2, "--batch-size", 24, "--group-size", 24]
    words += ["--warmup-epochs", 0, "--repeated-aug", 1, "--num-workers", 0, "--results", tmp_path / "results.jsonl"]
    for stop in (4, -1):
        done = tiny_vision.call(TRAIN, *words, "--stop-after", stop, folder=tmp_path / "output")
    assert "resuming" in done.stdout and [record["epoch"] for record in events(tmp_path, "eval")] == [1, 2]


def test_ranks_take_the_same_first_step(pictures, tmp_path):
    """24 images on 1 and on 3 ranks."""
    common = ["--batch-size", 24, "--drop-path", 0, "--warmup-epochs", 0, "--clip-grad", 0]
    for ranks, device_batch_size in ((1, 24), (3, 6)):
        words = ["--stop-after", 1, "--device-batch-size", device_batch_size]
        train(pictures, tmp_path / str(ranks), *common, *words, ranks=ranks)
    one, three = (checkpoint(tmp_path / ranks, 1, "optimizer") for ranks in "13")
    (record,), (other,) = (events(tmp_path / ranks, "train") for ranks in "13")
    assert gradient_norm(tmp_path / "1") == pytest.approx(record["grad_norm"], rel=1e-4)
    moments = [name for name in one if name.startswith("exp_avg/")]
    assert all((three[name] - one[name]).norm() < 3e-5 * one[name].norm() for name in moments)
    assert other["loss"] == pytest.approx(record["loss"], rel=1e-6)


def test_a_moved_copy_of_the_data_continues_a_run_and_other_data_is_refused(uninterrupted, pictures, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(pictures, data)
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints" / f"step_{STEPS:08d}")
    done = train(data, tmp_path)
    assert f"resuming at update {STEPS - 2}" in done.stdout and final(tmp_path) == final(uninterrupted)
    old, new = metrics(uninterrupted), metrics(tmp_path)
    assert all(new[key] == old[key] for key in ("best", "top1", "ema_top1", "images", "sigma"))
    spare = (data / "train/class_1/000.jpg").rename(tmp_path / "000.jpg")
    assert "77 training images" in tiny.refused(training.main, TrainConfig, *flags(data, tmp_path))
    spare.rename(data / "train/class_1/000.jpg")
    for split in ("train", "val"):
        (data / split / "class_1").rename(data / split / "class_9")
    assert "other classes" in tiny.refused(training.main, TrainConfig, *flags(data, tmp_path))


# Numbers that are not finite


def test_a_loss_that_is_not_finite_ends_the_run(pictures, tmp_path):
    done = train(pictures, tmp_path, "--lr", 1e30, "--save-every", 1, check=False)
    tiny.assert_one_line_error(done, r"the loss is (nan|inf) .* Last checkpoint: .*/step_\d+\. .* --lr")
    assert re.search(r"warning: update \d: sigma of layer_0, head", done.stdout)  # before that
    named = re.search(r"Last checkpoint: (\S+)\.", done.stderr)[1]
    assert all(value.isfinite().all() for value in load_file(Path(named) / "model.safetensors").values())
    assert not (tmp_path / "results.jsonl").exists()


def test_float16_whose_gradients_stay_infinite_ends_the_run(pictures, tmp_path, monkeypatch):
    """Its updates are left out while the scale falls."""
    unscale = torch.amp.GradScaler.unscale_

    def overflow(scaler, optimizer):
        optimizer.param_groups[0]["params"][0].grad.fill_(math.inf)
        unscale(scaler, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", overflow)
    argv = flags(pictures, tmp_path, "--num-workers", 0, "--amp", "float16", "--eval-every", "-1")
    with signals_kept():
        assert "norm inf" in tiny.refused(training.main, TrainConfig, *argv)


# Mistakes

MISTAKES = {
    "--model deit_tiny_gke_patch16_224": "deit_tiny_gka_patch16_224",  # the nearest name
    "--aa nonsense": "--aa 'nonsense'",
    "--attention GA --model-kwargs attention=G": "--attention",
    "--model-kwargs depth": "--model-kwargs",
    "--model-kwargs img_size=64": "--input-size",
    "--input-size 18": "--input-size",
    "--patch-size 4": "--patch-size",  # and in the model's arguments
    "--compile blocks --model resnet18 --model-kwargs": "--compile blocks",
}


@pytest.mark.parametrize("more", MISTAKES)
def test_mistakes_are_one_line(pictures, more, tmp_path):
    argv = flags(pictures, tmp_path, *more.split())
    assert MISTAKES[more] in tiny.refused(training.main, TrainConfig, *argv)
