"""Two small trained runs to report, the vision run on digits and the language run with head offsets and windows."""

from pathlib import Path

import digit_runs
import gpt_runs
import tiny
import tiny_vision

RUNS = ("digits-gka", "words-gka")
TEXT = "the kernel token mixes every head and nothing else so that past values come back with weights"


def trained_base(packed: Path, base: Path) -> Path:
    """A folder of outputs, BASE, as the trainers' own commands leave it."""
    vision, language = RUNS
    places = ["--out", base / "runs", "--results", base / "results.jsonl"]
    shape = ["--model", digit_runs.GKA, "--input-size", 32, "--epochs", 1]
    easy = [*digit_runs.EASY, "--batch-size", 64, "--group-size", 64, "--eval-every", 1]
    tiny_vision.call("deit_gka.train", *places, *easy, *shape, "--model-tag", vision, folder=base / "output")
    rows = ["--data", packed / "packed", *tiny.TRAIN_FLAGS, "--num-iterations", 4, "--eval-every", 2, "--save-every", 4]
    form = ["--attention", "gka", "--head-offsets", "PS", "--log-every", 1, "--model-tag", language]
    tiny.call(gpt_runs.MODULE, *places, *rows, *form)
    return base
