"""How many rows of T tokens fit a device at once: arithmetic from the model's shape, checked by a dry step on CUDA.

Legend: C width, L layers, V vocabulary, T tokens, H heads, D head_dim, P parameters; s bytes of an activation, e of an
embedding entry (2 and 2 on CUDA, where both are bfloat16; 4 and 4 on a CPU).

Held all the time: weights and gradients, 2 e for an embedding entry and 8 for any other parameter; AdamW's two moments
in the parameter's dtype and Muon's momentum, 4 bytes a matrix entry, both divided by the ranks; on CUDA a bfloat16 copy
of every float32 matrix, which backward keeps. The optimiser's step works beside that, when activations are freed: Muon
stacks all gradients and all matrices (8 bytes an entry), and its update of one shape needs about 16 bytes an entry of
that shape's matrices on this rank.

Held per token from forward to backward, counted in uncompiled operations (compiled ones recompute some, and need less):
  every layer: the input of the residual scale, of both norms, and the norms' outputs (5 C); the MLP after relu and
    squared (8 C).
  attention: its `activation_widths`.
  a value embedding: 2 C. The final norm: 2 C.
  the loss: float32 logits after tanh and after log_softmax, and in backward two gradients as large: 16 V bytes.
"""

import os
from collections.abc import Callable
from typing import Annotated, Literal

import torch

from nanochat_gka.data.loader import micro_batches
from nanochat_gka.model.accounting import parameter_counts
from nanochat_gka.model.gpt import GPT
from nanochat_gka.training.optim import OptimConfig, parameter_groups
from trainkit_gka.cli import Bounds, UserError
from trainkit_gka.distributed import Runtime
from trainkit_gka.workers import main_memory

RowsAtOnce = Annotated[int | Literal["auto"], Bounds(1)]
LAYER_WIDTHS, VALUE_EMBEDDING_WIDTHS, FINAL_WIDTHS = 13, 2, 2
LOGIT_BYTES = 16
USABLE = {"cuda": 0.9, "cpu": 0.5}  # part of the memory; the driver, the allocator and other programs have the rest
MOST_TOKENS = {"cuda": 2**16, "cpu": 2**12}  # of a micro-batch: more is not faster


def parameters(model: GPT) -> tuple[int, int, int]:
    """(entries of embedding tables, of the blocks' matrices, of the head and scalars) of a model, which may be meta."""
    counts = parameter_counts(model)
    tables = counts["wte"] + counts["value_embeds"]
    groups = parameter_groups(model, OptimConfig())
    matrices = sum(p.numel() for group in groups if group.kind == "muon" for p in group.parameters)
    return tables, matrices, counts["total"] - tables - matrices


def fixed_bytes(model: GPT, device_type: str, ranks: int = 1) -> tuple[int, int]:
    """Bytes of weights, gradients and optimiser state; and of the work of the optimiser's step, without activations."""
    tables, matrices, rest = parameters(model)
    entry = 2 if device_type == "cuda" else 4
    held = (2 + 2 / ranks) * entry * tables + (8 + 8 / ranks) * rest + (8 + 4 / ranks) * matrices
    held += 2 * (matrices + rest) if device_type == "cuda" else 0
    largest = 4 * model.config.n_embd**2 * model.config.n_layer
    return int(held), int(8 * matrices + 16 * largest / ranks)


def row_bytes(model: GPT, device_type: str, training: bool = True) -> int:
    """Bytes of one row's activations: from forward to backward, or (not training) of the largest layer."""
    config, size = model.config, 2 if device_type == "cuda" else 4
    embeddings = (VALUE_EMBEDDING_WIDTHS * (layer.ve_gate is not None) for layer in model.attentions)
    widths = [LAYER_WIDTHS + layer.activation_widths + more for layer, more in zip(model.attentions, embeddings)]
    held = FINAL_WIDTHS + (sum(widths) if training else max(widths))
    return config.sequence_len * (held * config.n_embd * size + LOGIT_BYTES * config.padded_vocab_size)


def device_bytes(device: torch.device) -> int:
    """The memory that this process may use: all of a GPU's, or its part of the machine's or the container's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return main_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rows_at_once(model: GPT, device: torch.device, ranks: int = 1, training: bool = True) -> int:
    """Rows of a micro-batch that fit the device by arithmetic: at least 1, at most MOST_TOKENS."""
    kind = device.type
    held = fixed_bytes(model, kind, ranks)[0] if training else 4 * sum(parameters(model))
    fitting = int((USABLE[kind] * device_bytes(device) - held) // row_bytes(model, kind, training))
    return max(1, min(fitting, MOST_TOKENS[kind] // model.config.sequence_len))


def check_fits(model: GPT, device: torch.device, ranks: int) -> None:
    """Raises UserError, before anything is allocated, if weights and optimiser alone exceed the device's memory."""
    memory, held = device_bytes(device), fixed_bytes(model, device.type, ranks)[0]
    if held > memory:
        config, numbers = model.config, sum(parameters(model))
        raise UserError(
            f"--depth {config.n_layer} is a model of {numbers:.3g} parameters (width {config.n_embd:,}); weights, "
            f"gradients and optimiser state take {held / 1e9:,.1f} GB of memory and there are {memory / 1e9:,.1f} GB "
            "for a process; lower --depth or --aspect-ratio"
        )


def largest_that_runs(rows: int, attempt: Callable[[int], None], runtime: Runtime) -> int:
    """`rows`, halved until `attempt(rows)` runs out of memory on no rank. Raises UserError if one row is too many."""
    while True:
        failed = False
        try:
            attempt(rows)
        except torch.OutOfMemoryError:
            failed = True
        if not runtime.any(failed):
            return rows
        if rows == 1:
            raise UserError(
                "not even one row fits the GPU's memory; lower --depth, or pack with a lower --sequence-len"
            )
        if runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        rows = -(-rows // 2)


def dry_step(model, rows: int, batch_size: int, sequence_len: int, device: torch.device) -> None:
    """Forward and backward of a step's largest micro-batch, on no text: the memory of a step of `rows`.

    Twice if a step has several micro-batches: from the second on the gradients are in memory before its activations.
    """
    pieces = list(map(len, micro_batches(range(rows), batch_size)))
    ids = torch.zeros(max(pieces), sequence_len, dtype=torch.int64, device=device)
    # torch.compile specialises on aliasing: with one tensor for both this would warm up another program.
    targets = torch.zeros_like(ids)
    for _ in pieces[:2]:
        model(ids, targets, reduction="sum").backward()
