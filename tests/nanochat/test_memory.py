"""The memory arithmetic against torch: parameters counted, saved tensors weighed; rows at once change no result."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from nanochat_gka.data.loader import PackedData, RowStream
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import GPT, build
from nanochat_gka.train import accumulate_gradients
from nanochat_gka.training import memory
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from tiny import one_line_error
from tiny_gpt import SHAPE, VARIANTS, awake
from trainkit_gka.distributed import Runtime

CPU = torch.device("cpu")
LARGER = dict(sequence_len=64, vocab_size=2000, n_embd=128, window_pattern="L")


def shape(**fields) -> GPTConfig:
    return dataclasses.replace(SHAPE, **{**LARGER, **fields})


def saved_bytes(model: GPT, rows: int) -> int:
    """The bytes that autograd saves between forward and backward, each storage once, the weights left out."""
    storages = {}

    def weigh(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.zeros(rows, model.config.sequence_len, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        loss = model(ids, ids, reduction="sum")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert loss.requires_grad
    return sum(size for pointer, (size, _) in storages.items() if pointer not in weights)


def held_bytes(model: GPT, rank: int = 0, ranks: int = 1) -> int:
    """The bytes of weights, gradients and the optimiser's state, padding and tensors of all ranks included."""
    optimizer = MuonAdamW(parameter_groups(model, OptimConfig()), Runtime(rank, ranks, CPU))
    units = [unit for group in optimizer.groups for unit in group.units]
    state = sum(tensor.numel() for unit in units for tensor in unit.state.values())
    return 4 * state + 8 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_arithmetic_is_what_torch_holds(variant):
    """Activations per row by the difference of two batches: two gradients as large as the logits (8 V bytes) come
    later. Fixed bytes within a hundredth, for Muon's second moments are not counted; on three ranks too.
    """
    model = build(shape(n_layer=6, **variant), "cpu")
    config, saved = model.config, saved_bytes(model, 3) - saved_bytes(model, 2)
    expected = memory.row_bytes(config, "cpu") - 8 * config.padded_vocab_size * config.sequence_len
    assert 0.8 < saved / expected < 1.05, saved / expected
    assert memory.fixed_bytes(config, "cpu")[0] == pytest.approx(held_bytes(model), rel=0.01)
    [dealt] = {held_bytes(model, rank, 3) for rank in range(3)}
    assert memory.fixed_bytes(config, "cpu", ranks=3)[0] == pytest.approx(dealt, rel=0.01)
    assert memory.fixed_bytes(config, "cpu")[0] > 1.2 * dealt


@pytest.mark.parametrize("limit, tried", [(3, [25, 13, 7, 4, 2]), (0, [25, 13, 7, 4, 2, 1])])
def test_rows_are_halved_until_they_fit_every_rank(limit, tried):
    """This rank can take 10 rows, and another one `limit`."""
    attempts = []

    def attempt(rows):
        attempts.append(rows)
        if rows > 10:
            raise torch.OutOfMemoryError("full")

    runtime = SimpleNamespace(device=CPU, any=lambda failed: failed or attempts[-1] > limit)
    with nullcontext() if limit else one_line_error("not even one row fits the GPU's memory; lower --depth"):
        assert memory.largest_that_runs(25, attempt, runtime) == 2
    assert attempts == tried


def test_a_dry_step_holds_and_compiles_what_a_step_does(packed):
    """Where a step has several micro-batches, gradients are in memory from the second one on."""
    data = PackedData(packed / "packed")
    fields = dict(sequence_len=data.sequence_len, vocab_size=data.tokenizer.vocab_size, attention="GA")
    plain, stream, compiled, seen = awake(shape(**fields)), RowStream(data.split("train"), 42), [], []

    def backend(graph, inputs):
        compiled.append(len(inputs))
        return graph.forward

    program = torch.compile(plain, backend=backend, dynamic=False)

    def model(ids, targets, reduction):
        seen.append((len(ids), sum(parameter.grad is not None for parameter in plain.parameters())))
        return program(ids.contiguous(), targets.contiguous(), reduction=reduction)  # as on CUDA

    memory.dry_step(model, 8, 4, stream.rows.sequence_len, CPU)
    plain.zero_grad()
    graphs = len(compiled)
    accumulate_gradients(model, stream, 0, 8, 4, Runtime(0, 1, CPU))
    assert seen == [(4, 0), (4, len(list(plain.parameters())))] * 2
    assert graphs == len(compiled) > 0
