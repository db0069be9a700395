"""Runs on scikit-learn's digits that learn in seconds: small models without the recipe's augmentation."""

import torch
from safetensors.torch import load_file

import tiny_vision
from deit_gka.model.checkpoints import build
from trainkit_gka.progress import read_events

GKA, VLT, SOFTMAX = "deit_tiny_gka_patch16_224", "deit_tiny_vlt_patch16_224", "deit_tiny_patch16_224"
KNOWS_DIGITS = ["--model", SOFTMAX, "--epochs", 5, "--lr", 0.2]
EASY = [
    "--model-kwargs", "patch_size=16", "embed_dim=64", "depth=1", "num_heads=2",
    "--data", "digits", "--device-type", "cpu", "--batch-size", 16, "--group-size", 16, "--repeated-aug", 1,
    "--scale", 0.8, 1, "--hflip", 0, "--aa", "", "--reprob", 0, "--mixup", 0, "--cutmix", 0, "--drop-path", 0,
    "--warmup-epochs", 0, "--eval-every", "-1", "--save-every", "-1", "--log-every", 20, "--num-workers", 0,
]  # fmt: skip


def flags(out, *more):
    return ["--out", out, "--results", out / "results.jsonl", "--model-tag", "run", "--input-size", 32, *EASY, *more]


def train(out, *more, **options):
    return tiny_vision.call("deit_gka.train", *flags(out, *more), folder=out / "output", **options)


def accuracy(out, tag="run"):
    return read_events(out / tag / "log.jsonl", "eval")[-1]["top1"]


def newest(out, name="model", tag="run"):
    """The tensors of a run's newest checkpoint."""
    return load_file(sorted((out / tag / "checkpoints").iterdir())[-1] / f"{name}.safetensors")


def micro(name=GKA, classes=10, size=32, **settings):
    """An untrained model, the same for the same arguments."""
    torch.manual_seed(len(name) + classes + size)
    return build(name, classes, size, **{**dict(patch_size=8, embed_dim=64, depth=2, num_heads=2), **settings})
