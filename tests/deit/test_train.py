"""The vision trainer in real processes: nothing is lost, nothing depends on the number of ranks, mistakes are one line; then what reads its runs."""

import dataclasses
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import tiny
import tiny_vision
from deit_gka import evaluate
from deit_gka import train as training
from deit_gka.figures import cls_attention as figures
from deit_gka.model import checkpoints as model_io
from deit_gka.train import trusted
from deit_gka.training.config import TrainConfig
from tiny_vision import SHAPE, SIZE
from trainkit.checkpoint import save as save_checkpoint
from trainkit.cli import UserError, run
from vision_runs import (
    EPOCHS,
    EVALUATE,
    EXPORT,
    STEPS,
    STEPS_PER_EPOCH,
    TRAIN,
    Code,
    begin,
    checkpoint,
    evaluations,
    final,
    flags,
    in_process,
    records,
    signals_kept,
    steps_of,
    still_there,
    train,
    wait_for_step,
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """78 training JPEGs in 3 classes, 27 of validation."""
    return tiny_vision.write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def uninterrupted(pictures, tmp_path_factory):
    """The whole run, by the command one would type."""
    out = tmp_path_factory.mktemp("uninterrupted")
    done = tiny.call(TRAIN, *flags(pictures, out))
    assert "finished | top-1" in done.stdout
    (out / "stdout").write_text(done.stdout)
    return out


# --- What a run leaves ---


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


def micro(classes, name="deit_tiny_gka_patch16_224"):
    return model_io.build(name, classes, SIZE, **SHAPE)


def test_a_finished_run_is_not_run_again(uninterrupted, pictures):
    before = {
        path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file() and "output" not in path.parts
    }
    done = train(pictures, uninterrupted)
    assert "already trained for its 5 epochs" in done.stdout
    assert {path: path.read_bytes() for path in before} == before


NAMES = ("deit_tiny_gka_patch16_224", "deit_tiny_vlt_patch16_224", "deit_tiny_patch16_224")


@pytest.mark.parametrize(
    "model,epochs,least", [(NAMES[0], 5, 50), (NAMES[1], 2, 20), (NAMES[2], 2, 20)], ids=["gka", "vlt", "softmax"]
)
def test_it_learns_digits(tmp_path, model, epochs, least):
    shape = ["--model-kwargs", "patch_size=8", "embed_dim=64", "depth=1", "num_heads=2"]
    train("digits", tmp_path, *shape, "--model", model, "--epochs", epochs, "--batch-size", 16, "--group-size", 16, "--device-batch-size", 16,
          "--repeated-aug", 1, "--scale", 0.8, 1, "--hflip", 0, "--aa", "", "--reprob", 0, "--mixup", 0, "--cutmix", 0, "--drop-path", 0,
          "--eval-every", 2, "--save-every", "-1")  # fmt: skip
    evaluated = records(tmp_path, "eval")
    assert [(record["epoch"], record["step"]) for record in evaluated] == [
        (epoch, 74 * epoch) for epoch in ((2, 4, 5) if epochs == 5 else (2,))
    ]
    last, losses = evaluated[-1], [record["loss"] for record in records(tmp_path, "train")]
    assert last["top1"] > least and last["top5"] > 60 + least / 2 and last["images"] == 599, last
    assert last["ema_top1"] > 40 or epochs < 5
    assert losses[0] == pytest.approx(2.3, abs=0.2) and sum(losses[-10:]) / 10 < (1.7 if epochs == 5 else 2.2)
    assert bool(last["sigma"]) == ("gka" in model)


# --- Killed and continued ---


def test_kill_9_at_random_moments_and_resume_is_bit_identical(uninterrupted, pictures, tmp_path):
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


def test_kill_9_of_torchrun_with_two_ranks_and_resume_is_bit_identical(pictures, tmp_path):
    whole, killed, common = tmp_path / "whole", tmp_path / "killed", ["--epochs", 3, "--save-every", 2]
    train(pictures, whole, *common, ranks=2)
    process = tiny.start(TRAIN, *flags(pictures, killed, *common), ranks=2)
    while process.poll() is None and (steps_of(killed) or [0])[-1] < 9:
        time.sleep(0.002)
    workers = tiny_vision.descendants(process.pid)
    tiny.kill_tree(process)
    assert (
        9 <= steps_of(killed)[-1] < 18 and len(workers) >= 10
    )  # 2 ranks, each with a tracker of resources, a server and 2 loaders
    assert not still_there(workers)
    done = train(pictures, killed, *common, ranks=2)
    assert "resuming at update" in done.stdout and "2 x cpu" in done.stdout
    assert final(killed, 18) == final(whole, 18)
    assert evaluations(killed) == evaluations(whole) and evaluations(whole)[-1]["images"] == 27


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_leaves_no_process_and_says_how_to_continue(uninterrupted, pictures, tmp_path, ranks):
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
    launcher = ["python"] if ranks == 1 else ["torchrun", "--standalone", "--nproc-per-node", "2"]
    assert command == [*launcher, "-m", TRAIN, *map(str, flags(pictures, tmp_path, "--save-every", "-1"))]
    if ranks == 1:
        train(pictures, tmp_path, "--save-every", "-1")
        assert final(tmp_path) == final(uninterrupted)


def test_stop_after_keeps_the_schedule(uninterrupted, pictures, tmp_path):
    done = train(pictures, tmp_path, "--stop-after", 10)
    assert "stopped at update 10 of 30, saved" in done.stdout and steps_of(tmp_path) == list(range(1, 11))
    same = [(record["lr"], record["loss"], record["grad_norm"]) for record in records(uninterrupted, "train")[:10]]
    assert [(record["lr"], record["loss"], record["grad_norm"]) for record in records(tmp_path, "train")] == same
    done = train(pictures, tmp_path)
    assert "resuming at update 10" in done.stdout and final(tmp_path) == final(uninterrupted)


def test_a_damaged_newest_checkpoint_falls_back(uninterrupted, pictures, tmp_path):
    train(pictures, tmp_path, "--stop-after", 10)
    file = tmp_path / "run/checkpoints/step_00000010/ema.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    done = train(pictures, tmp_path)
    assert (
        "ema.safetensors does not have its recorded checksum" in done.stdout and "resuming at update 8" in done.stdout
    )
    assert final(tmp_path) == final(uninterrupted) and steps_of(tmp_path) == list(range(1, STEPS + 1))


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


# --- Any number of processes ---


def test_ranks_take_the_same_first_step(pictures, tmp_path):
    """Adam's first moment after one update is a tenth of the gradient: 24 images on 1, 2 and 3 ranks, in pieces of any size."""
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


def test_the_gradients_norm_is_limited(pictures, tmp_path):
    train(pictures, tmp_path, "--stop-after", 1, "--clip-grad", 0.01)
    state, (record,) = checkpoint(tmp_path, 1, "optimizer"), records(tmp_path, "train")
    norm = (
        torch.stack([value.norm() for name, value in state.items() if name.startswith("exp_avg/")]).norm().item() * 10
    )
    assert norm == pytest.approx(0.01, rel=1e-3) and record["grad_norm"] > 0.1


def test_another_number_of_ranks_may_continue(pictures, tmp_path):
    train(pictures, tmp_path, "--stop-after", 3, ranks=3)
    done = train(pictures, tmp_path, "--epochs", EPOCHS, "--stop-after", 6)
    assert "resuming at update 3" in done.stdout and steps_of(tmp_path) == list(range(1, 7))


# --- Evaluation in training ---


def test_the_best_checkpoint_is_the_best_averages(pictures, tmp_path, monkeypatch):
    planned = {1: (50.0, 60.0), 2: (90.0, 40.0), 3: (10.0, 70.0), 4: (95.0, 70.0), 5: (20.0, 65.0)}

    def numbers(trainer, bar):
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

    monkeypatch.setattr(training, "evaluate_now", numbers)
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


def test_a_kill_before_the_evaluation_is_made_up_for(uninterrupted, pictures, tmp_path):
    """As if killed between an epoch's checkpoint and its evaluation."""
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    log = tmp_path / "run/log.jsonl"
    lines = [line for line in log.read_text().splitlines() if (record := json.loads(line))["event"] != "finish" and
             not (record["event"] == "eval" and record["step"] == STEPS)]  # fmt: skip
    log.write_text("\n".join(lines) + "\n")
    done = train(pictures, tmp_path)
    assert "finished | top-1" in done.stdout and evaluations(tmp_path) == evaluations(uninterrupted)
    old, new = (json.loads((out / "results.jsonl").read_text())["metrics"] for out in (uninterrupted, tmp_path))
    assert new["best"] == old["best"] and new["ema_top1"] == old["ema_top1"]


def test_a_log_that_lacks_values_is_made_up_for(uninterrupted, pictures, tmp_path):
    """The last evaluation and the numbers of the end are made again; lines that say nothing are passed over."""
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    tiny.damage_log(tmp_path / "run/log.jsonl", eval="broken", finish="sigma")
    done = train(pictures, tmp_path)
    assert "finished | top-1" in done.stdout and "Traceback" not in done.stderr
    old, new = (json.loads((out / "results.jsonl").read_text())["metrics"] for out in (uninterrupted, tmp_path))
    assert all(new[key] == old[key] for key in ("best", "top1", "ema_top1", "images", "sigma"))


def test_wandb_offline_needs_no_account_and_has_the_numbers(pictures, tmp_path):
    more = ["--epochs", 1, "--warmup-epochs", 0, "--num-workers", 0, "--wandb", "offline"]
    tiny.call(TRAIN, *flags(pictures, tmp_path, *more), env=tiny.without_account(tmp_path))
    said = tiny.wandb_text(tmp_path / "run")
    for event, key in (("train", "grad_norm"), ("eval", "top1"), ("finish", "ema_top1")):
        values = [record[key] for record in records(tmp_path, event)]
        assert values and f"{event}/{key}".encode() in said and all(repr(value).encode() in said for value in values)


# --- Broken images and streams ---


def spoil(pictures, folder):
    shutil.copytree(pictures, folder)
    names = [folder / "train/class_0/bad_1.jpg", folder / "train/class_2/bad_2.jpg", folder / "val/class_1/bad_3.jpg"]
    for name in names:
        name.write_bytes(b"" if "2" in name.name else b"no picture")
    return [str(name) for name in names]


@pytest.mark.parametrize("ranks", [1, 2])
def test_broken_images_are_counted_and_listed(pictures, tmp_path, ranks):
    names = spoil(pictures, tmp_path / "data")
    done = train(
        tmp_path / "data", tmp_path / "out", "--epochs", 3, "--repeated-aug", 1, "--save-every", "-1", ranks=ranks
    )
    listed = (tmp_path / "out/run/broken_images.txt").read_text().splitlines()
    assert {line.split("\t")[0] for line in listed} == set(names)
    if ranks == 1:
        assert len(listed) == 3 and all(done.stderr.count(f"warning: {name} cannot be read") == 1 for name in names)
    reasons = dict(line.split("\t") for line in listed)
    assert "not a JPEG" in reasons[names[0]] and "empty" in reasons[names[1]]
    last = records(tmp_path / "out", "eval")[-1]
    assert (last["images"], last["broken"]) == (27, 1) and 4 <= last[
        "broken_train"
    ] <= 6  # 80 images, 72 drawn an epoch
    assert "broken training images" in done.stdout and "on 27 images, 1 more are broken" in done.stdout
    assert json.loads((tmp_path / "out/results.jsonl").read_text())["metrics"]["broken_train"] == last["broken_train"]


def test_a_broken_file_with_a_name_of_any_bytes_does_not_end_a_run(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "data")
    folder = next((tmp_path / "data/val").iterdir())
    (folder / os.fsdecode(b"caf\xe9.jpg")).touch()
    for _ in range(2):  # the second run reads the list of the first
        done = train(tmp_path / "data", tmp_path / "out", "--epochs", 1, "--warmup-epochs", 1)
    assert "already trained" in done.stdout
    assert b"caf\xe9.jpg\tthe file is empty" in (tmp_path / "out/run/broken_images.txt").read_bytes()


def test_an_evaluation_that_could_not_read_many_images_is_not_the_best():
    disk_trouble, fine = {"images": 500, "broken": 100, "top1": 90.0}, {"images": 598, "broken": 2, "top1": 60.0}
    assert trusted([disk_trouble, fine]) == [fine] and trusted([disk_trouble], fine) == []
    always_broken = [{"images": 117, "broken": 3, "top1": accuracy} for accuracy in (10.0, 20.0)]
    assert trusted(always_broken) == always_broken


def test_a_disk_that_is_gone_is_one_line(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "data")
    process = begin(tmp_path / "data", tmp_path / "out", "--epochs", 1000)
    wait_for_step(process, tmp_path / "out", 8)
    (tmp_path / "data/train").rename(tmp_path / "data/elsewhere")
    done = process.wait()
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith("warning: ")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert re.fullmatch(
        r"error: none of \d+ images in a row can be read, the first is .*; is the disk still there\?", lines[0]
    )


# --- Mistakes ---


def test_a_checkpoint_of_another_kind_is_refused_in_one_line(tmp_path):
    folder = save_checkpoint(tmp_path / "run/checkpoints", 1, {"model": {"w": torch.zeros(1)}}, {"train_config": {}})
    for path in (tmp_path / "run", folder):
        with pytest.raises(
            UserError, match="is not of a vision run; nanochat_gka evaluates and exports language models"
        ):
            model_io.find_checkpoint(path)


def test_a_loss_that_is_not_finite_stops_and_names_the_last_checkpoint(pictures, tmp_path):
    done = train(pictures, tmp_path, "--lr", 1e30, "--save-every", 1, check=False)
    tiny.assert_one_line_error(done, r"the loss is (nan|inf) and the gradient's norm .* at update \d+ \(learning rate .*, sigma between .*\); the weights "
                                     r"were not touched. Last checkpoint: .*/step_\d+\. Start a new --model-tag with a lower --lr")  # fmt: skip
    named = re.search(r"Last checkpoint: (\S+)\.", done.stderr)[1]
    assert all(value.isfinite().all() for value in load_file(Path(named) / "model.safetensors").values())
    assert (tmp_path / "run/checkpoints").exists() and not (tmp_path / "results.jsonl").read_text()


def test_weights_that_are_not_finite_are_not_said_to_be_untouched_and_not_saved(
    pictures, tmp_path, monkeypatch, capsys
):
    """A first update that ruins the weights: its loss and gradient were fine."""
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda optimizer: [value.data.fill_(math.inf) for value in optimizer.param_groups[0]["params"]],
    )
    for save_every, what in (("-1", "an earlier update has ruined the weights"), (1, "they were not saved")):
        with signals_kept():
            more = ["--num-workers", 0, "--save-every", save_every, "--model-tag", f"run{save_every}"]
            message = in_process(training.main, TrainConfig, *flags(pictures, tmp_path, *more), capsys=capsys)
        assert (
            " at update 1 (learning rate 1e-06, sigma between" in message
            and f"; {what}. Last checkpoint: none was saved yet" in message
        )
        assert not (tmp_path / f"run{save_every}/checkpoints").exists()


def test_a_gradient_that_is_never_finite_ends_a_run_in_float16(pictures, tmp_path, monkeypatch, capsys):
    """Its updates are left out one by one while the scale falls, and nothing would ever be learned."""
    unscale = torch.amp.GradScaler.unscale_

    def overflow(scaler, optimizer):
        optimizer.param_groups[0]["params"][0].grad.fill_(math.inf)
        unscale(scaler, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", overflow)
    more = ["--amp", "float16", "--num-workers", 0, "--eval-every", "-1"]
    with signals_kept():
        message = in_process(training.main, TrainConfig, *flags(pictures, tmp_path, *more), capsys=capsys)
    assert "the gradient's norm inf at update" in message and "the weights were not touched" in message


@pytest.mark.parametrize(
    "more,message",
    [
        (["--lr", "0.1"], r"--lr is 0.1 but the run in .* has 0.2; use its value, or another --model-tag"),
        (["--epochs", "6"], r"--epochs is 6 but .* has 5"),
        (["--model-kwargs", "patch_size=8"], r"--model-kwargs is .*patch_size=8.* but"),
        (["--seed", "1"], r"--seed is 1 but"),
        (["--repeated-aug", "1"], r"--repeated-aug is 1 but"),
        (["--batch-size", "24"], r"--batch-size is 24 but"),
        (["--model", "deit_tiny_vlt_patch16_224"], r"--model is deit_tiny_vlt_patch16_224 but"),
        (
            ["--model-tag", "new", "--model", "deit_tiny_gke_patch16_224"],
            r"no model 'deit_tiny_gke_patch16_224'; did you mean .*deit_tiny_gka_patch16_224",
        ),
        (["--model-tag", "new", "--aa", "nonsense"], r"--aa 'nonsense' is not an augmentation of timm's"),
        (["--model-tag", "new", "--model-kwargs", "depth"], r"--model-kwargs takes name=value, got 'depth'"),
        (
            ["--model-tag", "new", "--model-kwargs", "img_size=64"],
            r"--model-kwargs cannot set img_size in training: it is --input-size",
        ),
        (["--model-tag", "new", "--model-kwargs", "name=x"], r"--model-kwargs cannot set name: it is --model"),
        (
            ["--model-tag", "new", "--model-kwargs", "deepness=3"],
            r"timm cannot build deit_tiny_gka_patch16_224: .*deepness",
        ),
        (["--model-tag", "new", "--model-kwargs", "num_heads=5"], r"timm cannot build .*5"),
        (["--model-tag", "new", "--data", "/nowhere"], r"/nowhere does not exist; data is a folder with"),
        (
            ["--model-tag", "new", "--batch-size", "80"],
            r"has 78 training images, fewer than one batch; lower --batch-size \(now 80\)",
        ),
        (["--model-tag", "new", "--batch-size", "7"], r"--batch-size must be even"),
        (["--device-batch-size", "1"], r"--device-batch-size must be at least 2"),
        (["--num-workers", "-3"], r"--num-workers must be between 0 and 1024, or -1 for automatic, got -3"),
        (["--save-every", "0"], r"--save-every must be at least 1, or -1 for off"),
        (["--model-tag", "a/b"], r"--model-tag must be a plain folder name"),
        (["--model-tag", "new", "--crop-pct", "0"], r"--crop-pct must be above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(uninterrupted, pictures, more, message, capsys):
    assert re.search(
        message, in_process(training.main, TrainConfig, *flags(pictures, uninterrupted, *more), capsys=capsys)
    )


REFUSED = {
    "--color-jitter": ("nan", "inf", -1), "--distillation-alpha": ("nan", -0.1, 1.1), "--distillation-tau": ("nan", 0, "inf"),
    "--epochs": (0, 2_000_000), "--batch-size": (0, -2, 7), "--group-size": (0, 3), "--lr": ("nan", "inf", 0, -1), "--weight-decay": ("nan", "inf", 1, -0.1),
    "--opt-betas": (("nan", 0.9), (0.9, 1), (-0.1, 0.9), ("inf", 0.9)), "--clip-grad": ("nan", "inf", -1), "--warmup-epochs": ("nan", "inf", -1, 6),
    "--warmup-lr": ("nan", "inf", 0, 1), "--min-lr": ("nan", "inf", -1e-6, 1), "--input-size": (0, -16, 18, 10**9), "--scale": (("nan", 1), (0.5, 0.4), (0, 1), (0.5, 2)),
    "--ratio": (("nan", 1), (1, "inf"), (0, 1)), "--hflip": ("nan", 1.1, -0.1), "--reprob": ("nan", 2), "--repeated-aug": (0, 10**9),
    "--mixup": ("nan", "inf", -1), "--cutmix": ("nan", "inf", -1), "--smoothing": ("nan", 1, -0.1), "--drop-path": ("nan", 1, -0.5),
    "--model-ema-decay": ("nan", 1, -0.1), "--crop-pct": ("nan", 0, 1.5), "--seed": (-1, 2**63), "--device-batch-size": (0, 1), "--num-workers": (-3, 10**6),
    "--eval-every": (0, -2), "--save-every": (0, -2), "--keep": (0,), "--log-every": (0, -1), "--stop-after": (0, -2),
    "--model-kwargs": ("depth=0", "depth=100000", "patch_size=0", "mlp_ratio=0", "mlp_ratio=NaN", "drop_path_rate=NaN", "drop_path_rate=1", "embed_dim=-8",
                       "num_heads=0", "sigma_squared=Infinity", "init_values=NaN"),
}  # fmt: skip


def numeric(config):
    return {
        f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(config)
        if re.search(r"\b(int|float)\b", str(field.type))
    }


def test_every_number_that_ruins_a_run_is_refused(pictures, tmp_path, capsys):
    assert numeric(TrainConfig) <= set(REFUSED)
    for flag, values in REFUSED.items():
        for value in values:
            words = value if isinstance(value, tuple) else (value,)
            message = in_process(training.main, TrainConfig, *flags(pictures, tmp_path, flag, *words), capsys=capsys)
            assert message.startswith(f"error: {flag} "), message
    assert not (tmp_path / "run/checkpoints").exists()


def test_every_number_that_ruins_an_evaluation_is_refused(pictures, capsys):
    refused = {"--crop-pct": ("nan", 0, 2, -2), "--device-batch-size": (0, -1), "--num-workers": (-3, 10**6)}
    assert numeric(evaluate.EvaluateConfig) == set(refused)
    for flag, values in refused.items():
        for value in values:
            argv = ["--data", pictures, "--model", "deit_tiny_patch16_224", "--pretrained", flag, value]
            assert in_process(evaluate.main, evaluate.EvaluateConfig, *argv, capsys=capsys).startswith(
                f"error: {flag} must be "
            )


def test_data_that_are_gone_are_named(uninterrupted, pictures, tmp_path, capsys):
    """Evaluating and resuming say what the run needs; evaluating finds it alone."""
    argv = [
        "--run",
        uninterrupted / "run",
        "--device-type",
        "cpu",
        "--num-workers",
        0,
        "--results",
        tmp_path / "eval.jsonl",
    ]
    run(evaluate.main, evaluate.EvaluateConfig, [str(flag) for flag in argv])
    assert json.loads((tmp_path / "eval.jsonl").read_text())["metrics"]["ema"]["images"] == 27
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    (newest,) = (path for path in (tmp_path / "run/checkpoints").iterdir() if path.name.endswith(f"{STEPS}"))
    needs = f"/run was trained on {pictures} (78 training and 27 validation images in 3 classes)"
    message = in_process(evaluate.main, evaluate.EvaluateConfig, *argv, "--data", "/nowhere", capsys=capsys)
    assert "/nowhere does not exist" in message and needs in message
    message = in_process(training.main, TrainConfig, *flags("/nowhere", tmp_path), capsys=capsys)
    assert "/nowhere does not exist" in message and needs in message
    state = json.loads((newest / "state.json").read_text())
    del state["trained_on"]  # as runs were that did not write it down
    folder = save_checkpoint(
        tmp_path / "old/checkpoints", STEPS, {"model": checkpoint(uninterrupted, STEPS, "model")}, state
    )
    message = in_process(evaluate.main, evaluate.EvaluateConfig, *argv, "--run", folder, capsys=capsys)
    assert "--data is missing" in message and "78 training and 27 validation images in 3 classes" in message


def test_a_run_older_than_a_flag_resumes_with_the_flags_default(pictures, tmp_path, capsys):
    train(pictures, tmp_path, "--stop-after", 2)
    path = tmp_path / "run/checkpoints/step_00000002"
    state = json.loads((path / "state.json").read_text())
    assert state["train_config"].pop("model_ema_warmup") is True and state["train_config"].pop("smoothing") == 0.1
    tensors = {name: load_file(path / f"{name}.safetensors") for name in ("model", "ema", "optimizer")}
    shutil.rmtree(path)
    save_checkpoint(path.parent, 2, tensors, state)
    message = in_process(training.main, TrainConfig, *flags(pictures, tmp_path, "--smoothing", 0.2), capsys=capsys)
    assert "--smoothing is 0.2 but the run in" in message and "has 0.1;" in message
    assert "resuming at update 2" in train(pictures, tmp_path, "--stop-after", 3).stdout


def test_the_epochs_line_has_the_validation_loss_and_fits_the_screen(uninterrupted):
    lines = [line for line in (uninterrupted / "stdout").read_text().splitlines() if line.startswith("epoch ")]
    assert len(lines) == EPOCHS
    for line, record in zip(lines, records(uninterrupted, "eval")):
        heads = [value for layer in record["sigma"].values() for value in layer]
        assert (
            f" loss {record['loss']:.3f} | EMA {record['ema_top1']:.2f} {record['ema_top5']:.2f} {record['ema_loss']:.3f} | "
            in line
        )
        assert f" | sigma {min(heads):.2f}-{max(heads):.2f} | " in line and line.endswith(" img/s")
    values = {
        "top1": 100.0,
        "top5": 100.0,
        "loss": 12.34567,
        "ema_top1": 100.0,
        "ema_top5": 100.0,
        "ema_loss": 12.34567,
        "broken": 0,
    }
    widest = training.epoch_text(values, {"images_per_second": 123_456.7}, {"layer_0": [0.01234, 123.4567]})
    assert len(f"epoch 300/300 | {widest} | 81,920 MiB") <= 130


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


# --- Compiled ---


def test_compiled_training_is_the_same_training(uninterrupted, pictures, tmp_path):
    train(pictures, tmp_path, "--compile", "default", "--stop-after", 3, "--drop-path", 0, ranks=1)
    train(pictures, tmp_path / "off", "--stop-after", 3, "--drop-path", 0)
    for name, value in checkpoint(tmp_path / "off", 3, "model").items():
        torch.testing.assert_close(checkpoint(tmp_path, 3, "model")[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["deit_tiny_gka_patch16_224", "deit_tiny_vlt_patch16_224", "deit_tiny_patch16_224"])
def test_training_on_cuda_compiled_in_bfloat16(pictures, tmp_path, model):
    more = [
        "--device-type",
        "cuda",
        "--model",
        model,
        "--model-kwargs",
        "patch_size=4",
        "embed_dim=64",
        "depth=2",
        "num_heads=2",
        "--epochs",
        10,
    ]
    done = tiny.call(TRAIN, *flags(pictures, tmp_path, *more))
    assert "finished" in done.stdout
    last = records(tmp_path, "eval")[-1]
    assert last["memory_mib"] > 0 and last["top1"] > 40


# --- Evaluating a run ---


def evaluation(data, out, *more, **options):
    """The numbers of the evaluate command, by candidate."""
    done = tiny_vision.call(EVALUATE, "--data", data, "--device-type", "cpu", "--num-workers", 1, "--results", out / "eval.jsonl", *more,
                            folder=out / "output", **options)  # fmt: skip
    return json.loads((out / "eval.jsonl").read_text().splitlines()[-1])["metrics"] if not done.returncode else done


NUMBERS = ("top1", "top5", "loss", "images")


def test_evaluate_finds_what_the_trainer_found(uninterrupted, pictures, tmp_path):
    last = records(uninterrupted, "eval")[-1]
    found = evaluation(pictures, tmp_path, "--run", uninterrupted / "run", "--device-batch-size", 8)
    assert {key: found["model"][key] for key in NUMBERS} == {key: last[key] for key in NUMBERS}
    assert {key: found["ema"][key] for key in NUMBERS} == {
        key: last[key if key == "images" else f"ema_{key}"] for key in NUMBERS
    }
    assert found["ema"]["crop_pct"] == 0.875 and found["ema"]["images_per_second"] > 0
    best = evaluation(pictures, tmp_path, "--run", uninterrupted / "run", "--best", "--weights", "ema")
    assert set(best) == {"ema"} and best["ema"]["top1"] == max(
        record["ema_top1"] for record in records(uninterrupted, "eval")
    )
    for ranks in (2, 3):
        parts = evaluation(pictures, tmp_path, "--run", uninterrupted / "run", "--device-batch-size", 5, ranks=ranks)
        for weights in ("model", "ema"):
            assert {key: parts[weights][key] for key in NUMBERS if key != "loss"} == {
                key: found[weights][key] for key in NUMBERS if key != "loss"
            }
            assert parts[weights]["loss"] == pytest.approx(found[weights]["loss"], rel=1e-6)


@pytest.fixture
def deit_file(uninterrupted, tmp_path):
    """The run's raw weights as DeiT's own files hold theirs."""
    torch.save({"model": checkpoint(uninterrupted, STEPS, "model")}, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


TIMM = ["--model", "deit_tiny_gka_patch16_224", "--crop-pct", 0.875]


def kwargs(**more):
    return [
        "--model-kwargs",
        *(f"{key}={value}" for key, value in {**SHAPE, "img_size": SIZE, "num_classes": 3, **more}.items()),
    ]


def test_a_timm_model_with_a_file_of_deits_layout(uninterrupted, pictures, deit_file, tmp_path):
    last = records(uninterrupted, "eval")[-1]
    (found,) = evaluation(
        pictures, tmp_path, *TIMM, *kwargs(), "--checkpoint", deit_file, "--device-batch-size", 8
    ).values()
    assert {key: found[key] for key in NUMBERS} == {key: last[key] for key in NUMBERS}


def test_mistakes_of_evaluate_are_one_line(uninterrupted, pictures, deit_file, tmp_path, capsys):
    def message(*argv):
        argv = ["--data", pictures, "--device-type", "cpu", "--results", tmp_path / "eval.jsonl", *argv]
        return in_process(evaluate.main, evaluate.EvaluateConfig, *argv, capsys=capsys)

    torch.save({"model": micro(4).state_dict()}, tmp_path / "four.pth")
    assert re.search(
        r"tells 4 classes apart but .* has 3",
        message(*TIMM, *kwargs(num_classes=4), "--checkpoint", tmp_path / "four.pth"),
    )
    assert "does not hold weights of this model" in message(*TIMM, *kwargs(), "--checkpoint", tmp_path / "four.pth")
    marker = Path("/tmp/gka-was-here")
    marker.unlink(missing_ok=True)
    torch.save({"model": checkpoint(uninterrupted, STEPS, "model"), "args": Code()}, tmp_path / "code.pth")
    assert (
        "does not hold weights" in message(*TIMM, *kwargs(), "--checkpoint", tmp_path / "code.pth")
        and not marker.exists()
    )
    assert "weights not found" in message(*TIMM, *kwargs(), "--checkpoint", tmp_path / "none.pth")
    assert "give either --run" in message() and "give either --run" in message(*TIMM, "--run", uninterrupted / "run")
    assert "--model needs weights" in message(*TIMM)
    assert "no checkpoint in" in message("--run", tmp_path)
    assert "was trained on 3 classes but digits has 10" in message("--run", uninterrupted / "run", "--data", "digits")
    assert not (tmp_path / "eval.jsonl").exists()


# --- Exporting it ---


@pytest.mark.parametrize("weights", ["ema", "model"])
def test_an_exported_run_is_timms(uninterrupted, tmp_path, weights):
    folder = tmp_path / "exported"
    done = tiny_vision.call(
        EXPORT, "--run", uninterrupted / "run", "--out", folder, "--weights", weights, folder=tmp_path / "output"
    )
    assert "epoch 5" in done.stdout and str(folder) in done.stdout
    images = torch.randn(4, 3, SIZE, SIZE)
    model = micro(3).eval()
    model.load_state_dict(checkpoint(uninterrupted, STEPS, weights))
    by_folder = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    arguments = dict(SHAPE, num_classes=3, img_size=SIZE)
    by_file = timm.create_model(
        "deit_tiny_gka_patch16_224", checkpoint_path=str(folder / "model.safetensors"), **arguments
    ).eval()
    with torch.inference_mode():
        logits = model(images)
        assert torch.equal(by_folder(images), logits) and torch.equal(by_file(images), logits) and logits.std() > 0
    config = json.loads((folder / "config.json").read_text())
    about = config["pretrained_cfg"]
    assert about["crop_pct"] == 0.875 and about["input_size"] == [3, SIZE, SIZE] and about["interpolation"] == "bicubic"
    assert config["label_names"] == ["class_0", "class_1", "class_2"] and config["num_classes"] == 3
    assert config["architecture"] == "deit_tiny_gka_patch16_224"
    assert timm.data.resolve_model_data_config(by_folder)["crop_pct"] == 0.875


def test_export_of_what_is_not_there(uninterrupted, tmp_path):
    with pytest.raises(UserError, match="no checkpoint in"):
        model_io.find_checkpoint(tmp_path)
    found = model_io.find_checkpoint(uninterrupted / "run/checkpoints" / f"step_{STEPS:08d}")
    assert found.step == STEPS and model_io.find_checkpoint(uninterrupted / "run", best=True).path.parent.name == "best"
    (tmp_path / "raw").mkdir()
    shutil.copytree(found.path, tmp_path / "raw" / found.path.name)
    (tmp_path / "raw" / found.path.name / "ema.safetensors").unlink()
    found.path = tmp_path / "raw" / found.path.name
    with pytest.raises(UserError, match="has no ema weights; choose --weights model"):
        model_io.load_run(found, "ema", "cpu")


# --- Pictures of attention ---


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_attention_maps_are_the_weights_the_model_used(name):
    model, images = micro(3, name), torch.randn(2, 3, SIZE, SIZE)
    before, outputs = model.eval()(images).detach(), {}
    hooks = [block.attn.register_forward_hook(lambda module, args, output, layer=layer: outputs.update({layer: (args[0], output)}))
             for layer, block in enumerate(model.blocks)]  # fmt: skip
    maps = figures.attention_maps(model, images)
    for hook in hooks:
        hook.remove()
    assert [weights.shape for weights in maps] == [(2, 2, 17, 17)] * 2 and not torch.equal(maps[0], maps[1])
    for layer, weights in enumerate(maps):
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 17))
        attention, (x, output) = model.blocks[layer].attn, outputs[layer]
        heads = x.unflatten(-1, (2, -1))
        if name == "deit_tiny_patch16_224":
            values = attention.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)[2]
        else:
            values = attention.values(heads)
        again = attention.proj(torch.einsum("bhij,bjhd->bihd", weights, values).flatten(2))
        torch.testing.assert_close(again, output, rtol=1e-4, atol=1e-5)
    assert all(not block.attn._forward_pre_hooks for block in model.blocks)  # none is left
    torch.testing.assert_close(model(images), before)
    seen = figures.cls_map(maps[-1], (4, 4))
    assert seen.shape == (2, 2, 4, 4) and seen[1, 0, 2, 3] == maps[-1][1, 0, 0, 1 + 2 * 4 + 3]


def test_maps_in_pixels_are_never_negative():
    """One patch that has it all: bicubic swings below 0 around it."""
    maps = torch.zeros(1, 1, 4, 4)
    maps[..., 1, 2] = 1
    assert torch.nn.functional.interpolate(maps, size=(32, 32), mode="bicubic", align_corners=False).min() < -0.05
    pixels = figures.to_pixels(maps, 32)
    assert pixels.shape == (1, 1, 32, 32) and pixels.min() == 0 and pixels.argmax() // 32 in range(8, 16)


def test_hooks_go_when_the_model_fails():
    model = micro(3)
    with pytest.raises(AssertionError):
        figures.attention_maps(model, torch.randn(1, 3, SIZE + 1, SIZE))
    assert all(not block.attn._forward_pre_hooks for block in model.blocks)


def test_the_picture_of_cls_attention(tmp_path):
    from PIL import Image

    rows = {name: micro(3, name) for name in NAMES[:2]}
    path = figures.draw_cls_attention(rows, torch.randn(3, 3, SIZE, SIZE), tmp_path / "cls.png", titles=["a", "b", "c"])
    width, height = Image.open(path).size
    assert width > 300 and height > 300
