"""Models: built by their timm name, read from checkpoints, exported for timm."""

import contextlib
import difflib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors
from torch import nn

from deit_gka.model.attention import ATTENTION
from deit_gka.model.registry import attention_by_layer, default_cfgs, is_pattern
from gka import layer_kinds
from trainkit_gka import exports
from trainkit_gka.checkpoint import Checkpoint, load, load_newest
from trainkit_gka.cli import PassingFault, UserError, is_network
from trainkit_gka.files import read_json, usual_mode, write_json

WEIGHTS = ("ema", "model")
OWN_FLAGS = {"name": "--model", "pretrained": "--pretrained of evaluate", "input_size": "--input-size"}


def parse_kwargs(words: Iterable[str]) -> dict[str, Any]:
    """["depth=4", "attention=GGGA"] as {"depth": 4, "attention": "GGGA"}: values are JSON, True or False, or else text.

    Raises UserError for words of another form, and for names that are flags.
    """
    kwargs = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key.isidentifier():
            raise UserError(f"--model-kwargs takes name=value, got {word!r}")
        try:
            kwargs[key] = json.loads(value.lower() if value in ("True", "False") else value)
        except json.JSONDecodeError:
            kwargs[key] = value
        if key in OWN_FLAGS:
            raise UserError(f"--model-kwargs cannot set {key}: it is {OWN_FLAGS[key]}")
    return kwargs


def check_name(name: str) -> None:
    """Raises UserError unless timm has a model of that name, ours included."""
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise UserError(f"timm has no model {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))


def check_attention(pattern: str) -> None:
    """Raises UserError unless --attention is a kind's name or a pattern by layer."""
    try:
        layer_kinds(pattern, num_layers=1)
    except ValueError as error:
        raise UserError(f"--{error}") from None


def build(
    name: str, num_classes: int | None = None, input_size: int | None = None, pretrained: bool = False, **kwargs
) -> nn.Module:
    """timm.create_model, which raises UserError for mistakes. None leaves timm's own number of classes or image size.

    attention: a kind's name or a pattern by layer such as GGGA, for our models and every ViT of timm's.
    """
    check_name(name)
    config = timm.get_pretrained_cfg(name)
    resized = input_size is not None and config is not None and config.input_size[-1] != input_size
    if resized and config.fixed_input_size:
        kwargs.setdefault("img_size", input_size)
    if num_classes is not None:
        kwargs["num_classes"] = num_classes
    is_ours = name.split(".")[0] in default_cfgs
    if "spatial_offsets" in kwargs and not is_ours:
        raise UserError(f"{name} has no spatial_offsets; deit_*_gka_* and deit_*_vlt_* have, with any --attention")
    if "attention" in kwargs and not is_ours:
        kwargs["attn_layer"] = kwargs.pop("attention")
    pattern = kwargs.get("attn_layer")
    with one_line(f"timm cannot build {name}"):
        if is_pattern(pattern):
            attention_by_layer(pattern)
        model = timm.create_model(name, pretrained=pretrained, **kwargs)
    if is_pattern(pattern) and not any(isinstance(module, tuple(ATTENTION.values())) for module in model.modules()):
        raise UserError(f"{name} has an attention of its own, which {pattern} does not change")
    size = input_size or kwargs.get("img_size")
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    sides = size if isinstance(size, list) else [size, size]
    if size and isinstance(patch, tuple) and any(side % part for side, part in zip(sides, patch)):
        # Patches would not cover the image, whose last pixels the model would silently ignore.
        raise UserError(f"--input-size must be a multiple of the patch, {patch[0]}; got {size}")
    return model


def timm_weights(name: str, flag: str) -> nn.Module:
    """A model with timm's weights for its name. Raises UserError, naming `flag`, if they cannot be had."""
    with one_line(f"{flag} {name}: timm has no weights of it here, give a file instead"):
        return timm.create_model(name, pretrained=True).eval()


def timm_model(name: str, words: Sequence[str] = (), file: Path | None = None, pretrained: bool = False) -> nn.Module:
    """A timm model, in evaluation mode, with the weights of a file, with timm's own, or with random ones.

    words: as in `parse_kwargs`. Raises UserError.
    """
    model = build(name, pretrained=pretrained, **parse_kwargs(words)).eval()
    return load_file(file, model) if file else model


@contextlib.contextmanager
def one_line(problem: str) -> Iterator[None]:
    """Raises UserError, with the problem and its reason, for whatever error timm raises, PassingFault if the network's.

    torch, safetensors, the hub and its transport have many kinds of errors for what is not theirs.
    """
    try:
        yield
    except Exception as error:
        kind = PassingFault if is_network(error) else UserError
        raise kind(f"{problem}: {shorten(str(error) or type(error).__name__, 200, placeholder=' ...')}") from None


def find_checkpoint(path: Path, best: bool = False) -> Checkpoint:
    """A checkpoint folder itself, or the newest intact one of a run's folder; best: the one with the best accuracy.

    Raises UserError if there is none.
    """
    checkpoint = load(path) if is_checkpoint(path) else load_newest(path / ("best" if best else "checkpoints"))
    if checkpoint is None and is_export(path):
        advice = f"or, where a command has them, --model NAME --checkpoint {path / exports.WEIGHTS}"
        raise UserError(f"{path} is an exported model: give the run that it was exported from, {advice}")
    if checkpoint is None:
        raise UserError(f"no checkpoint in {path}; train one first, by python -m deit_gka.train")
    if "classes" not in checkpoint.state:
        raise UserError(f"{checkpoint.path} is not of a vision run; nanochat_gka's commands take language models")
    return checkpoint


def weights_in(checkpoint: Checkpoint) -> list[str]:
    """The sets of weights that a checkpoint has, the average first."""
    return [name for name in WEIGHTS if name in checkpoint.files]


@dataclass
class SavedModel:
    """A model that an argument names: a run's checkpoint, an exported folder, a file of weights, or a timm model.

    classes, about: the names of the classes and timm's data configuration that are recorded with the weights; empty if
    none are.
    """

    flag: str
    name: str  # as timm takes it
    file: Path | None = None
    checkpoint: Checkpoint | None = None
    classes: Sequence[str] = ()
    about: dict[str, Any] = field(default_factory=dict)

    def model(self, weights: str = "") -> nn.Module:
        """The model, on the CPU. weights: of a run, "ema" or "model"; without, the average if it has one."""
        if self.checkpoint and not self.file:
            return load_run(self.checkpoint, weights or weights_in(self.checkpoint)[0])
        return timm_weights(self.name, self.flag)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by name; no code in a file is run. Raises UserError if there are none."""
        if self.file is None:
            return self.model().state_dict()
        with one_line(f"{self.file} does not hold weights"):
            weights = timm.models.load_state_dict(str(self.file), use_ema=True, weights_only=True)
        weights = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        if not weights:
            raise UserError(f"{self.file} does not hold weights: it has no named tensors")
        return weights


def find_model(source: str | Path, flag: str, best: bool = False) -> SavedModel:
    """What `source`, the value of `flag`, names: the only place that decides it.

    A folder is a run (or one checkpoint folder in it) or an export, a file is weights (their metadata may be beside
    them), and all else a timm name. best: as in `find_checkpoint`. Raises UserError if it is none of these, or damaged.
    """
    name, path = str(source), Path(os.path.expanduser(source))
    in_checkpoint = path.is_file() and is_checkpoint(path.parent)
    if in_checkpoint or (path.is_dir() and not is_export(path)):
        checkpoint = find_checkpoint(path.parent if in_checkpoint else path, best)
        state, file = checkpoint.state, path if in_checkpoint else None
        return SavedModel(flag, name, file, checkpoint, state["classes"], about_images(state))
    if path.is_dir():
        return SavedModel(flag, f"local-dir:{path}", path / exports.WEIGHTS, None, *_described(path))
    if path.is_file():
        return SavedModel(flag, name, path, None, *(_described(path.parent) if is_export(path.parent) else ()))
    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if config is None and not name.startswith("hf-hub:"):
        kinds = "a file of weights, a run or exported folder, or the name of a timm model that has weights"
        raise UserError(f"{flag} {name} does not exist; it is {kinds}")
    return SavedModel(flag, name, about=config.to_dict() if config else {})


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one checkpoint of a run."""
    return all((folder / name).exists() for name in ("manifest.json", "state.json"))


def is_export(folder: Path) -> bool:
    """Whether a folder is an exported vision model."""
    file = folder / exports.CONFIG
    return file.exists() and "architecture" in read_json(file, "configuration")


def _described(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """The names of the classes and timm's data configuration of an exported folder, whose pattern timm learns.

    Raises UserError for a damaged file.
    """
    exports.check_files(folder)
    config = read_json(folder / exports.CONFIG, "configuration")
    pattern = config.get("model_args", {}).get("attn_layer")
    if is_pattern(pattern):
        with one_line(f"{folder / exports.CONFIG} is damaged"):
            attention_by_layer(pattern)  # which may be longer than timm's table has them
    return config.get("label_names") or [], config.get("pretrained_cfg") or {}


def load_run(checkpoint: Checkpoint, weights: str) -> nn.Module:
    """The model of one of our checkpoints, on the CPU, with "ema" or "model" weights. Raises UserError without them."""
    if weights not in (available := weights_in(checkpoint)):
        raise UserError(f"{checkpoint.path} has no {weights} weights; choose --weights {' or '.join(available)}")
    about = checkpoint.state["model"]
    model = build(about["name"], about["num_classes"], about["input_size"], **about["kwargs"])
    model.load_state_dict(checkpoint.tensors(weights))
    return model.eval()


def load_file(path: Path, model: nn.Module) -> nn.Module:
    """Weights from a file into `model`: .safetensors, or .pth such as DeiT's own, which runs no code of the file.

    Raises UserError if they do not fit, or if a file is damaged of the exported folder that they are in.
    """
    exports.check_files(path.parent)
    with one_line(f"{path} does not hold weights of this model"):
        timm.models.load_checkpoint(model, str(path), use_ema=True, weights_only=True)
    return model.eval()


def about_images(state: dict[str, Any]) -> dict[str, Any]:
    """The images that the model of a checkpoint's `state` takes, as timm's data configuration."""
    recipe = state["train_config"]
    about = {"input_size": (3, recipe["input_size"], recipe["input_size"]), "crop_pct": recipe["crop_pct"]}
    return {**about, "interpolation": "bicubic", "mean": tuple(recipe["mean"]), "std": tuple(recipe["std"])}


def eval_settings(about: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `data.transforms.eval_transform`, all but the size, out of timm's data configuration."""
    return {name: about[name] for name in ("crop_pct", "crop_mode", "interpolation", "mean", "std") if name in about}


def export(checkpoint: Checkpoint, weights: str, folder: Path) -> Path:
    """Write model.safetensors and config.json, and return the path of the former.

    timm loads them by create_model("local-dir:FOLDER", pretrained=True) or create_model(NAME, checkpoint_path=FILE),
    transformers by AutoModelForImageClassification.from_pretrained(FOLDER) or its pipeline; all after import deit_gka.
    The folder appears when it is complete, without ONNX files of an earlier export. Raises UserError if it holds
    another model, or something else.
    """
    model = load_run(checkpoint, weights)
    about = dict(model_config={"label_names": checkpoint.state["classes"]}, data_config=about_images(checkpoint.state))
    with exports.export_folder(folder, lambda: _has_weights(folder / exports.WEIGHTS, model)) as incoming:
        with usual_mode(incoming / exports.WEIGHTS):
            timm.models.save_for_hf(model, str(incoming), safe_serialization=True, **about)
        config = read_json(incoming / exports.CONFIG, "configuration")
        config.get("model_args", {}).pop("num_classes", None)  # it is there twice, which transformers refuses
        write_json(incoming / exports.CONFIG, config)
    return folder / exports.WEIGHTS


def _has_weights(file: Path, model: nn.Module) -> bool:
    """Whether a safetensors file holds the model's weights and nothing else."""
    try:
        saved = load_safetensors(file)
    except (OSError, SafetensorError):
        return False
    weights = model.state_dict()
    return saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in weights)
