"""Bits per byte: the loss in a unit that does not depend on the tokenizer."""

import math
from typing import Any

import torch

from nanochat_gka.data import SPLITS
from nanochat_gka.data.loader import Batch, PackedData, Rows, micro_batches, to_device
from nanochat_gka.model.gpt import GPT
from trainkit_gka.distributed import Runtime, Stop

UTF8 = "_utf8"  # after the name of a figure that counts the text's own bytes
DIFFERENCE = 1e-3  # of the two counts of bytes, relative, from which on both figures are shown


@torch.no_grad()
def nats_and_bytes(model: GPT, batch: Batch, token_bytes: torch.Tensor) -> torch.Tensor:
    """[sum of cross-entropies in nats, number of bytes predicted] of one batch, (2, ...) float64.

    token_bytes: (..., vocab_size). Special tokens (0 bytes) and ignored targets (< 0) count in neither.
    """
    ids, targets = batch
    losses = model(ids, targets, reduction="none").double()
    lengths = token_bytes[..., targets.flatten().clamp(min=0)] * (targets.flatten() >= 0)
    return torch.stack([(losses * (lengths > 0)).sum(-1), lengths.sum(-1).double()])


def bits_per_byte(
    model: GPT, rows: Rows, token_bytes: torch.Tensor, runtime: Runtime, batch_size: int, stop: Stop | None = None
):
    """Bits per byte of `rows` (see `PackedData.eval_rows`), dealt to the ranks; exact on any number of them.

    token_bytes: (vocab_size,), which gives a float, or several counts of bytes (N, vocab_size), which give a list.
    batch_size: rows at once. The result is the same on every rank, and infinity if the rows hold no bytes. stop: ends
    it with Interrupted.
    """
    token_bytes = token_bytes.to(runtime.device)
    total = torch.zeros(2, *token_bytes.shape[:-1], dtype=torch.float64, device=runtime.device)
    parts = (
        nats_and_bytes(model, to_device(rows.batch(numbers), runtime.device), token_bytes)
        for numbers in micro_batches(runtime.share(len(rows)), batch_size)
    )
    for part in runtime.rounds(parts, stop):
        total += part
    nats, size = runtime.sum(total)
    return torch.where(size > 0, nats / (math.log(2) * size), math.inf).tolist()


def of_both_splits(
    model: GPT, data: PackedData, tokens: int, choice: str, runtime: Runtime, batch_size: int, stop: Stop | None = None
) -> dict[str, float]:
    """Bits per byte of both splits: `train_bpb` and `val_bpb` by nanochat's count of bytes, `..._utf8` by the text's.

    tokens, choice: the rows of `PackedData.eval_rows`. The others as in `bits_per_byte`.
    """
    counts, values = torch.stack([data.tokenizer.token_bytes(), data.tokenizer.utf8_bytes()]), {}
    for split in SPLITS:
        both = bits_per_byte(model, data.eval_rows(split, tokens, choice), counts, runtime, batch_size, stop)
        values[f"{split}_bpb"], values[f"{split}_bpb{UTF8}"] = both
    return values


def rows_note(values: dict[str, Any]) -> str:
    """Which rows the figures of `values` are of (`PackedData.name_rows`); empty if that was not recorded."""
    return f"{values['eval_rows']} rows" if values.get("eval_rows") else ""


def utf8_note(values: dict[str, Any], name: str) -> str:
    """A note after the figure `name` of `values`: the figure by the text's own bytes, if that differs."""
    true = values.get(name + UTF8) or values[name]  # the first records have none
    return "" if math.isclose(values[name], true, rel_tol=DIFFERENCE) else f" ({true:.6f} of the text's own bytes)"


def remark(values: dict[str, Any]) -> str:
    """The rows of the figures in a run's record, and the figures by the text's own bytes."""
    notes = {name: utf8_note(values, name) for name in (f"{split}_bpb" for split in SPLITS) if values.get(name)}
    figures = [f"{name.replace('_', ' ')} {values[name]:.6f}{note}" for name, note in notes.items() if note]
    return ", ".join(filter(None, [rows_note(values), *figures]))


def remarks(runs: dict[str, dict[str, Any]]) -> list[str]:
    """The sentences below a table of runs, label -> record: one for all runs with the same `remark`."""
    labels: dict[str, list[str]] = {}
    for label, values in runs.items():
        labels.setdefault(remark(values), []).append(label)
    return [f"{', '.join(same)}: {text}." for text, same in labels.items() if text]
