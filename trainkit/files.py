"""Files that are either whole or absent: atomic writes, checksums, one writer at a time."""

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from trainkit.cli import UserError


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def fsync(path: Path) -> None:
    """Push a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic(path: Path):
    """Yield a temporary path beside `path`; when the block succeeds it is fsynced and renamed, when it fails nothing is left."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path):
    """Yield an empty folder beside `path`; when the block succeeds it is fsynced and renamed, when it fails nothing is left.

    A folder that is at `path` stays whole until then, and is deleted after. One process at a time may write to `path`.
    """
    path = Path(path).resolve()
    temporary, replaced = (path.with_name(f".tmp-{prefix}{path.name}") for prefix in ("", "replaced-"))
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            fsync(written)
        shutil.rmtree(replaced, ignore_errors=True)
        if path.exists():
            os.replace(path, replaced)
        os.replace(temporary, path)
        fsync(path.parent)
    finally:
        for left in (temporary, replaced):
            shutil.rmtree(left, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON file that holds an object; UserError naming `what` and the path if it is absent or anything else."""
    try:
        value = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"{what} not found: {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{what} is not valid JSON: {path} ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{what} is not a JSON object: {path}")
    return value


def remove_stale_temporaries(folder: Path) -> None:
    """Delete what a killed writer left behind. Call it while holding the folder's lock."""
    for leftover in Path(folder).glob(".tmp-*"):
        if leftover.is_file():
            leftover.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, doing: str):
    """Hold the folder for one process. UserError if another one has it; the lock dies with the process, however that ends."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"another process is {doing} {folder}; wait for it or choose another folder") from None
    try:
        yield
    finally:
        lock.release()
