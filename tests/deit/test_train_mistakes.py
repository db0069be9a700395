"""Mistakes in vision training are one line."""

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
from deit_gka import train as training
from deit_gka.training.config import TrainConfig
from processes import signals_kept
from vision_runs import (
    flags,
    in_process,
    train,
)


def test_a_loss_that_is_not_finite_ends_the_run(pictures, tmp_path):
    done = train(pictures, tmp_path, "--lr", 1e30, "--save-every", 1, check=False)
    tiny.assert_one_line_error(
        done,
        r"the loss is (nan|inf) and the gradient's norm .* at update \d+ \(learning rate .*, sigma between .*\); "
        r"the weights were not touched. Last checkpoint: .*/step_\d+\. Start a new --model-tag with a lower --lr",
    )
    named = re.search(r"Last checkpoint: (\S+)\.", done.stderr)[1]
    assert all(value.isfinite().all() for value in load_file(Path(named) / "model.safetensors").values())
    assert (tmp_path / "run/checkpoints").exists() and not (tmp_path / "results.jsonl").read_text()


def test_weights_that_are_not_finite_are_not_saved(pictures, tmp_path, monkeypatch, capsys):
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


def test_a_gradient_never_finite_ends_a_float16_run(pictures, tmp_path, monkeypatch, capsys):
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


MISTAKES = {
    "--lr 0.1": r"--lr is 0.1 but the run in .* has 0.2; use its value, or another --model-tag",
    "--epochs 6": r"--epochs is 6 but .* has 5",
    "--model-kwargs patch_size=8": r"--model-kwargs is .*patch_size=8.* but",
    "--seed 1": r"--seed is 1 but",
    "--repeated-aug 1": r"--repeated-aug is 1 but",
    "--batch-size 24": r"--batch-size is 24 but",
    "--model deit_tiny_vlt_patch16_224": r"--model is deit_tiny_vlt_patch16_224 but",
    "--model-tag new --model deit_tiny_gke_patch16_224": (
        r"no model 'deit_tiny_gke_patch16_224'; did you mean .*deit_tiny_gka_patch16_224"
    ),
    "--model-tag new --aa nonsense": r"--aa 'nonsense' is not an augmentation of timm's",
    "--model-tag new --model-kwargs depth": r"--model-kwargs takes name=value, got 'depth'",
    "--model-tag new --model-kwargs img_size=64": r"--model-kwargs cannot set img_size in training: it is --input-size",
    "--model-tag new --model-kwargs name=x": r"--model-kwargs cannot set name: it is --model",
    "--model-tag new --model-kwargs deepness=3": r"timm cannot build deit_tiny_gka_patch16_224: .*deepness",
    "--model-tag new --model-kwargs num_heads=5": r"timm cannot build .*5",
    "--model-tag new --data /nowhere": r"/nowhere does not exist; data is a folder with",
    "--model-tag new --batch-size 80": r"has 78 training images, fewer than one batch; lower --batch-size \(now 80\)",
    "--model-tag new --batch-size 7": r"--batch-size must be even",
    "--model-tag new --model-kwargs depth=0": r"--model-kwargs depth must be between 1 and 1000, got 0",
    "--model-tag new --model-kwargs sigma_squared=Infinity": r"--model-kwargs sigma_squared must be above 0",
    "--model-tag new --model-kwargs drop_path_rate=1": r"--model-kwargs drop_path_rate must be at least 0 and below 1",
    "--device-batch-size 1": r"--device-batch-size must be at least 2",
    "--num-workers -3": r"--num-workers must be between 0 and 1024, or -1 for automatic, got -3",
    "--save-every 0": r"--save-every must be at least 1, or -1 for off",
    "--model-tag a/b": r"--model-tag must be a plain folder name",
    "--model-tag new --crop-pct 0": r"--crop-pct must be above 0",
}


@pytest.mark.parametrize("more", MISTAKES)
def test_mistakes_are_one_line(uninterrupted, pictures, more, capsys):
    argv = flags(pictures, uninterrupted, *more.split())
    assert re.search(MISTAKES[more], in_process(training.main, TrainConfig, *argv, capsys=capsys))


def test_compiling_without_a_compiler_is_one_line(no_compiler, pictures, tmp_path, capsys):
    argv = flags(pictures, tmp_path, "--compile", "max-autotune")
    assert "--compile max-autotune: torch.compile fails" in in_process(training.main, TrainConfig, *argv, capsys=capsys)
