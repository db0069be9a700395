"""Folders of exported models: one model each, complete or absent."""

import shutil
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path

from trainkit_gka import onnx
from trainkit_gka.cli import UserError
from trainkit_gka.files import atomic_folder, read_json, sha256, write_json

WEIGHTS, CONFIG, CHECKSUMS = "model.safetensors", "config.json", "checksums.json"


@contextmanager
def export_folder(folder: Path, holds_this_model: Callable[[], bool], files: Iterable[str] = (WEIGHTS, CONFIG)):
    """Yield a folder to write an export into; it becomes `folder`, with checksums of `files`, when the block succeeds.

    ONNX files of an earlier export of this model are deleted, other files in `folder` stay. holds_this_model: called if
    `folder` has an export; whether that is of this model. Raises UserError if it is not, or if `folder` holds something
    else.
    """
    if (folder / CONFIG).exists():
        if not holds_this_model():
            raise UserError(f"{folder} holds another model; choose another --out or delete the folder")
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} is not empty and does not hold an exported model; choose another --out")
    with atomic_folder(folder) as incoming:
        if folder.is_dir():
            shutil.copytree(folder, incoming, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*onnx.FILES))
        yield incoming
        write_json(incoming / CHECKSUMS, {name: sha256(incoming / name) for name in files})


def check_files(folder: Path) -> None:
    """Raises UserError unless the files of an export have their checksums, if these have a file."""
    path = folder / CHECKSUMS
    for name, digest in (read_json(path, "checksums") if path.exists() else {}).items():
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            advice = f"copy or export it again (or delete {CHECKSUMS}, if you changed the file)"
            raise UserError(f"{folder / name} is missing or damaged, by its checksum; {advice}")
