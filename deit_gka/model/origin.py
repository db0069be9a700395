"""Metadata of weights: the names of their classes, and the normalisation of their images."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm

from deit_gka.model.checkpoints import about_images, find_checkpoint, is_export
from deit_gka.recipe import Recipe
from trainkit_gka.cli import UserError
from trainkit_gka.files import read_json


@dataclass
class Origin:
    """Metadata of weights; fields that are not recorded are empty."""

    classes: Sequence[str] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def warnings(self, source: str, classes: Sequence[str], recipe: Recipe) -> list[str]:
        """Warnings for a run on images of `classes` that starts from these weights."""
        warnings = []
        if len(self.classes) == len(classes) and not set(self.classes) & set(classes):
            example = f"'{classes[0]}' for '{self.classes[0]}'"
            warnings.append(f"{source} has other names for its classes ({example}); its head is taken in their order")
        for name in ("mean", "std"):
            theirs, ours = getattr(self, name), getattr(recipe, name)
            if theirs and any(abs(one - other) > 1e-3 for one, other in zip(theirs, ours)):
                flag = " ".join([f"--{name}", *(f"{value:g}" for value in theirs)])
                warnings.append(f"{source} saw images with another {name} than this run's {ours}; {flag} keeps it")
        return warnings


def read_origin(source: str) -> Origin:
    """Metadata of the weights that `warm_start.read_weights` reads from `source`.

    Runs, exported folders and the files in them record all of it, timm names the mean and deviation, other files
    nothing.
    """
    path = Path(source).expanduser()
    path = path.parent if _is_of_checkpoint(path) else path
    if path.is_dir() and not is_export(path):
        state = find_checkpoint(path).state
        return _origin(state["classes"], about_images(state))
    exported = path / "config.json" if path.is_dir() else path.parent / "config.json"
    if path.exists():
        config = read_json(exported, "configuration") if exported.exists() else {}
        return _origin(config.get("label_names", ()), config.get("pretrained_cfg", {}))
    known = timm.get_pretrained_cfg(source)
    return _origin((), known.to_dict() if known else {})


def _is_of_checkpoint(file: Path) -> bool:
    """Whether a manifest beside a file lists it; other programs write manifests too."""
    with contextlib.suppress(UserError, OSError):
        return file.is_file() and file.name in read_json(file.parent / "manifest.json", "manifest")
    return False


def _origin(classes: Sequence[str], about: dict[str, Any]) -> Origin:
    return Origin(tuple(classes), tuple(about.get("mean") or ()), tuple(about.get("std") or ()))
