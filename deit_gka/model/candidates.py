"""Models to evaluate: those of a run, or one of timm's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.data import resolve_input_data_config
from torch import nn

from deit_gka.data.sources.classes import numbers_in_model
from deit_gka.model.checkpoints import (
    about_images,
    build,
    check_export,
    eval_settings,
    find_checkpoint,
    load_file,
    load_run,
    timm_weights,
)
from deit_gka.model.origin import read_origin
from trainkit_gka.cli import UserError


class Candidates(NamedTuple):
    """One model, with one or several sets of weights."""

    models: dict[str, nn.Module]  # by name
    settings: dict[str, Any]  # the arguments of eval_transform
    classes: Sequence[str]  # their names, in the model's order; none if nobody wrote them down

    def numbers(self, own: Sequence[str], data: str, model: str) -> tuple[list[int], str]:
        """`numbers_in_model` of the data's classes. Raises UserError for more or fewer than the model has, too."""
        count = len(self.classes) or next(iter(self.models.values())).num_classes
        if count != len(own):
            raise UserError(f"{model} was trained on {count} classes but {data} has {len(own)}")
        return numbers_in_model(own, data, self.classes, model)


def of_run(run: Path, best: bool, weights: Sequence[str], device: torch.device) -> Candidates:
    """The run's model with every one of `weights` that it has. Raises UserError."""
    checkpoint = find_checkpoint(run, best)
    about = about_images(checkpoint.state)
    settings = {"input_size": about["input_size"][-2:], **eval_settings(about)}
    available = [name for name in weights if (checkpoint.path / f"{name}.safetensors").exists()]
    models = {name: load_run(checkpoint, name, device) for name in available or weights}
    return Candidates(models, settings, checkpoint.state["classes"])


def of_export(folder: Path, device: torch.device) -> Candidates:
    """The model of an exported folder, with the preprocessing that its config.json names.

    Raises UserError if timm cannot build it, or if it is a language model.
    """
    check_export(folder)
    model = timm_weights(f"local-dir:{folder}", "--run").to(device).eval()
    return Candidates({folder.name: model}, _settings_of(model), read_origin(str(folder)).classes)


def of_timm(name: str, arguments: dict[str, Any], checkpoint: Path | None, device: torch.device) -> Candidates:
    """timm's model with weights from a file, or timm's own without one. Raises UserError."""
    model = build(name, pretrained=checkpoint is None, **arguments)
    if checkpoint is not None:
        load_file(checkpoint, model)
        classes = read_origin(str(checkpoint)).classes
    else:
        classes = model.pretrained_cfg.get("label_names") or ()
    return Candidates({name: model.to(device).eval()}, _settings_of(model), classes)


def _settings_of(model: nn.Module) -> dict[str, Any]:
    about = resolve_input_data_config(model)
    return {"input_size": tuple(about["input_size"][-2:]), **eval_settings(about)}
