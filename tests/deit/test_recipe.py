"""The recipe: the paper's values as defaults, values that are refused; optimiser, schedule and average of weights."""

import math
from dataclasses import fields

import pytest
import torch

from deit_gka.recipe import Recipe
from deit_gka.training.optim import make_average, make_optimizer, make_schedule
from tiny import one_line_error
from trainkit_gka.cli import flag_of
from vision_runs import micro

PAPER = dict(  # paper, section 4.1
    epochs=300, batch_size=7 * 256, group_size=256, lr=1e-3, weight_decay=0.05, opt_betas=(0.9, 0.999), clip_grad=1.0,
    warmup_epochs=5, min_lr=1e-6, input_size=224, scale=(0.08, 1.0), reprob=0.25, repeated_aug=3, mixup=0.8, cutmix=1.0,
    smoothing=0.1, model_ema_decay=0.99996,
)  # fmt: skip
DEIT = dict(  # left open by the paper: the recipe it follows
    warmup_lr=1e-6, ratio=(3 / 4, 4 / 3), hflip=0.5, aa="rand-m9-mstd0.5-inc1", crop_pct=0.875, seed=0,
    mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225),
)  # fmt: skip
OURS = dict(drop_path=-1.0, model_ema_warmup=True, amp="auto")
NOT_THE_PAPERS = dict(  # DeiT's distillation and DeiT III's loss and augmentation: off here
    three_augment=False, src=False, color_jitter=0.3, bce_loss=False, distillation_type="none",
    teacher_model="regnety_160.deit_in1k", teacher_path="", distillation_alpha=0.5, distillation_tau=1.0,
)  # fmt: skip


def test_defaults_are_the_papers():
    recipe = Recipe()
    values = {field.name: getattr(recipe, field.name) for field in fields(Recipe)}
    assert values == PAPER | DEIT | OURS | NOT_THE_PAPERS
    assert recipe.scaled_lr == pytest.approx(1.75e-3)
    rates = {size: recipe.drop_path_of(f"deit_{size}_gka_patch16_224") for size in ("tiny", "small", "base")}
    assert rates == {"tiny": 0.1, "small": 0.1, "base": 0.2} and recipe.drop_path_of("resnet18") == 0.0
    assert Recipe(drop_path=0.0).drop_path_of("deit_base_patch16_224") == 0.0


# At the ends that do not count, and what two flags must agree on: the flag that is named, and the settings.
IMPOSSIBLE = dict(
    batch_size=7, group_size=3, warmup_epochs=301.0, min_lr=1.0, warmup_lr=1.0, opt_betas=(0.9, 1.0), crop_pct=0.0,
    drop_path=1.0, std=(0.5, 0.0, 0.5), scale=(0.5, 0.1), ratio=(2.0, 1.0), distillation_tau=0.0,
    smoothing=dict(bce_loss=True), three_augment=dict(src=True),
)  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_values_name_the_flag(name):
    value = IMPOSSIBLE[name]
    with one_line_error(f"^{flag_of(name)} must be "):
        Recipe(**(value if isinstance(value, dict) else {name: value})).check()


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
