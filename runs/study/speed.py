"""Time the training steps of the study's main families in turns, for comparisons at equal time.

python -m runs.study.speed                on a quiet machine: every depth, one thread, as the study trains
"""

import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch

from gka.impl import products
from runs.bench.gpt_models import TRAINING, Candidate, Subject
from runs.bench.measurement import Plan
from runs.bench.timing import interleave
from runs.frames import RESULTS, frame
from runs.study.families import ALL, fits_depth, shape_of
from runs.study.grid import BATCH_AT_DEPTH, CONTENDERS, HALF, REPEATED
from runs.study.trials import ASPECT_RATIO, COMPILED_FROM, HEAD_DIM, SHAPING, Trial
from trainkit_gka.cli import Bounds, run
from trainkit_gka.distributed import Runtime, setup
from trainkit_gka.progress import console, progress_bar
from trainkit_gka.results import append_result

KIND = "study-speed"
SPEEDS = RESULTS / "study_speed.jsonl"
TIMED = (*REPEATED, HALF, *CONTENDERS)
Speeds = dict[int, dict[str, float]]  # depth -> family -> tokens/s


@dataclass
class SpeedConfig:
    """Time training steps of softmax and GKA in the study's forms, in turns. Appends a line a form to --results."""

    depths: list[int] = field(default_factory=lambda: list(BATCH_AT_DEPTH))
    """Numbers of layers."""
    threads: Annotated[int, Bounds(1)] = 1
    """Threads of the process."""
    rounds: Annotated[int, Bounds(1)] = 10
    """How often each form is timed."""
    sequence_len: Annotated[int, Bounds(2)] = 512
    """Tokens of a row."""
    vocab_size: Annotated[int, Bounds(2)] = 4096
    """Tokens in the vocabulary."""
    results: Path = SPEEDS
    """File to append to."""


def main(config: SpeedConfig) -> None:
    torch.set_num_threads(config.threads)
    runtime = setup("cpu")
    with progress_bar() as bar:
        task = bar.add_task("depths", total=len(config.depths), status="")
        for depth in config.depths:
            bar.update(task, status=f"{depth} layers")
            time_depth(depth, config, runtime)
            bar.advance(task)


@products.where_fast()  # softmax attention at its fastest
def time_depth(depth: int, config: SpeedConfig, runtime: Runtime) -> None:
    """One comparison: a step of every family that the depth has room for."""
    rows = max(1, BATCH_AT_DEPTH.get(depth, max(BATCH_AT_DEPTH.values())) // config.sequence_len)
    mode = "default" if depth >= COMPILED_FROM else "off"
    candidates = {}
    for name in (name for name in TIMED if fits_depth(ALL[name], depth)):
        flags = SHAPING(depth=depth, **shape_of(name), aspect_ratio=ASPECT_RATIO, head_dim=HEAD_DIM, window_pattern="L")
        shape = flags.shape(depth, config.sequence_len, config.vocab_size)
        candidates[name] = Candidate(Subject(name, shape, rows, runtime), Trial.dtype, mode)
    timed = interleave({name: one.train for name, one in candidates.items()}, runtime.device, Plan(config.rounds, 1))
    group = uuid.uuid4().hex[:12]
    for name, measurement in timed.items():
        said = {"family": name, "depth": depth, "rows": rows, "group": group, "dtype": Trial.dtype, "compile": mode}
        said |= {"phase": TRAINING, "sequence_len": config.sequence_len, "vocab_size": config.vocab_size}
        milliseconds = measurement.median_ms
        speed = rows * config.sequence_len / milliseconds * 1e3 if milliseconds else None
        metrics = {**asdict(measurement), "tokens_per_second": speed}
        append_result(config.results, KIND, said, metrics, runtime.device)
        console.print(f"{depth} layers, {name}: {speed:,.0f} tokens/s" if speed else f"{name}: {measurement.reason}")


def newest(path: Path = SPEEDS) -> pd.DataFrame:
    """The newest comparison of each depth on the machine that was timed last; what could not be timed is left out."""
    timed = frame(path, "family", "depth", "group", kind=KIND)
    if timed.empty:
        return timed
    timed = timed[timed.tokens_per_second.notna()]
    timed = timed[timed.hardware == timed.hardware.iloc[-1]]
    return timed[timed.group == timed.groupby("depth").group.transform("last")]


def speeds_of(folder: Path) -> Speeds:
    """Of the newest comparisons beside a folder of the study's rows."""
    timed = newest(folder.with_name(SPEEDS.name))
    return {} if timed.empty else {d: dict(zip(t.family, t.tokens_per_second)) for d, t in timed.groupby("depth")}


if __name__ == "__main__":
    run(main, SpeedConfig)
