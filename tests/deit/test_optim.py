"""Optimiser, schedule and weight average are the paper's."""

import math

import pytest
import torch

from deit_gka.recipe import Recipe
from deit_gka.training.optim import make_average, make_optimizer, make_schedule
from digit_runs import micro


def test_learning_rates_are_the_papers():
    optimizer = make_optimizer(micro(), Recipe())
    schedule = make_schedule(optimizer, Recipe(), 714)

    def rate(update):
        schedule.step_update(update)
        (value,) = {group["lr"] for group in optimizer.param_groups}
        return value

    assert rate(0) == pytest.approx(1e-6)
    assert rate(1785) == pytest.approx(1e-6 + (1.75e-3 - 1e-6) / 2)  # half of the warm-up
    for update in (5 * 714, 100 * 714, 7, 150 * 714, 299 * 714, 300 * 714 - 1):  # in any order: it remembers nothing
        cosine = 1e-6 + (1.75e-3 - 1e-6) * (1 + math.cos(math.pi * update / (300 * 714))) / 2
        assert rate(update) == pytest.approx(cosine if update > 7 else 1e-6 + (1.75e-3 - 1e-6) * 7 / (5 * 714))


def test_weight_decay_groups_and_every_parameter_learns():
    """Weights are decayed; norms, biases, tokens and all that says how distances are counted are not."""
    model = micro(attention="GV", channel_bandwidths=True)
    optimizer = make_optimizer(model, Recipe(weight_decay=0.07, opt_betas=(0.8, 0.95)))
    assert type(optimizer) is torch.optim.AdamW
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.8, 0.95), 1e-8)}
    names = {parameter: name for name, parameter in model.named_parameters()}
    decays = {names[p]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    weights = {name for name in decays if name.endswith(".weight") and "norm" not in name}
    assert decays == {name: 0.07 if name in weights else 0.0 for name in names.values()} and len(weights) == 9
    attention = {f"blocks.{name}" for name in ("0.attn.log_sigma", "0.attn.log_scale", "1.attn.value_bias")}
    assert {"pos_embed", "cls_token"} | attention < decays.keys() - weights
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters() if name != "cls_token")


def test_average_without_warmup_is_deits():
    model = torch.nn.Linear(3, 2).double()
    average = make_average(model, Recipe(model_ema_warmup=False, model_ema_decay=0.9))
    expected = model.weight.detach().clone()
    for _ in range(4):
        torch.nn.init.normal_(model.weight)
        average.update(model, step=None)  # as the trainer does
        expected = 0.9 * expected + 0.1 * model.weight.detach()
    torch.testing.assert_close(average.module.weight, expected)
    assert make_average(model, Recipe(model_ema_warmup=False)).get_decay(None) == 0.99996
    assert make_average(model, Recipe(model_ema_decay=0.0)) is None
