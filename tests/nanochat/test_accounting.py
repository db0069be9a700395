"""The paper's size and compute table, to the unit, from the command a reader would run."""

import json
from functools import partial

import pytest
import torch

import tiny
from nanochat_gka import accounting
from nanochat_gka.model.accounting import flops_per_token, meta_model, plan
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from operator_cases import CPU
from trainkit_gka.cli import UserError

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
