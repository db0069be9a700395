"""Models to evaluate: those of a run, or one of timm's. Their classes must be the data's."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_input_data_config
from torch import nn

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
from trainkit.cli import UserError
from trainkit.files import read_json

Candidates = tuple[dict[str, nn.Module], dict[str, Any]]  # models by name, and the arguments of eval_transform


def of_run(
    run: Path, best: bool, weights: Sequence[str], data: str, classes: list[str], device: torch.device
) -> Candidates:
    """The run's model with every one of `weights` that it has.

    Raises UserError if the classes of `data` are not its own.
    """
    checkpoint = find_checkpoint(run, best)
    check_same_classes(run, checkpoint.state["classes"], data, classes)
    about = about_images(checkpoint.state)
    settings = {"input_size": about["input_size"][-2:], **eval_settings(about)}
    available = [name for name in weights if (checkpoint.path / f"{name}.safetensors").exists()]
    return {name: load_run(checkpoint, name, device) for name in available or weights}, settings


def of_export(folder: Path, data: str, classes: list[str], device: torch.device) -> Candidates:
    """The model of an exported folder, with the preprocessing that its config.json names.

    Raises UserError if timm cannot build it, if it is a language model, or if the classes of `data` are not its own.
    """
    check_export(folder)
    model = timm_weights(f"local-dir:{folder}", "--run").to(device).eval()
    names = read_json(folder / "config.json", "configuration").get("label_names")
    check_same_classes(folder, names or [str(number) for number in range(model.num_classes)], data, classes)
    return {folder.name: model}, _settings_of(model)


def of_timm(
    name: str, arguments: dict[str, Any], checkpoint: Path | None, data: str, classes: list[str], device: torch.device
) -> Candidates:
    """timm's model with weights from a file, or timm's own without one.

    Raises UserError if `data` has more or fewer classes.
    """
    model = build(name, pretrained=checkpoint is None, **arguments)
    if checkpoint is not None:
        load_file(checkpoint, model)
    if model.num_classes != len(classes):
        raise UserError(f"{name} tells {model.num_classes} classes apart but {data} has {len(classes)}")
    return {name: model.to(device).eval()}, _settings_of(model)


def _settings_of(model: nn.Module) -> dict[str, Any]:
    about = resolve_input_data_config(model)
    return {"input_size": tuple(about["input_size"][-2:]), **eval_settings(about)}


def check_same_classes(run: Path, trained: list[str], data: str, classes: list[str]) -> None:
    """Raises UserError if the data's classes cannot be the run's.

    Where all names differ (folder names against numbers or words) their number must do, and a warning says so.
    """
    if len(trained) != len(classes):
        raise UserError(f"{run} was trained on {len(trained)} classes but {data} has {len(classes)}")
    if trained == classes:
        return
    if set(trained) & set(classes):
        number = next(number for number, pair in enumerate(zip(trained, classes)) if pair[0] != pair[1])
        names = f"'{trained[number]}' for {run} but '{classes[number]}' in {data}"
        raise UserError(f"class {number} is {names}; the two must agree")
    if os.environ.get("RANK", "0") == "0":
        example = f"'{classes[0]}' for '{trained[0]}'"
        taken = "they are taken to be the same in the same order"
        print(f"warning: {data} has other names for its classes ({example}); {taken}", file=sys.stderr)
