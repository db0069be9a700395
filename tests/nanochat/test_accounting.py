"""What a model takes: the paper's size and compute table to the unit, and the memory arithmetic against torch."""

import dataclasses
import json
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tiny
from nanochat_gka import accounting
from nanochat_gka.data.loader import PackedData, RowStream
from nanochat_gka.model.accounting import flops_per_token, meta_model, plan
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import GPT, build
from nanochat_gka.train import accumulate_gradients
from nanochat_gka.training import memory
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from operator_cases import CPU
from tiny_gpt import SHAPE, VARIANTS, awake
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime

NAMES = ("parameters", "flops_per_token", "train_tokens", "steps", "total_batch_size", "gka_values")
GKA = 378_798_320, 2_414_347_440, 2_778_726_400, 2650, 2**20, "rotated"
SOFTMAX = 896_535_720, 3_004_189_440, 4_568_645_632, 4357, 2**20, None
# The paper prints 6.7088e18 for 6.70881e18.
ROWS = [("gka", 8.25, GKA, "6.7088e+18", 0.0746177), ("softmax", 10.5, SOFTMAX, "1.3725e+19", 0.0715628)]


@pytest.mark.parametrize("attention, ratio, numbers, flops, decay", ROWS, ids=["gka", "softmax"])
def test_the_papers_rows(attention, ratio, numbers, flops, decay, capsys):
    flags = ["--depth", 20, "--attention", attention, "--target-param-data-ratio", ratio, "--json"]
    assert tiny.exit_code(accounting.main, accounting.AccountingConfig, *flags) == 0
    printed = json.loads(capsys.readouterr().out)
    assert tuple(map(printed.get, NAMES)) == numbers and f"{printed['train_flops']:.4e}" == flops
    shape = partial(GPTConfig.from_depth, attention=attention)
    horizon = plan(meta_model(shape(20)), shape, ratio=ratio)
    assert horizon.lr_scale == pytest.approx(2**0.5)
    assert 0.2 * horizon.weight_decay_scale == pytest.approx(decay, rel=1e-6)


def test_steps_come_from_the_first_setting():
    shape = partial(GPTConfig.from_depth, attention="gka")
    model = meta_model(shape(4))
    assert plan(model, shape, num_iterations=7, target_flops=1e18).steps == 7
    by_flops = plan(model, shape, target_flops=1e16, total_batch_size=2**16)
    assert by_flops.steps == round(1e16 / (flops_per_token(model) * 2**16))
    with pytest.raises(UserError, match="set one of"):
        plan(model, shape, ratio=-1)
    with pytest.raises(UserError, match="shorter than one step"):
        plan(model, shape, ratio=1e-6, total_batch_size=2**20)


@pytest.mark.parametrize("kind", ["softmax", pytest.param("gka", marks=CPU.marks)])
def test_flops_match_the_matrix_products_that_run(kind):
    """6 x parameters + 12 C T, against torch's count of forward and backward products (full windows, T x T scores)."""
    from torch.utils.flop_counter import FlopCounterMode

    import gka.flops  # noqa: F401

    sizes = dict(aspect_ratio=32, head_dim=16, vocab_size=64, sequence_len=16)
    config = GPTConfig.from_depth(2, window_pattern="L", attention=kind, value_embeds="none", **sizes)
    model = build(config, "cpu")
    ids = torch.randint(64, (1, 16))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(ids, ids).backward()
    # The embedding is free, so the first layer's inputs need gradients like any other: nothing is left out.
    bandwidths = sum(p.numel() for name, p in model.named_parameters() if "log_sigma" in name)
    assert counter.get_total_flops() == 16 * (flops_per_token(model) - 6 * bandwidths)


# Memory

DEVICE = torch.device("cpu")
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
    optimizer = MuonAdamW(parameter_groups(model, OptimConfig()), Runtime(rank, ranks, DEVICE))
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
    expected = memory.row_bytes(model, "cpu") - 8 * config.padded_vocab_size * config.sequence_len
    assert 0.8 < saved / expected < 1.05, saved / expected
    assert memory.fixed_bytes(model, "cpu")[0] == pytest.approx(held_bytes(model), rel=0.01)
    [dealt] = {held_bytes(model, rank, 3) for rank in range(3)}
    assert memory.fixed_bytes(model, "cpu", ranks=3)[0] == pytest.approx(dealt, rel=0.01)
    assert memory.fixed_bytes(model, "cpu")[0] > 1.2 * dealt


@pytest.mark.parametrize("limit, tried", [(3, [25, 13, 7, 4, 2]), (0, [25, 13, 7, 4, 2, 1])])
def test_rows_are_halved_until_they_fit_every_rank(limit, tried):
    """This rank can take 10 rows, and another one `limit`."""
    attempts = []

    def attempt(rows):
        attempts.append(rows)
        if rows > 10:
            raise torch.OutOfMemoryError("full")

    runtime = SimpleNamespace(device=DEVICE, any=lambda failed: failed or attempts[-1] > limit)
    with nullcontext() if limit else tiny.one_line_error("not even one row fits the GPU's memory; lower --depth"):
        assert memory.largest_that_runs(25, attempt, runtime) == 2
    assert attempts == tried


def test_a_dry_step_holds_and_compiles_what_a_step_does(packed):
    """Where a step has several micro-batches, gradients are in memory from the second one on."""
    data = PackedData(packed / "packed")
    fields = dict(sequence_len=data.sequence_len, vocab_size=data.tokenizer.vocab_size, attention="GA")
    plain, stream, compiled, seen = awake(shape(**fields)), RowStream(data.split("train"), 42), CompileCounter(), []
    program = torch.compile(plain, backend=compiled, dynamic=False)

    def model(ids, targets, reduction):
        seen.append((len(ids), sum(parameter.grad is not None for parameter in plain.parameters())))
        return program(ids.contiguous(), targets.contiguous(), reduction=reduction)  # as on CUDA

    memory.dry_step(model, 8, 4, stream.rows.sequence_len, DEVICE)
    plain.zero_grad()
    graphs = compiled.frame_count
    accumulate_gradients(model, stream, 0, 8, 4, Runtime(0, 1, DEVICE))
    assert seen == [(4, 0), (4, len(list(plain.parameters())))] * 2
    assert graphs == compiled.frame_count > 0
