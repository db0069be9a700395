"""Vision runs of a few updates: their flags, what they leave, and a process to interrupt; models of theirs."""

import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

import tiny_vision
from deit_gka import evaluate
from deit_gka.model.checkpoints import build
from deit_gka.recipe import Recipe
from tiny import events, steps_of
from tiny_vision import MICRO, SHAPE, SIZE
from trainkit_gka.checkpoint import save
from trainkit_gka.cli import run

GKA, VLT, SOFTMAX = "deit_tiny_gka_patch16_224", "deit_tiny_vlt_patch16_224", "deit_tiny_patch16_224"
TRAIN, EVALUATE, EXPORT = "deit_gka.train", "deit_gka.evaluate", "deit_gka.export"
EPOCHS, STEPS_PER_EPOCH = 5, 6
STEPS = EPOCHS * STEPS_PER_EPOCH
FULL = [
    *("--epochs", EPOCHS, "--warmup-epochs", 1, "--batch-size", 12, "--group-size", 6, "--device-batch-size", 8),
    *("--lr", 0.2, "--drop-path", 0.3, "--num-workers", 2, "--save-every", 4, "--log-every", 1),
]


def flags(data, out, *more):
    places = ["--data", data, "--out", out, "--results", out / "results.jsonl", "--model-tag", "run"]
    return [*places, *MICRO, *FULL, *more]


def train(data, out, *more, **options):
    return tiny_vision.call(TRAIN, *flags(data, out, *more), folder=out / "output", **options)


def checkpoint(out, step, name):
    return load_file(out / "run" / "checkpoints" / f"step_{step:08d}" / f"{name}.safetensors")


def save_run(folder, model, classes, name=GKA, trained_on="digits", **recipe):
    """A run's folder with one checkpoint, of a model of SHAPE, and no training behind it."""
    about = {"name": name, "num_classes": len(classes), "input_size": SIZE, "kwargs": SHAPE}
    colours = {"mean": Recipe().mean, "std": Recipe().std}
    state = {"classes": classes, "model": about, "epoch": 1, "trained_on": trained_on, "parts": {}}
    state["train_config"] = {"crop_pct": 1.0, "input_size": SIZE, "model": name, **colours, **recipe}
    save(folder / "checkpoints", 1, {"model": dict(model.state_dict())}, state)
    return folder


def wait_for_step(process, out, step):
    while process.alive() and (steps_of(out) or [0])[-1] < step:
        time.sleep(0.002)
    assert process.alive(), process.err.read_text()


def evaluated(out, *flags):
    """The result that an evaluation in this process appends to a file in `out`."""
    argv = [*flags, "--device-type", "cpu", "--num-workers", 0, "--results", out / "eval.jsonl"]
    run(evaluate.main, evaluate.EvaluateConfig, [str(flag) for flag in argv])
    return json.loads((out / "eval.jsonl").read_text().splitlines()[-1])


class Code:
    """In a pickle: a program, which leaves the file MARKER where it is run."""

    MARKER = Path(tempfile.gettempdir()) / "gka-was-here"

    def __reduce__(self):
        return exec, (f"import pathlib; pathlib.Path({str(self.MARKER)!r}).touch()",)


# Runs on scikit-learn's digits that learn in seconds: small models without the recipe's augmentation

KNOWS_DIGITS = ["--model", SOFTMAX, "--epochs", 5, "--lr", 0.2]
EASY = [
    "--model-kwargs", "patch_size=16", "embed_dim=64", "depth=1", "num_heads=2",
    "--data", "digits", "--device-type", "cpu", "--batch-size", 16, "--group-size", 16, "--repeated-aug", 1,
    "--scale", 0.8, 1, "--hflip", 0, "--aa", "", "--reprob", 0, "--mixup", 0, "--cutmix", 0, "--drop-path", 0,
    "--warmup-epochs", 0, "--eval-every", "-1", "--save-every", "-1", "--log-every", 20, "--num-workers", 0,
]  # fmt: skip


def digit_flags(out, *more):
    return ["--out", out, "--results", out / "results.jsonl", "--model-tag", "run", "--input-size", 32, *EASY, *more]


def train_digits(out, *more, **options):
    return tiny_vision.call(TRAIN, *digit_flags(out, *more), folder=out / "output", **options)


def accuracy(out, tag="run"):
    return events(out, "eval", tag)[-1]["top1"]


def newest(out, name="model", tag="run"):
    """The tensors of a run's newest checkpoint."""
    return load_file(sorted((out / tag / "checkpoints").iterdir())[-1] / f"{name}.safetensors")


def micro(name=GKA, classes=10, size=32, **settings):
    """An untrained model, the same for the same arguments."""
    torch.manual_seed(len(name) + classes + size)
    return build(name, classes, size, **{**dict(patch_size=8, embed_dim=64, depth=2, num_heads=2), **settings})
