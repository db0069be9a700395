"""Get the bundle: a folder, a zip file, or a download that resumes and is checked."""

import hashlib
import http.client
import re
import stat
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

from nanochat_gka.core_metric.bundle import MANIFEST, is_inside
from trainkit_gka.cli import Group, MayChange, PassingFault, UserError
from trainkit_gka.distributed import Runtime
from trainkit_gka.files import atomic_folder, locked, sha256
from trainkit_gka.progress import progress_bar

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
ATTEMPTS, TIMEOUT = 5, 30  # seconds
REFUSED = (401, 403, 404)  # HTTP statuses that another attempt does not change
# Limits of a bundle. nanochat's is 162 MB, of text that zip makes a third to a tenth of.
MAX_BYTES, MAX_FILES, MAX_RATIO = 4 * 2**30, 10_000, 100


@dataclass(frozen=True)
class BundleFlags:
    """Where the bundle comes from, for the commands that ask its questions."""

    bundle: MayChange[Annotated[Path | None, Group.DATA]] = None
    """CORE's questions: the folder of the bundle, or eval_bundle.zip. None = fetch it."""
    bundle_url: MayChange[Annotated[str, Group.DATA]] = URL
    """Address to fetch the bundle from."""

    def open_bundle(self, folder: Path) -> Path:
        """The bundle's folder; a zip file or a download is unpacked in `folder`, once.

        Raises PassingFault if the network fails (what has arrived stays, the next call continues), UserError if the
        server refuses or the file is not a bundle, and OSError.
        """
        if self.bundle is not None and self.bundle.suffix != ".zip":
            return self.bundle
        name = "eval_bundle" if self.bundle is None else f"bundle-{sha256(self.bundle)[:12]}"
        unpacked, archive = folder / name, self.bundle or folder / f".{name}.zip"
        if (unpacked / MANIFEST).exists():
            return unpacked
        with locked(folder, "unpacking a bundle into"):
            if (unpacked / MANIFEST).exists():  # by another process
                return unpacked
            if unpacked.exists() and (not unpacked.is_dir() or any(unpacked.iterdir())):
                problem = f"{unpacked} is in the way: it is not a CORE bundle (it has no {MANIFEST})"
                raise UserError(f"{problem}; move it away, or choose another --out")
            if self.bundle is None and not archive.exists():
                download(self.bundle_url, archive)
            try:
                unpack(archive, unpacked)
            except UserError:
                if self.bundle is None:
                    archive.unlink()
                raise
            if self.bundle is None:
                archive.unlink()
        return unpacked

    def open_on_all(self, folder: Path, runtime: Runtime) -> Path:
        """Open it on every process: the first one fetches, the others find the result."""
        runtime.agree(lambda: self.open_bundle(folder) if runtime.is_main else None)
        return self.open_bundle(folder)


def download(url: str, path: Path) -> None:
    """Fetch `url` to `path`, continuing after an interruption as long as the server still has the same file."""
    if not url.startswith(("https://", "http://")):
        raise UserError(f"--bundle-url must begin with https:// or http://, got {url}")
    part = path.with_suffix(".part")
    with progress_bar() as bar:
        task = bar.add_task("CORE bundle", total=None, status="bytes")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                _continue(url, part, lambda done, total: bar.update(task, completed=done, total=total))
                break
            except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
                refused = isinstance(error, urllib.error.HTTPError) and error.code in REFUSED
                if attempt == ATTEMPTS or refused:
                    raise (UserError if refused else PassingFault)(
                        f"could not download {url}: {getattr(error, 'reason', None) or error}. Check the network and "
                        "run the same command again (it continues where it stopped), or pass --bundle FOLDER (or "
                        "eval_bundle.zip)"
                    ) from None
                bar.update(task, status=f"attempt {attempt + 1} of {ATTEMPTS}")
                time.sleep(min(2**attempt / 2, 10))
    part.replace(path)
    part.with_suffix(".etag").unlink(missing_ok=True)


def _continue(url: str, part: Path, progress: Callable[[int, int | None], None]) -> None:
    """One attempt: append the missing bytes to `part`, or start over if the server's file has changed.

    Raises OSError if the file arrives incomplete or damaged.
    """
    note = part.with_suffix(".etag")
    arrived = part.stat().st_size if part.exists() and note.exists() else 0
    headers = {"Range": f"bytes={arrived}-", "If-Range": note.read_text()} if arrived else {}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # there are no more bytes: start over
            part.unlink()
        raise
    with response:
        arrived = arrived if response.status == 206 else 0
        etag, length = response.headers.get("ETag", ""), response.headers.get("Content-Length")
        total = arrived + int(length) if length else None
        part.parent.mkdir(parents=True, exist_ok=True)
        note.unlink(missing_ok=True)
        if etag and not etag.startswith("W/"):
            note.write_text(etag)
        with open(part, "ab" if arrived else "wb") as file:
            while chunk := response.read(2**16):
                file.write(chunk)
                arrived += len(chunk)
                if arrived > MAX_BYTES:
                    part.unlink()
                    raise UserError(f"{url} is larger than {MAX_BYTES:,} bytes, the most that a bundle may have")
                progress(arrived, total)
    if total is not None and arrived != total:
        raise OSError(f"{arrived} of {total} bytes arrived")
    # S3 gives the MD5 of a file uploaded in one piece as its ETag.
    if re.fullmatch('"[0-9a-f]{32}"', etag) and hashlib.md5(part.read_bytes()).hexdigest() != etag.strip('"'):
        part.unlink()
        raise OSError("it arrived damaged, its MD5 is not the server's")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the bundle in a zip file to `folder`, which appears once everything is there.

    The bundle is the folder of the zip with core.yaml in it. Raises UserError, and leaves nothing, if the file is
    damaged, has no core.yaml, or is unsafe to unpack: a member that is a link or leads out of the folder, or more files
    or bytes than a bundle has. (zipfile writes no more of a member than the size it states.)
    """
    try:
        with zipfile.ZipFile(archive) as bundle, atomic_folder(folder) as incoming:
            members = [member for member in bundle.infolist() if not member.is_dir()]
            if reason := _unsafe(members, archive.stat().st_size):
                raise UserError(f"{archive} is refused: {reason}")
            roots = [path.parent for path in (PurePosixPath(m.filename) for m in members) if path.name == MANIFEST]
            if not roots:
                raise UserError(f"{archive} is not a CORE bundle: it has no {MANIFEST}")
            root = min(roots, key=lambda path: len(path.parts))
            for member in members:
                path = PurePosixPath(member.filename)
                if path.is_relative_to(root):
                    member.filename = str(path.relative_to(root))
                    bundle.extract(member, incoming)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last: encrypted, unknown method
        raise UserError(f"{archive} is not a usable zip file ({error}); fetch it again") from None


def _unsafe(members: list[zipfile.ZipInfo], packed_bytes: int) -> str:
    """Why the members of a zip file are not unpacked; empty if they are."""
    for member in members:
        if not is_inside(member.filename):
            return f"{member.filename} leads out of its folder"
        if stat.S_ISLNK(member.external_attr >> 16):
            return f"{member.filename} is a link"
    if len(members) > MAX_FILES:
        return f"it has {len(members):,} files, and a bundle at most {MAX_FILES:,}"
    size = sum(member.file_size for member in members)
    if size > min(MAX_BYTES, max(MAX_RATIO * packed_bytes, 2**20)):
        most = f"at most {MAX_RATIO} times as many, and at most {MAX_BYTES:,}"
        return f"{packed_bytes} bytes would become {size:,}, and a bundle's become {most}"
    return ""
