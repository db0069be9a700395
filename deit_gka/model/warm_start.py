"""Training that starts from weights: where they come from, what of them fits another head, image size, patch or attention, and saying so.

What has the same name and shape is taken: of a softmax ViT for GKA that is everything but the bandwidths, which softmax
has not. Positions and the patch embedding are resized; VLT takes queries and keys out of softmax's qkv; all else is left
at its initialisation, and named.
"""

import contextlib
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import load_state_dict
from torch import nn

from deit_gka.model.checkpoints import WEIGHTS, find_checkpoint, timm_weights
from trainkit.cli import UserError

Tensors = dict[str, torch.Tensor]
LEAST_SHARE = 0.5  # of the parameters outside the head
SOURCES = "a file of weights, a run or exported folder, or the name of a timm model that has weights"


@dataclass
class WarmStart:
    """Which tensors of a model were taken from elsewhere."""

    share: float  # of the parameters
    taken: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)  # left at their initialisation
    unused: list[str] = field(default_factory=list)  # of the weights that were given

    def __str__(self) -> str:
        parts = [
            f"{len(self.taken)} tensors as they are ({math.floor(1000 * self.share) / 10}% of the parameters, with those resized)"
        ]
        for what, names in (
            ("resized", self.resized),
            ("left at their initialisation", self.new),
            ("not used", self.unused),
        ):
            parts += [f"{what}: {shortened(names)}"] if names else []
        return "; ".join(parts)


def shortened(names: Iterable[str]) -> str:
    """["blocks.0.x", "blocks.1.x", "head"] as "blocks.*.x (2), head"."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    shown = [name + (f" ({count})" if count > 1 else "") for name, count in counts.items()]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def read_weights(source: str) -> Tensors:
    """The tensors called `source`: a .safetensors or .pth file (DeiT's own too; nothing is unpickled), one of our runs (its average, or else its raw
    weights) or exported folders, or what timm has for a name. Raises UserError."""
    path = Path(source).expanduser()
    if path.is_dir():
        exported = path / "model.safetensors"
        if (path / "checkpoints").exists() or (path / "manifest.json").exists() or not exported.exists():
            found = find_checkpoint(path)
            return found.tensors(
                next(weights for weights in WEIGHTS if (found.path / f"{weights}.safetensors").exists())
            )
        path = exported
    if path.is_file():
        return _read_file(path)
    if not timm.is_model(source):
        raise UserError(f"--initial-weights {source} is not there; it is {SOURCES}")
    return timm_weights(source, "--initial-weights").state_dict()


def _read_file(path: Path) -> Tensors:
    try:
        weights = load_state_dict(str(path), use_ema=True, weights_only=True)
    except Exception as error:  # torch and safetensors raise many kinds for files that are not theirs
        raise UserError(f"{path} does not hold weights: {' '.join(str(error).split())[:200]}") from None
    weights = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    if not weights:
        raise UserError(f"{path} does not hold weights: it has no named tensors")
    return weights


def fingerprint(weights: Tensors) -> str:
    """A hash of the names, shapes and values, whichever file holds them."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_same(source: str, had: dict[str, str] | None, folder: Path) -> None:
    """Raises UserError unless a resumed run was given the weights it started from, {"from", "hash"}.

    They may have moved, and need not be there any more.
    """
    if not source and had is None:
        return
    same = source and had and source == had["from"] and not Path(source).is_file()
    if source and had and not same:
        with contextlib.suppress(UserError):
            same = fingerprint(read_weights(source)) == had["hash"]
    if not same:
        raise UserError(f"--initial-weights is {source or 'not given'} but the run in {folder} started from "
                        f"{had['from'] + ' as it was then' if had else 'no weights'}; give the same, or another --model-tag")  # fmt: skip


@torch.no_grad()
def warm_start(model: nn.Module, weights: Tensors, source: str) -> WarmStart:
    """Copy what fits of `weights` into `model`, on its device. Raises UserError if that is less than half of what is not the head, or not finite."""
    state = model.state_dict()
    weights = _with_queries_and_keys(weights, state)
    done = WarmStart(0.0)
    for name, target in state.items():
        value = weights.get(name)
        fitted = None if value is None else value if value.shape == target.shape else _resized(name, value, model)
        if fitted is None:
            done.new.append(name)
            continue
        if fitted.is_floating_point() and not fitted.isfinite().all():
            raise UserError(f"{source} holds weights that are not finite, {name} is the first; give others")
        (done.taken if fitted is value else done.resized).append(name)
        target.copy_(fitted)
    done.unused = [name for name in weights if name not in state]
    parameters, heads = dict(model.named_parameters()), set(_head(model))
    here = set(done.taken + done.resized)
    done.share = _count(parameters, here) / _count(parameters, parameters)
    trunk = parameters.keys() - heads
    if _count(parameters, here & trunk) < LEAST_SHARE * _count(parameters, trunk):
        differing = next((f"; {name} is {tuple(weights[name].shape)} there and {tuple(state[name].shape)} here" for name in done.new
                          if name in weights and name not in heads), "")  # fmt: skip
        raise UserError(f"{source} has only {len(here)} of this model's {len(state)} tensors, {done.share:.0%} of its parameters{differing}; "
                        "give weights of a model of the same width and kind")  # fmt: skip
    return done


def _count(parameters: dict[str, nn.Parameter], names: Iterable[str]) -> int:
    return sum(parameters[name].numel() for name in names if name in parameters)


def _head(model: nn.Module) -> list[str]:
    """Names of the classifiers' parameters."""
    classifiers = model.get_classifier() if hasattr(model, "get_classifier") else ()
    own = {
        id(parameter)
        for head in (classifiers if isinstance(classifiers, tuple) else (classifiers,))
        for parameter in head.parameters()
    }
    return [name for name, parameter in model.named_parameters() if id(parameter) in own]


def _with_queries_and_keys(weights: Tensors, state: Tensors) -> Tensors:
    """`weights` with the queries and keys of softmax's qkv, the first two of its three parts, under the names VLT has for them."""
    found = dict(weights)
    for name in [name for name in state if ".qk." in name and name not in weights]:
        whole = weights.get(name.replace(".qk.", ".qkv."))
        if whole is not None and 2 * whole.shape[0] == 3 * state[name].shape[0]:
            found[name], found[name.replace(".qk.", ".qkv[values].")] = (
                whole[: state[name].shape[0]],
                whole[state[name].shape[0] :],
            )
            del found[name.replace(".qk.", ".qkv.")]
    return found


def _resized(name: str, value: torch.Tensor, model: nn.Module) -> torch.Tensor | None:
    """Positions or patch embedding for another image size or patch, bicubic as in timm; None for what cannot be resized."""
    target = model.state_dict()[name]
    if value.ndim != target.ndim:
        return None
    if name == "patch_embed.proj.weight" and value.shape[:2] == target.shape[:2]:
        return resample_patch_embed(value.float(), list(target.shape[-2:]))
    if name != "pos_embed" or value.shape[-1] != target.shape[-1]:
        return None
    here = target.shape[1] - math.prod(model.patch_embed.grid_size)  # tokens that are not patches and have a position
    squares = (
        count
        for count in (here, 1, 2, 0)
        if value.shape[1] > count and math.isqrt(value.shape[1] - count) ** 2 == value.shape[1] - count
    )
    there = next(squares, None)
    if there is None:  # not a square grid
        return None
    side = math.isqrt(value.shape[1] - there)
    patches = resample_abs_pos_embed(
        value[:, there:].float(), list(model.patch_embed.grid_size), [side, side], num_prefix_tokens=0
    )
    prefix = target[:, :here].clone()  # a distillation token that the weights do not have keeps its start
    prefix[:, : min(here, there)] = value[:, : min(here, there)]
    return torch.cat([prefix, patches.to(prefix.device, prefix.dtype)], dim=1)
