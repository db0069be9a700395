"""What makes a run the same run: every setting of both trainers is part of it, or may change when it is continued."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

import tiny
from deit_gka.recipe import Recipe
from deit_gka.training.config import TrainConfig as VisionConfig
from nanochat_gka.train import TrainConfig as LanguageConfig
from trainkit_gka.cli import Count, MayChange
from trainkit_gka.run_config import RunConfig

# A new flag belongs here if it decides what is computed; if not, its field's type is MayChange[...].
LANGUAGE = {
    *("depth", "aspect_ratio", "head_dim", "window_pattern", "attention", "value_embeds", "head_offsets", "gka_values"),
    *("sigma_squared", "embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "sigma_lr", "weight_decay"),
    *("adam_beta1", "adam_beta2", "max_seq_len", "num_iterations", "target_flops", "target_param_data_ratio"),
    *("total_batch_size", "warmup_ratio", "warmdown_ratio", "final_lr_frac", "seed", "dtype"),
    *("offset_layers", "channel_bandwidths", "head_gates", "channel_lr", "gate_lr", "lr_batch_size"),
    "document_mask",
}
VISION = {*(field.name for field in fields(Recipe)), "model", "model_kwargs", "attention", "patch_size"}
TEACHER = {"teacher_model", "teacher_path", "distillation_alpha", "distillation_tau"}


@pytest.mark.parametrize(
    "config, settings, without_meaning, simpler",
    [
        (LanguageConfig(attention="gka"), LANGUAGE, {"gka_values"}, LanguageConfig(attention="softmax")),
        (VisionConfig(distillation_type="hard"), VISION, TEACHER, VisionConfig()),
    ],
    ids=["language", "vision"],
)
def test_settings_that_may_change(config, settings, without_meaning, simpler):
    """Those that mean nothing, such as a teacher's without a teacher, are left out."""
    assert set(config.identity()) == settings and set(simpler.identity()) == settings - without_meaning
    assert set(config.record()) == settings | {"model_tag"} | ({"data"} if isinstance(config, VisionConfig) else set())
    json.dumps(config.record())
    for field in fields(config):
        assert field.name in settings or config.identity() == replace(config, **{field.name: "other"}).identity()


@dataclass(frozen=True)
class Toy(RunConfig):
    rate: float = 1.0
    sizes: tuple[int, ...] = (1, 2)
    offsets: str = ""
    data: MayChange[Path] = Path("here")
    workers: MayChange[Count] = 1


SAVED = {"seed": 42, "rate": 1.0, "sizes": [1, 2], "offsets": ""}
REFUSED = [  # the flags, the settings of the run, and the line
    (dict(rate=2.0), SAVED, "--rate is 2.0 but the run in out/runs/run has 1.0; use its value, or"),
    (dict(rate=2.0), {"seed": 42}, "--rate is 2.0 but .* has 1.0"),
    (dict(sizes=(3,)), SAVED, r"--sizes is \[3\] but .* has \[1, 2\]"),
    (dict(offsets="PS"), SAVED, "--offsets is PS but .* has none"),
    ({}, {**SAVED, "offsets": "PS"}, "--offsets is none but .* has PS"),
    ({}, {"seed": 42, "dropout": 0.1}, "has --dropout 0.1, which this trainer does not know"),
]


@pytest.mark.parametrize("flags, saved, line", REFUSED)
def test_first_differing_flag_is_named(flags, saved, line):
    """A flag that is newer than the run had its default there."""
    with tiny.one_line_error(line):
        Toy(model_tag="run", **flags).check_continues(saved)


def test_other_paths_and_speeds_continue_a_run():
    """Also where a flag decided what makes a run, once."""
    assert json.loads(json.dumps(Toy(model_tag="run").identity())) == SAVED
    for saved in (SAVED, {"seed": 42}, {"seed": 42, "workers": 3}):
        Toy(model_tag="other", data=Path("there"), workers=4, keep=9, out=Path("/elsewhere")).check_continues(saved)


@pytest.mark.parametrize("tag", ["", "a/b", ".hidden"])
def test_run_name_is_a_plain_folder_name(tag):
    with tiny.one_line_error("--model-tag must be a plain folder name"):
        Toy(model_tag=tag).check()
