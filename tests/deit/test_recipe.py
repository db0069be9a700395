"""The recipe: the paper's values as defaults, values that are refused, and the small command of the README."""

from dataclasses import fields

import pytest

import tiny_vision
from deit_gka.recipe import Recipe
from digit_runs import accuracy
from runs.check import SMALL_VISION
from tiny import one_line_error
from trainkit_gka.cli import flag_of

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


@pytest.mark.slow
def test_small_command_learns(tmp_path):
    where = ["--data", "digits", "--out", tmp_path, "--results", tmp_path / "results.jsonl", "--model-tag", "run"]
    tiny_vision.call("deit_gka.train", *where, *SMALL_VISION.split(), folder=tmp_path / "output")
    assert accuracy(tmp_path) > 80
