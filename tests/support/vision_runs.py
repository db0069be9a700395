"""Vision runs of a few updates: their flags, what they leave, and a process to interrupt."""

import json
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

import tiny_vision
from deit_gka import evaluate
from deit_gka.model.checkpoints import build
from tiny_vision import MICRO, SHAPE, SIZE
from trainkit_gka.cli import run
from trainkit_gka.progress import read_events

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


def micro(classes, name="deit_tiny_gka_patch16_224"):
    return build(name, classes, SIZE, **SHAPE)


def train(data, out, *more, **options):
    return tiny_vision.call(TRAIN, *flags(data, out, *more), folder=out / "output", **options)


def records(out, event):
    return read_events(out / "run" / "log.jsonl", event)


def steps_of(out):
    return [record["step"] for record in records(out, "train")]


def checkpoint(out, step, name):
    return load_file(out / "run" / "checkpoints" / f"step_{step:08d}" / f"{name}.safetensors")


def final(out, step=STEPS, names=("model", "ema", "optimizer")):
    return [(out / "run" / "checkpoints" / f"step_{step:08d}" / f"{name}.safetensors").read_bytes() for name in names]


def metrics(out):
    """The numbers of the finished run."""
    return json.loads((out / "results.jsonl").read_text())["metrics"]


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
