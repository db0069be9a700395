"""Measure what a trained language model does in its context: induction, copying, its heads, loss by position.

python -m runs.study.heads --run out/study/text/0123456789abcdef
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from nanochat_gka.data.loader import PackedData, rows_of_run
from nanochat_gka.model.checkpoints import load, run_folder
from runs.study import probes
from runs.study.scores import HEADS
from runs.table import Table
from trainkit_gka.cli import Bounds, Count, UserError, run
from trainkit_gka.distributed import running
from trainkit_gka.progress import console
from trainkit_gka.results import append_result

KIND = "study-heads"
BATCH = 8  # rows at once


@dataclass
class HeadsConfig:
    """Measure induction on random sequences that repeat, copying of made-up names in natural text, what every head
    does, and the loss by position; append a line to the results, and print a table of the heads.
    """

    run: Path
    """Run folder, one checkpoint folder in it, or an exported model."""
    step: int = -1
    """Checkpoint to take; -1 = the newest."""
    data: Path | None = None
    """Packed rows; None = those the run was trained on. Rows of the validation split are read."""
    sequences: Count = 64
    """Random sequences, and rows in which names are copied."""
    rows: Count = 128
    """Rows for the loss by position."""
    texts: Count = 4
    """Rows whose weights are computed."""
    seed: Annotated[int, Bounds(0)] = 0
    """Seed of the random tokens."""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to compute on; auto takes CUDA if there is one."""
    results: Path = HEADS
    """File to append the numbers to."""


def measure(config: HeadsConfig, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """What identifies the run, and what was measured of it."""
    loaded = load(config.run, config.step, device)
    model, tokenizer = loaded.model, loaded.tokenizer
    data = PackedData(config.data or rows_of_run(loaded.data, run_folder(config.run)), verify=False)
    if data.tokenizer.sha256 != tokenizer.sha256:
        raise UserError(f"{data.folder} was packed with another tokenizer than {config.run} was trained with")
    if data.sequence_len < 16:
        raise UserError(f"{data.folder} has rows of {data.sequence_len} tokens; names are copied in rows of 16 or more")
    split = data.split("val")
    natural, _ = split.batch(range(min(config.sequences, len(split))))
    generator = torch.Generator().manual_seed(config.seed)
    length = (data.sequence_len - 1) // 2
    repeated, copied = [], []
    for start in range(0, config.sequences, BATCH):
        count = min(BATCH, config.sequences - start)
        repeated.append((count, probes.induction(model, count, length, tokenizer.bos_id, generator)))
    for ids in natural.split(BATCH):
        copied.append((len(ids), probes.copying(model, ids.to(device), generator)))
    metrics = {
        "induction": _mean(repeated),
        "copying": _mean(copied),
        "loss_by_position": probes.loss_by_position(model, split.some(range(min(config.rows, len(split)))), BATCH),
        "heads": probes.heads(model, natural[: config.texts]),
    }
    about = {"name": loaded.name, "step": loaded.step, "sha256": loaded.sha256, "seed": config.seed}
    shape = {"attention": model.config.attention, "depth": model.config.n_layer}
    return {**about, **shape, "sequences": config.sequences, "rows": config.rows, "texts": config.texts}, metrics


def _mean(parts: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Of numbers, each weighted by its count."""
    total = sum(count for count, _ in parts)
    return {name: sum(count * numbers[name] for count, numbers in parts) / total for name in parts[0][1]}


def main(config: HeadsConfig) -> None:
    with running(config.device_type, config.seed) as runtime:
        about, metrics = measure(config, runtime.device)
        append_result(config.results, KIND, about, metrics, runtime.device)
    say = console.print
    for name in ("induction", "copying"):
        say(f"{name}: right {metrics[name]['accuracy']:.1%}, {metrics[name]['gain']:.3f} nats below the first time")
    losses = ", ".join(f"{places}: {loss:.3f}" for places, loss in metrics["loss_by_position"].items())
    say(f"nats a token by place in the row: {losses}", highlight=False)
    heads = metrics["heads"]
    if heads:
        Table.of(heads[0], ([_cell(value) for value in head.values()] for head in heads)).show()


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run(main, HeadsConfig)
