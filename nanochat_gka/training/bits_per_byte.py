"""Bits per byte: the loss in a unit that does not depend on the tokenizer."""

import math

import torch

from nanochat_gka.data.loader import Batch, Rows, micro_batches, to_device
from nanochat_gka.model.gpt import GPT
from trainkit.distributed import Runtime, Stop


@torch.no_grad()
def nats_and_bytes(model: GPT, batch: Batch, token_bytes: torch.Tensor) -> torch.Tensor:
    """[sum of cross-entropies in nats, number of UTF-8 bytes predicted] of one batch, (2,) float64.

    Special tokens (0 bytes) and ignored targets (< 0) count in neither.
    """
    ids, targets = batch
    losses = model(ids, targets, reduction="none")
    lengths = token_bytes[targets.flatten().clamp(min=0)] * (targets.flatten() >= 0)
    return torch.stack([(losses.double() * (lengths > 0)).sum(), lengths.sum().double()])


def bits_per_byte(
    model: GPT, rows: Rows, token_bytes: torch.Tensor, runtime: Runtime, batch_size: int, stop: Stop | None = None
) -> float:
    """Bits per byte of `rows` (see `PackedData.eval_rows`), dealt to the ranks; exact on any number of them.

    batch_size: rows at once. The result is the same on every rank, and infinity if the rows hold no bytes. stop: ends
    it with Interrupted.
    """
    token_bytes = token_bytes.to(runtime.device)
    total = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    parts = (
        nats_and_bytes(model, to_device(rows.batch(numbers), runtime.device), token_bytes)
        for numbers in micro_batches(runtime.share(len(rows)), batch_size)
    )
    for part in runtime.rounds(parts, stop):
        total += part
    nats, size = runtime.sum(total).tolist()
    return nats / (math.log(2) * size) if size else math.inf
