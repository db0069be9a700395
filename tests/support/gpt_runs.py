"""Language runs of some steps."""

import torch

import tiny
from nanochat_gka.train import TrainConfig, main
from processes import signals_kept

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
