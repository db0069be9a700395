"""Rows of a study that nobody trained, for tests of what is said of them."""

import json
from dataclasses import asdict
from pathlib import Path

from runs.study.speed import KIND

DATA = {"tokenizer_sha256": "of a test", "sequence_len": 512}


def row(trial, loss, **metrics):
    flops = trial.flops(512, 4096)
    counts = {
        "parameters": 1000,
        "flops_per_token": flops // trial.tokens,
        "train_flops": flops,
        "train_tokens": trial.tokens,
        "sigma": {},
    }
    about = {"kind": "study", "date": "2026-11-22 12:00", "commit": "abc1234", "hardware": "a CPU", "torch": "2.14"}
    about |= {"key": trial.key(DATA), "trial": asdict(trial), "data": DATA}
    return {**about, "metrics": {**counts, "val_bpb": loss, **metrics}}


def write(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def timed(path: Path, speeds: dict[str, float | None], depth: int, group: str = "one", hardware: str = "a CPU") -> None:
    """Append the speeds of families, in tokens/s, as timed in turns."""
    about = {"kind": KIND, "date": "2026-11-25", "commit": "abc", "hardware": hardware, "torch": "2.14"}
    with open(path, "a") as file:
        for family, tokens in speeds.items():
            config = {"family": family, "depth": depth, "group": group}
            file.write(json.dumps({**about, "config": config, "metrics": {"tokens_per_second": tokens}}) + "\n")
