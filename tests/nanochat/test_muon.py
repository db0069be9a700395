"""Muon's products of bfloat16 on processors without instructions for it: right, fast, and the same after resuming."""

import time

import pytest
import torch

import gpt_runs
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.training.muon import product
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from trainkit_gka import checkpoint, hardware
from trainkit_gka.distributed import Runtime

CPU = torch.device("cpu")
ROUNDING, ULP = 2.0**-24, 2.0**-8  # of float32; half a unit in the last place of bfloat16


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (64, 256, 64), (256, 64, 200)], ids=str)
@pytest.mark.parametrize("through_float32", [True, False])
def test_product_of_bfloat16_is_rounded_once(shape, through_float32):
    """Float32 sums of n exact products, in any order, are off by n roundings of the sum of their sizes; then y is
    rounded to bfloat16.
    """
    rows, n, columns = shape
    a, b = torch.randn(2, rows, n).bfloat16(), torch.randn(2, n, columns).bfloat16()
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    got = product(a, b, through_float32)
    assert got.dtype == torch.bfloat16
    assert ((got - exact).abs() <= (ULP * (1 + ROUNDING * n)) * exact.abs() + n * ROUNDING * sizes).all()


def test_a_step_costs_what_its_float32_flops_cost():
    """Without oneDNN bfloat16 is multiplied in a scalar loop, some 30 times slower, as without instructions for it."""
    torch.set_num_threads(1)
    config = GPTConfig(sequence_len=16, vocab_size=64, n_layer=1, n_head=4, n_kv_head=4, n_embd=256)
    model = build(config, "cpu")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    flops = 0.0
    for group in parameter_groups(model, OptimConfig()):
        if group.kind == "muon":
            small, large = sorted(group.parameters[0].shape)
            flops += len(group.parameters) * 5 * (4 * small * small * large + 2 * small**3)
    with torch.backends.mkldnn.flags(enabled=False):
        slow = hardware.bfloat16_products_are_slow(CPU)
        optimizer = MuonAdamW(parameter_groups(model, OptimConfig()), Runtime(0, 1, CPU), through_float32=slow)
        optimizer.step()
        step = shortest(optimizer.step)
    a = torch.randn(512, 512)
    rate = 2 * 512**3 / shortest(lambda: a @ a)
    assert step < 8 * flops / rate  # measured: 2.5, of which 1.5 are its other operations; 64 in bfloat16


def shortest(call) -> float:
    """Seconds of the fastest of five calls."""
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


@pytest.mark.parametrize("began", [True, False])
def test_a_continued_run_multiplies_as_it_began(packed, tmp_path, monkeypatch, began):
    for slow, steps in ((began, 4), (not began, 6)):
        monkeypatch.setattr(hardware, "bfloat16_products_are_slow", lambda device, slow=slow: slow)
        assert gpt_runs.train(packed, tmp_path, "--stop-after", steps) == 0
        folder = tmp_path / "run" / "checkpoints" / f"step_{steps:08d}"
        assert checkpoint.load(folder).state["progress"]["muon_through_float32"] is began
