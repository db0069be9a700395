"""The gradients of one step: this process's rows forward and backward, a micro-batch at a time; and a trial of it."""

import torch

from nanochat_gka.data.loader import Stream, micro_batches, to_device
from trainkit_gka.distributed import Runtime


def accumulate_gradients(
    model, stream: Stream, step: int, rows: int, batch_size: int, runtime: Runtime
) -> torch.Tensor:
    """Run this rank's rows of `step` forward and backward. Returns its part of the step's mean loss, on the device."""
    tokens = rows * stream.rows.sequence_len
    share = runtime.share(rows)
    total = torch.zeros((), device=runtime.device)
    for numbers in micro_batches(range(step * rows + share.start, step * rows + share.stop), batch_size):
        ids, targets = to_device(stream.batch(numbers), runtime.device)
        loss = model(ids, targets, reduction="sum") / tokens
        loss.backward()
        total += loss.detach()
    return total


def dry_step(model, rows: int, batch_size: int, sequence_len: int, device: torch.device) -> None:
    """Forward and backward of a step's largest micro-batch, on no text: what a step of `rows` holds in memory.

    Twice if a step has several micro-batches: from the second on the gradients are in memory before its activations.
    """
    pieces = list(map(len, micro_batches(range(rows), batch_size)))
    ids = torch.zeros(max(pieces), sequence_len, dtype=torch.int64, device=device)
    targets = torch.zeros_like(ids)  # one tensor for both would be compiled apart from training's two
    for _ in pieces[:2]:
        model(ids, targets, reduction="sum").backward()
