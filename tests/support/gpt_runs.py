"""Language runs of some steps: their flags, and their files."""

import json

import torch

import tiny
from nanochat_gka.train import TrainConfig, main
from processes import signals_kept
from trainkit_gka.progress import read_events

MODULE = "nanochat_gka.train"
STEPS = 60


def flags(packed, out, *more):
    places = ["--data", packed / "packed", "--out", out, "--results", out / "results.jsonl", "--model-tag", "run"]
    settings = ["--attention", "GA", "--num-iterations", STEPS, "--save-every", 4, "--log-every", 1]
    return [*places, *tiny.TRAIN_FLAGS, *settings, *more]


def train(packed, out, *more) -> int:
    """The command in this process, by one thread as `tiny.call` runs it; its exit code."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with signals_kept():
            return tiny.exit_code(main, TrainConfig, *flags(packed, out, *more))
    finally:
        torch.set_num_threads(threads)


def refused(packed, out, *more) -> str:
    """The line with which the command, in this process, refuses to train."""
    with signals_kept():
        return tiny.refused(main, TrainConfig, *flags(packed, out, *more))


def final(out, step=STEPS):
    folder = out / "run" / "checkpoints" / f"step_{step:08d}"
    return [(folder / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


def events(out, event):
    """The lines of the run's log that are of `event`."""
    return read_events(out / "run/log.jsonl", event)


def metrics(out):
    """The numbers of the finished run."""
    return json.loads((out / "results.jsonl").read_text())["metrics"]


def log_steps(out):
    """The training steps that the log has so far, while another process writes it."""
    return [record["step"] for record in events(out, "train")]
