"""Checkpoints that a kill cannot damage: written aside, fsynced and renamed; loading takes the newest intact one.

A checkpoint is a folder `step_00001234` with
    <name>.safetensors   one file per named group of tensors (weights, optimizer state)
    state.json           whatever JSON the trainer needs to continue (configuration travels with the weights)
    manifest.json        sha256 of every other file; written last
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainkit_gka.cli import UserError
from trainkit_gka.files import atomic_folder, read_json, sha256, usual_mode, write_json

Tensors = dict[str, torch.Tensor]
_NAME = re.compile(r"step_(\d{8})")


@dataclass
class Checkpoint:
    """An intact checkpoint on disk; tensors are read when asked for."""

    path: Path
    step: int
    state: dict[str, Any]

    def tensors(self, name: str, device: torch.device | str = "cpu") -> Tensors:
        """The tensors saved under `name`."""
        return load_file(self.path / f"{name}.safetensors", device=str(device))


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
    final = folder / f"step_{step:08d}"
    if not again and final.exists() and find_damage(final) is None:
        return final
    _delete(folder.glob(".tmp-*step_*"))  # of a killed process, of any step
    with atomic_folder(final) as temporary:
        for name, group in tensors.items():
            write_tensors(group, temporary / f"{name}.safetensors")
        for name, source in (files or {}).items():
            shutil.copyfile(source, temporary / name)
        write_json(temporary / "state.json", state)
        write_json(temporary / "manifest.json", {path.name: sha256(path) for path in sorted(temporary.iterdir())})
    newest = [path for path in _newest_first(folder) if path <= final][: max(1, keep)]
    _delete(path for path in _newest_first(folder) if path not in newest)
    return final


def write_tensors(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of any new file. Raises OSError if the disk is full."""
    try:
        with usual_mode(path):
            save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, path, metadata)
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        raise


def file_bytes(tensors: Tensors) -> int:
    """The size of the file that `write_tensors` makes of `tensors`, up to some bytes of its header."""
    header = {name: {"dtype": "F32", "shape": [*t.shape], "data_offsets": [10**9] * 2} for name, t in tensors.items()}
    return sum(tensor.nbytes for tensor in tensors.values()) + len(json.dumps(header, separators=(",", ":")))


def load_newest(folder: Path, warn=print) -> Checkpoint | None:
    """The newest intact checkpoint of `folder`, or None if it has no checkpoint.

    A damaged checkpoint is reported through `warn` and skipped. Raises UserError if every checkpoint is damaged.
    """
    candidates = _newest_first(folder)
    for path in candidates:
        damage = find_damage(path)
        if damage is None:
            return load(path, verify=False)
        warn(f"checkpoint {path} is damaged ({damage}); falling back to the one before it")
    if candidates:
        raise UserError(f"every checkpoint in {folder} is damaged; delete the folder to start over")
    return None


def load(path: Path, verify: bool = True) -> Checkpoint:
    """One checkpoint folder. Raises UserError if it is damaged."""
    path = Path(path)
    damage = find_damage(path) if verify else None
    if damage:
        raise UserError(f"checkpoint {path} is damaged: {damage}")
    match = _NAME.fullmatch(path.name)
    state = read_json(path / "state.json", "checkpoint state")
    return Checkpoint(path, int(match[1]) if match else int(state.get("step", 0)), state)


def find_damage(path: Path) -> str | None:
    """The first damage of a checkpoint folder as text; None if every file has its recorded checksum."""
    try:
        manifest = read_json(Path(path) / "manifest.json", "manifest")
    except UserError as error:
        return str(error)
    if "state.json" not in manifest:
        return "manifest.json does not list the files"
    for name, digest in manifest.items():
        file = Path(path) / name
        if not file.is_file():
            return f"{name} is missing"
        if sha256(file) != digest:
            return f"{name} does not have its recorded checksum"
    return None


def _delete(folders: Iterable[Path]) -> None:
    for path in folders:
        shutil.rmtree(path)


def _newest_first(folder: Path) -> list[Path]:
    if not Path(folder).is_dir():
        return []
    return sorted((path for path in Path(folder).iterdir() if _NAME.fullmatch(path.name)), reverse=True)
