"""Checkpoints that a kill cannot damage: written aside, fsynced and renamed; loading takes the newest intact one.

A checkpoint is a folder `step_00001234` with
    <name>.safetensors   one file per named group of tensors (weights, optimizer state)
    state.json           whatever JSON the trainer needs to continue (configuration travels with the weights)
    manifest.json        sha256 of every other file; written last
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainkit_gka.cli import UserError
from trainkit_gka.files import atomic_folder, read_json, sha256, usual_mode, write_json

Tensors = dict[str, torch.Tensor]
_NAME = re.compile(r"step_(\d{8})")
# Errors of a path that leads nowhere: it is gone, a part of it is a file, or links go round.
ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


@dataclass
class Checkpoint:
    """An intact checkpoint. Its files of tensors are open: a training that deletes the checkpoint does not end that."""

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, Any]  # the opened files of tensors, by the names of their groups

    def tensors(self, name: str, device: torch.device | str = "cpu") -> Tensors:
        """The tensors saved under `name`. Raises UserError if there are none."""
        if name not in self.files:
            raise UserError(f"checkpoint {self.path} has no {name}.safetensors")
        file = self.files[name]
        return {key: file.get_tensor(key).to(device) for key in file.keys()}  # noqa: SIM118 (it is no dict)


def save(
    folder: Path,
    step: int,
    tensors: dict[str, Tensors],
    state: dict[str, Any],
    files: dict[str, Path] | None = None,
    keep: int = 2,
    again: bool = False,
) -> Path:
    """Write checkpoint `step` into `folder` and keep the newest `keep` of those up to it. Returns its folder.

    files: copied into it, by the copy's name. The final name appears only when everything is on disk; a kill at any
    moment leaves the previous checkpoints as they are. again: overwrite an intact checkpoint of this step, which stays
    as it is otherwise. Checkpoints of later steps are deleted: the run has fallen back past them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    final = checkpoint_path(folder, step)
    if not again and final.exists() and find_damage(final) is None:
        return final
    _delete(folder.glob(".tmp-*step_*"))  # of a killed process, of any step
    if os.path.lexists(final) and not final.is_dir():  # a file, or a link that leads nowhere
        _delete([final])
    with atomic_folder(final) as temporary:
        for name, group in tensors.items():
            write_tensors(group, temporary / f"{name}.safetensors")
        for name, source in (files or {}).items():
            shutil.copyfile(source, temporary / name)
        write_json(temporary / "state.json", state)
        write_json(temporary / "manifest.json", {path.name: sha256(path) for path in sorted(temporary.iterdir())})
    newest = [path for path in newest_first(folder) if path <= final][: max(1, keep)]
    _delete(path for path in newest_first(folder) if path not in newest)
    return final


def write_tensors(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of any new file."""
    with usual_mode(path):
        save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, path, metadata)


def fingerprint(tensors: Tensors) -> str:
    """A hash of the names, shapes, dtypes and values, whichever file holds them."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_newest(folder: Path, warn=print) -> Checkpoint | None:
    """The newest intact checkpoint of `folder`, or None if it has no checkpoint.

    A damaged checkpoint is reported through `warn` and skipped. Raises UserError if every checkpoint is damaged.
    """
    while candidates := newest_first(folder):
        for path in candidates:
            try:
                return load(path)
            except (OSError, UserError) as error:
                if not os.path.lexists(path):  # a training has deleted it meanwhile, and saved another
                    break
                if isinstance(error, OSError):
                    raise
                warn(f"warning: {error}; falling back to the one before it")
        else:
            raise UserError(f"every checkpoint in {folder} is damaged; delete the folder to start over")
    return None


def checkpoint_path(folder: Path, step: int) -> Path:
    """The checkpoint of a step in `folder`."""
    return Path(folder) / f"step_{step:08d}"


def run_folder(path: Path) -> Path:
    """The folder of the run that `path` belongs to: itself, or two levels up from a checkpoint.

    The folder of checkpoints may be a link to one of another name.
    """
    places = Path(os.path.abspath(path)), Path(path).resolve()
    runs = [place.parent.parent for place in places if place.parent.name in ("checkpoints", "best")]
    return [*runs, places[1]][0].resolve()


def load(path: Path, verify: bool = True) -> Checkpoint:
    """One checkpoint folder. Raises UserError if it is damaged."""
    path = Path(path)
    damage = find_damage(path) if verify else None
    if damage:
        raise UserError(f"checkpoint {path} is damaged: {damage}")
    match = _NAME.fullmatch(path.name)
    state = read_json(path / "state.json", "checkpoint state")
    try:
        files = {file.stem: safe_open(file, framework="pt") for file in sorted(path.glob("*.safetensors"))}
    except SafetensorError as error:
        raise UserError(f"checkpoint {path} has a file that is not of safetensors ({error})") from None
    return Checkpoint(path, int(match[1]) if match else int(state.get("step", 0)), state, files)


def find_damage(path: Path) -> str | None:
    """The first damage of a checkpoint folder as text; None if every file has its recorded checksum."""
    path = Path(path)
    try:
        manifest = read_json(path / "manifest.json", "manifest")
        present = {file.name for file in path.iterdir() if file.suffix in (".json", ".safetensors")}
        if unlisted := sorted({*present, "state.json"} - {*manifest, "manifest.json"}):
            return f"manifest.json does not list {unlisted[0]}"
        for name, digest in manifest.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if sha256(path / name) != digest:
                return f"{name} does not have its recorded checksum"
    except UserError as error:
        return str(error)
    except OSError as error:  # others, such as of a disk that does not answer, are not the checkpoint's
        if error.errno not in ABSENT:
            raise
        return f"{error.filename}: {error.strerror}"
    return None


def _delete(paths: Iterable[Path]) -> None:
    """Delete folders, files and links, each at once for those who look for its name."""
    for path in paths:
        if not path.name.startswith(".tmp-"):
            path = path.rename(path.with_name(f".tmp-deleted-{path.name}"))
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a folder, intact or not."""
    if not Path(folder).is_dir():
        return []
    return sorted((path for path in Path(folder).iterdir() if _NAME.fullmatch(path.name)), reverse=True)
