"""Language runs of some steps: their flags, and what they leave."""

import json

import tiny

MODULE = "nanochat_gka.train"


STEPS = 60


def flags(packed, out, *more):
    places = ["--data", packed / "packed", "--out", out, "--results", out / "results.jsonl", "--model-tag", "run"]
    settings = ["--attention", "GA", "--num-iterations", STEPS, "--save-every", 4, "--log-every", 1]
    return [*places, *tiny.TRAIN_FLAGS, *settings, *more]


def final(out, step=STEPS):
    folder = out / "run" / "checkpoints" / f"step_{step:08d}"
    return [(folder / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


def log_steps(out):
    path = out / "run" / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record["step"] for line in lines if line.endswith("}") and (record := json.loads(line))["event"] == "train"]
