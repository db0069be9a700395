"""What makes a run the same run: every setting of both trainers is part of it, or may change when it is continued."""

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from deit_gka.recipe import Recipe
from deit_gka.training.config import TrainConfig as VisionConfig
from nanochat_gka.train import TrainConfig as LanguageConfig
from trainkit_gka.cli import Count, MayChange, UserError, check_bounds
from trainkit_gka.run_config import RunConfig

# A new flag belongs here if it decides what is computed; if not, its field's type is MayChange[...].
LANGUAGE = {
    *("depth", "aspect_ratio", "head_dim", "window_pattern", "attention", "value_embeds", "head_offsets", "gka_values"),
    *("sigma_squared", "embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "sigma_lr", "weight_decay"),
    *("adam_beta1", "adam_beta2", "max_seq_len", "num_iterations", "target_flops", "target_param_data_ratio"),
    *("total_batch_size", "warmup_ratio", "warmdown_ratio", "final_lr_frac", "seed", "dtype"),
    *("offset_layers", "channel_bandwidths", "head_gates", "channel_lr", "gate_lr", "lr_batch_size"),
}
VISION = {*(field.name for field in fields(Recipe)), "model", "model_kwargs", "attention"}


@pytest.mark.parametrize(
    "config,settings",
    [(LanguageConfig(attention="gka"), LANGUAGE), (VisionConfig(distillation_type="hard"), VISION)],
    ids=["language", "vision"],
)
def test_settings_that_may_change(config, settings):
    assert set(config.identity()) == settings
    assert set(config.record()) == settings | {"model_tag"} | ({"data"} if isinstance(config, VisionConfig) else set())
    json.dumps(config.record())
    for field in fields(config):
        assert field.name in settings or config.identity() == replace(config, **{field.name: "other"}).identity()


def test_settings_without_meaning_are_left_out():
    assert set(LanguageConfig(attention="softmax").identity()) == LANGUAGE - {"gka_values"}
    teacher = {"teacher_model", "teacher_path", "distillation_alpha", "distillation_tau"}
    assert set(VisionConfig().identity()) == VISION - teacher


@dataclass(frozen=True)
class Toy(RunConfig):
    rate: float = 1.0
    sizes: tuple[int, ...] = (1, 2)
    offsets: str = ""
    data: MayChange[Path] = Path("here")
    workers: MayChange[Count] = 1


def test_first_differing_flag_is_named():
    """A flag that is newer than the run had its default there."""
    saved = json.loads(json.dumps(Toy(model_tag="run").identity()))
    assert saved == {"seed": 42, "rate": 1.0, "sizes": [1, 2], "offsets": ""}
    Toy(model_tag="other", data=Path("there"), workers=3, keep=9, out=Path("/elsewhere")).check_continues(saved)
    Toy(model_tag="run").check_continues({"seed": 42})
    for settings, before, words in (
        (dict(rate=2.0), saved, "--rate is 2.0 but the run in out/runs/run has 1.0; use its value, or"),
        (dict(rate=2.0), {"seed": 42}, "--rate is 2.0 but the run in out/runs/run has 1.0"),
        (dict(sizes=(3,)), saved, "--sizes is [3] but the run in out/runs/run has [1, 2]"),
        (dict(offsets="PS"), saved, "--offsets is PS but the run in out/runs/run has none"),
        ({}, {**saved, "offsets": "PS"}, "--offsets is none but the run in out/runs/run has PS"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            Toy(model_tag="run", **settings).check_continues(before)
    with pytest.raises(UserError, match="--workers must be at least 1, got 0"):
        check_bounds(Toy(model_tag="run", workers=0))


def test_a_setting_of_the_run_that_is_not_known_is_not_dropped():
    with pytest.raises(UserError, match=r"the run in out/runs/run has --dropout 0.1, which this trainer does not know"):
        Toy(model_tag="run").check_continues({"seed": 42, "dropout": 0.1})
    Toy(model_tag="run").check_continues({"seed": 42, "workers": 3})  # it was part of what makes a run, once


@pytest.mark.parametrize("tag", ["", "a/b", ".hidden"])
def test_run_name_is_a_plain_folder_name(tag):
    with pytest.raises(UserError, match="--model-tag must be a plain folder name"):
        Toy(model_tag=tag).check()
