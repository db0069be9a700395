"""The vision trainer in real processes: what a run leaves, what it learns, evaluation in training, compiled."""

import json
import shlex

import pytest
import torch

import tiny
from deit_gka import train as training
from deit_gka.train import Trainer
from deit_gka.training.config import TrainConfig
from processes import signals_kept
from tiny_vision import SHAPE, SIZE
from trainkit_gka.cli import run
from vision_runs import EPOCHS, NAMES, STEPS, STEPS_PER_EPOCH, TRAIN, checkpoint, flags, micro, records, steps_of, train


def test_a_run_writes_down_what_it_did(uninterrupted, pictures):
    log, out = records(uninterrupted, "train"), uninterrupted
    assert steps_of(out) == list(range(1, STEPS + 1))
    assert log[-1]["weight_decay"] == 0.05 and all(record["grad_norm"] > 0 for record in log)
    peak = 0.2 * 12 / 1024
    assert log[0]["lr"] == pytest.approx(1e-6) and max(record["lr"] for record in log) == pytest.approx(peak, rel=0.15)
    assert log[3]["lr"] == pytest.approx(1e-6 + (peak - 1e-6) * 3 / 6) and log[-1]["lr"] < peak / 100
    assert log[8]["epoch"] == pytest.approx(1.5) and log[-1]["images_per_second"] > 0 and 0 <= log[-1]["waiting"] <= 1
    found = records(out, "eval")
    assert [(record["step"], record["epoch"]) for record in found] == [(6 * epoch, epoch) for epoch in range(1, 6)]
    for record in found:
        assert (
            record["images"] == 27
            and record["broken"] == 0
            and record["memory_mib"] == 0
            and record["broken_train"] == 0
        )
        assert set(record["sigma"]) == {"layer_0", "layer_1"} and all(
            len(heads) == 2 and min(heads) > 0 for heads in record["sigma"].values()
        )
        assert (
            all(0 <= record[key] <= 100 for key in ("top1", "ema_top1")) and record["top5"] == record["ema_top5"] == 100
        )  # of 3 classes
        assert record["loss"] != record["ema_loss"]
    assert found[0]["sigma"] != found[-1]["sigma"]
    (started,), (finished,) = records(out, "start"), records(out, "finish")
    assert started["config"]["lr"] == 0.2 and started["world_size"] == 1 and finished["step"] == STEPS


def test_bandwidths_out_of_range_are_said_at_once(pictures, tmp_path):
    words = ["--epochs", 1, "--warmup-epochs", 0, "--lr", 3e4, "--num-workers", 0]
    done = train(pictures, tmp_path, *words, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("warning: update 1: sigma of layer_0, head")]
    assert said and all(line.endswith("; start again with a lower --lr") for line in said), done.stdout + done.stderr


def test_a_run_records_its_result_and_keeps_its_checkpoints(uninterrupted, pictures):
    out, found = uninterrupted, records(uninterrupted, "eval")
    result = json.loads((out / "results.jsonl").read_text())
    assert (
        result["kind"] == "train_deit"
        and result["config"]["batch_size"] == 12
        and result["config"]["model_tag"] == "run"
    )
    metrics, best = result["metrics"], max(found, key=lambda record: record["ema_top1"])
    assert all(
        metrics[key] == found[-1][key]
        for key in ("top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss", "images", "sigma")
    )
    assert metrics["best"] == {"metric": "ema_top1", "value": best["ema_top1"], "epoch": best["epoch"]}
    assert (
        metrics["parameters"] == sum(parameter.numel() for parameter in micro(3).parameters()) and metrics["flops"] > 0
    )
    newest = out / "run" / "checkpoints" / f"step_{STEPS:08d}"
    assert {path.name for path in newest.iterdir()} == {
        "model.safetensors",
        "ema.safetensors",
        "optimizer.safetensors",
        "state.json",
        "manifest.json",
    }
    state = json.loads((newest / "state.json").read_text())
    assert (
        state["classes"] == ["class_0", "class_1", "class_2"]
        and state["epoch"] == EPOCHS
        and state["progress"]["step"] == STEPS
    )
    assert state["model"] == {
        "name": "deit_tiny_gka_patch16_224",
        "num_classes": 3,
        "input_size": SIZE,
        "kwargs": SHAPE,
    }
    assert [path.name for path in sorted((out / "run" / "checkpoints").iterdir())] == [
        f"step_{step:08d}" for step in (28, 30)
    ]
    (kept,) = (out / "run" / "best").iterdir()
    assert kept.name == f"step_{best['step']:08d}" and not (kept / "optimizer.safetensors").exists()


@pytest.mark.parametrize(
    "model,epochs,least", [(NAMES[0], 5, 50), (NAMES[1], 2, 20), (NAMES[2], 2, 20)], ids=["gka", "vlt", "softmax"]
)
def test_it_learns_digits(tmp_path, model, epochs, least):
    shape = ["--model-kwargs", "patch_size=8", "embed_dim=64", "depth=1", "num_heads=2"]
    batch = shlex.split("--batch-size 16 --group-size 16 --device-batch-size 16 --eval-every 2 --save-every -1")
    plain = shlex.split(
        "--repeated-aug 1 --scale 0.8 1 --hflip 0 --reprob 0 --mixup 0 --cutmix 0 --drop-path 0 --aa ''"
    )
    train("digits", tmp_path, *shape, "--model", model, "--epochs", epochs, *batch, *plain)
    evaluated = records(tmp_path, "eval")
    assert [(record["epoch"], record["step"]) for record in evaluated] == [
        (epoch, 74 * epoch) for epoch in ((2, 4, 5) if epochs == 5 else (2,))
    ]
    last, losses = evaluated[-1], [record["loss"] for record in records(tmp_path, "train")]
    assert last["top1"] > least and last["top5"] > 60 + least / 2 and last["images"] == 599, last
    assert last["ema_top1"] > 40 or epochs < 5
    assert losses[0] == pytest.approx(2.3, abs=0.2) and sum(losses[-10:]) / 10 < (1.7 if epochs == 5 else 2.2)
    assert bool(last["sigma"]) == ("gka" in model)


def test_the_average_follows_the_weights(pictures, tmp_path):
    """After three updates with warm-up it is the mean of the weights after each; and a resume goes on from there."""
    common = ["--save-every", 1, "--keep", 4]
    for stop in (2, 3):
        train(pictures, tmp_path, *common, "--stop-after", stop)
    weights = [checkpoint(tmp_path, step, "model") for step in (1, 2, 3)]
    average = checkpoint(tmp_path, 3, "ema")
    for name, value in average.items():
        torch.testing.assert_close(
            value, torch.stack([update[name] for update in weights]).mean(0), rtol=1e-5, atol=1e-7, msg=name
        )
    assert any(not torch.equal(average[name], weights[2][name]) for name in average)


def test_the_gradients_norm_is_limited(pictures, tmp_path):
    train(pictures, tmp_path, "--stop-after", 1, "--clip-grad", 0.01)
    state, (record,) = checkpoint(tmp_path, 1, "optimizer"), records(tmp_path, "train")
    norm = (
        torch.stack([value.norm() for name, value in state.items() if name.startswith("exp_avg/")]).norm().item() * 10
    )
    assert norm == pytest.approx(0.01, rel=1e-3) and record["grad_norm"] > 0.1


def test_the_best_checkpoint_is_the_best_averages(pictures, tmp_path, monkeypatch):
    planned = {1: (50.0, 60.0), 2: (90.0, 40.0), 3: (10.0, 70.0), 4: (95.0, 70.0), 5: (20.0, 65.0)}

    def numbers(trainer, bar, stop):
        raw, ema = planned[trainer.state["step"] // STEPS_PER_EPOCH]
        return {
            "top1": raw,
            "top5": 99.0,
            "loss": 1.0,
            "images": 27,
            "broken": 0,
            "ema_top1": ema,
            "ema_top5": 99.0,
            "ema_loss": 1.0,
        }

    monkeypatch.setattr(Trainer, "evaluate", numbers)
    with signals_kept():
        for stop in (14, -1):  # continued after the second epoch
            run(
                training.main,
                TrainConfig,
                [str(flag) for flag in flags(pictures, tmp_path, "--num-workers", 0, "--stop-after", stop)],
            )
    assert [path.name for path in (tmp_path / "run/best").iterdir()] == ["step_00000018"]
    assert json.loads((tmp_path / "results.jsonl").read_text())["metrics"]["best"] == {
        "metric": "ema_top1",
        "value": 70.0,
        "epoch": 3,
    }


@tiny.needs_compiler
def test_compiled_training_is_the_same_training(uninterrupted, pictures, tmp_path):
    train(pictures, tmp_path, "--compile", "default", "--stop-after", 3, "--drop-path", 0, ranks=1)
    train(pictures, tmp_path / "off", "--stop-after", 3, "--drop-path", 0)
    for name, value in checkpoint(tmp_path / "off", 3, "model").items():
        torch.testing.assert_close(checkpoint(tmp_path, 3, "model")[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["deit_tiny_gka_patch16_224", "deit_tiny_vlt_patch16_224", "deit_tiny_patch16_224"])
def test_training_on_cuda_compiled_in_bfloat16(pictures, tmp_path, model):
    shape = ["--model", model, "--model-kwargs", "patch_size=4", "embed_dim=64", "depth=2", "num_heads=2"]
    done = tiny.call(TRAIN, *flags(pictures, tmp_path, "--device-type", "cuda", "--epochs", 10, *shape))
    assert "finished" in done.stdout
    last = records(tmp_path, "eval")[-1]
    assert last["memory_mib"] > 0 and last["top1"] > 40
