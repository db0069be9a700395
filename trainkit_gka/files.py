"""Files that are either whole or absent: atomic writes, checksums, one writer at a time."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit_gka.cli import UserError

# Errors of locking a file on a disk that has no locks: NFS, FUSE, BeeGFS, or Lustre mounted without them.
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def check_named(folder: Path, default: Path, holds: str) -> None:
    """Raises UserError if `folder` does not exist, unless it is the default one.

    holds: for the message: what the folder should contain.
    """
    if folder != default and not folder.is_dir():
        raise UserError(f"there is no folder {folder}; name one with {holds}")


def check_writable(path: Path) -> None:
    """Raises OSError, naming the place, if a file at `path` cannot be written or made; nothing is written."""
    place = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    code = 0 if os.access(place, os.W_OK) else errno.EACCES
    if place.is_dir() == (place == path.absolute()):
        code = errno.EISDIR if place.is_dir() else errno.ENOTDIR
    if code:
        raise OSError(code, os.strerror(code), str(place))


def fsync(path: Path) -> None:
    """Push a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic(path: Path):
    """Yield a temporary path beside `path` for a file.

    When the block succeeds the file is fsynced and renamed to `path`, when it fails nothing is left.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by process id: processes of several machines may have the same.
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path):
    """Yield an empty folder beside `path`.

    When the block succeeds the folder is fsynced and renamed to `path`, when it fails nothing is left. An existing
    folder at `path` stays until then; after a kill between the two renames the next call restores it. Only one process
    at a time may write to `path`.
    """
    path = Path(path).resolve()
    temporary, replaced = (path.with_name(f".tmp-{prefix}{path.name}") for prefix in ("", "replaced-"))
    _put_back(replaced, path)
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            fsync(written)
        if path.exists():
            os.replace(path, replaced)
        os.replace(temporary, path)
        fsync(path.parent)
    finally:
        _put_back(replaced, path)
        shutil.rmtree(temporary, ignore_errors=True)


def _put_back(replaced: Path, path: Path) -> None:
    if replaced.exists() and not path.exists():
        os.replace(replaced, path)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def usual_mode(path: Path):
    """Give the file that the block writes the mode of any new file; safetensors 0.8 lets only the owner read it."""
    path.touch()
    mode = path.stat().st_mode
    yield
    path.chmod(mode)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with atomic(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)  # not json.dumps: the string of a large list takes several times its memory
        file.write("\n")


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises UserError with `name`, the kind of file, if that fails."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{name} not found: {path}") from None
    except ValueError as error:
        raise UserError(f"{name} is not valid JSON: {path} ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{name} is not a JSON object: {path}")
    return value


def remove_stale_temporaries(folder: Path) -> None:
    """Delete the temporary files of a killed writer. Call it while holding the folder's lock."""
    for leftover in Path(folder).glob(".tmp-*"):
        if leftover.is_file():
            leftover.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, doing: str):
    """Lock the folder for this process. Raises UserError if another process has it locked.

    The lock ends with the process, however that ends. On a disk without locks a warning takes its place. doing: for the
    message, such as "training in".
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            problem = f"another process is {doing} {folder}"
            raise UserError(f"{problem}; wait for it or choose another folder") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise OSError(error.errno, error.strerror, lock.name) from None
            alone = f"let no other process be {doing} it at a time"
            print(f"warning: no file locks in {folder} ({error.strerror}); {alone}", file=sys.stderr)
        yield
