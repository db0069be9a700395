"""Training that starts from weights, which may have another head, image size, patch or attention.

Tensors of the same name and shape are taken: of a softmax ViT for GKA that is everything but the bandwidths, which
softmax does not have. Positions and the patch embedding are resized; VLT takes queries and keys out of softmax's qkv.
All other tensors are left at their initialisation, and named.
"""

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import nn

from deit_gka.model.checkpoints import SavedModel, find_model
from deit_gka.recipe import Recipe
from trainkit_gka.checkpoint import Tensors, fingerprint
from trainkit_gka.cli import UserError

FLAG = "--initial-weights"
LEAST_SHARE = 0.5  # of the parameters outside the head


@dataclass
class WarmStart:
    """Which tensors of a model were taken from elsewhere."""

    share: float = 0.0  # of the parameters
    taken: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)  # left at their initialisation
    unused: list[str] = field(default_factory=list)  # of the weights
    known_classes: str = ""  # how many of the model's classes the head had, where it was fitted by their names

    def __str__(self) -> str:
        share = f"{math.floor(1000 * self.share) / 10}% of the parameters, with those resized"
        lists = {"resized": self.resized, "left at their initialisation": self.new, "not used": self.unused}
        parts = [f"{description}: {shortened(names)}" for description, names in lists.items() if names]
        parts += [f"head by class name: {self.known_classes}"] if self.known_classes else []
        return "; ".join([f"{len(self.taken)} tensors as they are ({share})", *parts])


def shortened(names: Iterable[str]) -> str:
    """["blocks.0.x", "blocks.1.x", "head"] as "blocks.*.x (2), head"."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    words = [name + (f" ({count})" if count > 1 else "") for name, count in counts.items()]
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")


def warnings_of(start: SavedModel, source: str, classes: Sequence[str], recipe: Recipe) -> list[str]:
    """Warnings for a run on images of `classes` that starts from the weights `start`, called `source`."""
    warnings = []
    if len(start.classes) == len(classes) and not set(start.classes) & set(classes):
        example = f"'{classes[0]}' for '{start.classes[0]}'"
        warnings.append(f"{source} has other names for its classes ({example}); its head is taken in their order")
    for name in ("mean", "std"):
        theirs, ours = start.about.get(name) or (), getattr(recipe, name)
        if any(abs(one - other) > 1e-3 for one, other in zip(theirs, ours)):
            flag = " ".join([f"--{name}", *(f"{value:g}" for value in theirs)])
            warnings.append(f"{source} saw images with another {name} than this run's {ours}; {flag} keeps it")
    return warnings


def check_same(source: str, saved: dict[str, str] | None, folder: Path) -> None:
    """Raises UserError unless a resumed run is given the weights it started from, which are `saved`: {"from", "hash"}.

    They may have moved, and need not exist any more.
    """
    if not source and saved is None:
        return
    same = source and saved and source == saved["from"] and not Path(source).is_file()
    if source and saved and not same:
        with contextlib.suppress(UserError):
            same = fingerprint(find_model(source, FLAG).tensors) == saved["hash"]
    if not same:
        start = f"{saved['from']} as it was then" if saved else "no weights"
        differ = f"{FLAG} is {source or 'not given'} but the run in {folder} started from {start}"
        raise UserError(f"{differ}; give the same, or another --model-tag")


@torch.no_grad()
def warm_start(
    model: nn.Module, weights: Tensors, source: str, theirs: Sequence[str] = (), ours: Sequence[str] = ()
) -> WarmStart:
    """Copy the tensors of `weights` that fit into `model`, on its device.

    theirs, ours: names of the classes of the weights and of the model, if known. Where they differ but share some, a
    head takes the rows of the shared ones, and the others keep their start. Raises UserError if less than half of the
    parameters outside the head fit, or if values are not finite.
    """
    state = model.state_dict()
    heads = _heads(model)
    done = WarmStart()
    weights = _with_queries_and_keys(weights, state)
    numbers = {} if list(theirs) == list(ours) else {name: number for number, name in enumerate(theirs)}
    rows = {number: numbers[name] for number, name in enumerate(ours) if name in numbers}
    for name, target in state.items():
        value = fitted = weights.get(name)
        is_head = value is not None and name in heads and value.shape[1:] == target.shape[1:]
        if is_head and rows and len(value) == len(theirs):
            fitted = target.clone()
            fitted[list(rows)] = value[list(rows.values())].to(target)
            done.known_classes = f"{len(rows)} of {len(ours)} classes"
        elif value is not None and value.shape != target.shape:
            fitted = _resized(name, value, target, model)
        if fitted is None:
            done.new.append(name)
            continue
        if fitted.is_floating_point() and not fitted.isfinite().all():
            raise UserError(f"{source} holds weights that are not finite, {name} is the first; give others")
        (done.taken if fitted is value else done.resized).append(name)
        target.copy_(fitted)
    done.unused = [name for name in weights if name not in state]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    fits = {name: size for name, size in sizes.items() if name not in done.new}
    done.share = sum(fits.values()) / sum(sizes.values())
    trunk, trunk_fits = (sum(size for name, size in some.items() if name not in heads) for some in (sizes, fits))
    if trunk_fits < LEAST_SHARE * trunk:
        few = f"{len(state) - len(done.new)} of this model's {len(state)} tensors, {done.share:.0%} of its parameters"
        if differing := [name for name in done.new if name in weights and name not in heads]:
            name = differing[0]
            few += f"; {name} is {tuple(weights[name].shape)} there and {tuple(state[name].shape)} here"
        raise UserError(f"{source} has only {few}; give weights of a model of the same width and kind")
    return done


def _heads(model: nn.Module) -> set[str]:
    """Names of the classifiers' parameters."""
    classifiers = model.get_classifier() if hasattr(model, "get_classifier") else ()
    heads = classifiers if isinstance(classifiers, tuple) else (classifiers,)
    ids = {id(parameter) for head in heads for parameter in head.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def _with_queries_and_keys(weights: Tensors, state: Tensors) -> Tensors:
    """`weights` with the first two thirds of softmax's qkv, queries and keys, under VLT's name for them."""
    renamed = dict(weights)
    for name in [name for name in state if ".qk." in name and name not in weights]:
        joined, rows = weights.get(name.replace(".qk.", ".qkv.")), state[name].shape[0]
        if joined is not None and 2 * joined.shape[0] == 3 * rows:
            renamed[name], renamed[name.replace(".qk.", ".qkv[values].")] = joined[:rows], joined[rows:]
            del renamed[name.replace(".qk.", ".qkv.")]
    return renamed


def _resized(name: str, value: torch.Tensor, target: torch.Tensor, model: nn.Module) -> torch.Tensor | None:
    """Positions or patch embedding for another image size or patch, bicubic as in timm; None for other tensors."""
    if value.ndim != target.ndim:
        return None
    if name == "patch_embed.proj.weight" and value.shape[:2] == target.shape[:2]:
        return resample_patch_embed(value.float(), list(target.shape[-2:]))
    if name != "pos_embed" or value.shape[-1] != target.shape[-1]:
        return None
    grid = list(model.patch_embed.grid_size)
    special = target.shape[1] - math.prod(grid)  # tokens that are not patches and have a position
    for saved in (special, 1, 2, 0):  # special tokens of the weights: the number that leaves a square
        side = math.isqrt(max(0, value.shape[1] - saved))
        if side and side**2 == value.shape[1] - saved:
            break
    else:
        return None
    patches = resample_abs_pos_embed(value[:, saved:].float(), grid, [side, side], num_prefix_tokens=0)
    prefix = target[:, :special].clone()  # a distillation token that the weights do not have keeps its start
    both = min(special, saved)
    prefix[:, :both] = value[:, :both]
    return torch.cat([prefix, patches.to(prefix.device, prefix.dtype)], dim=1)
