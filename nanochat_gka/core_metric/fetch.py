"""Fetch the bundle, by a download that resumes and is checked, and unpack it."""

import hashlib
import http.client
import re
import stat
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, NoReturn

from nanochat_gka.core_metric.bundle import MANIFEST, is_inside
from trainkit_gka.cli import Group, MayChange, PassingFault, UserError
from trainkit_gka.distributed import Runtime
from trainkit_gka.files import atomic_folder, locked, read_json, sha256, write_json
from trainkit_gka.progress import progress_bar

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
ATTEMPTS, TIMEOUT = 5, 30  # seconds
# What a bundle may be. nanochat's is 162 MB, of text that zip makes a third to a tenth of.
MAX_BYTES, MAX_FILES, MAX_RATIO = 4 * 2**30, 10_000, 100


@dataclass(frozen=True)
class BundleFlags:
    """Where the bundle comes from, for the commands that ask its questions."""

    bundle: MayChange[Annotated[Path | None, Group.DATA]] = None
    """CORE's questions: the folder of the bundle, or eval_bundle.zip. None = fetch it."""
    bundle_url: MayChange[Annotated[str, Group.DATA]] = URL
    """Address to fetch the bundle from."""

    def open_bundle(self, folder: Path) -> Path:
        """The bundle's folder. If need be it is fetched to `folder`/eval_bundle, or unpacked in `folder`.

        Raises UserError or OSError.
        """
        if self.bundle is None:
            return fetch_bundle(folder / "eval_bundle", self.bundle_url)
        if self.bundle.suffix != ".zip":
            return self.bundle
        unpacked = folder / f"bundle-{sha256(self.bundle)[:12]}"
        if not unpacked.exists():
            with locked(folder, "unpacking a bundle into"):
                if not unpacked.exists():
                    unpack(self.bundle, unpacked)
        return unpacked

    def open_on_all(self, folder: Path, runtime: Runtime) -> Path:
        """Open it on every process: the first one fetches, the others find the result."""
        runtime.agree(lambda: self.open_bundle(folder) if runtime.is_main else None)
        return self.open_bundle(folder)


def fetch_bundle(folder: Path, url: str = URL) -> Path:
    """The bundle at `url`, unpacked to `folder`; fetched if it is not there yet.

    Raises PassingFault if the network fails (what has arrived stays, the next call continues), and UserError if the
    server refuses or the file is not a bundle.
    """
    if (folder / MANIFEST).exists():
        return folder
    if not url.startswith(("https://", "http://")):
        raise UserError(f"--bundle-url must begin with https:// or http://, got {url}")
    with locked(folder.parent, "fetching a bundle into"):
        if (folder / MANIFEST).exists():  # another process has fetched it meanwhile
            return folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            problem = f"{folder} is in the way: it is not a CORE bundle (it has no {MANIFEST})"
            raise UserError(f"{problem}; move it away, or choose another --out")
        archive = folder.with_name(f".{folder.name}.zip")
        if not archive.exists():
            download(url, archive)
        try:
            unpack(archive, folder)
        except UserError:
            archive.unlink()  # unusable
            raise
        archive.unlink()
    return folder


def download(url: str, path: Path) -> None:
    """Fetch `url` to `path`, continuing after an interruption as long as the server still has the same file."""
    note, part = path.with_suffix(".json"), path.with_suffix(".part")
    with progress_bar() as bar:
        task = bar.add_task("CORE bundle", total=None, status="bytes")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                _continue(url, part, note, lambda done, total: bar.update(task, completed=done, total=total))
                break
            except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
                refused = isinstance(error, urllib.error.HTTPError) and error.code in (401, 403, 404)
                if attempt == ATTEMPTS or refused:
                    raise (UserError if refused else PassingFault)(
                        f"could not download {url}: {getattr(error, 'reason', None) or error}. Check the network and "
                        "run the same command again (it continues where it stopped), or pass --bundle FOLDER (or "
                        "eval_bundle.zip)"
                    ) from None
                bar.update(task, status=f"attempt {attempt + 1} of {ATTEMPTS}")
                time.sleep(min(2**attempt / 2, 10))
    part.replace(path)
    note.unlink()


def _continue(url: str, part: Path, note: Path, progress) -> None:
    """One attempt: append what is missing to `part`, or start over if the file has changed.

    Raises OSError if it arrives cut or damaged.
    """
    previous = read_json(note, "note of the download") if note.exists() and part.exists() else {}
    arrived = part.stat().st_size if previous.get("etag") else 0
    headers = {"Range": f"bytes={arrived}-", "If-Range": previous["etag"]} if arrived else {}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is missing, or what is here is too long
            if arrived == previous.get("total"):
                return
            part.unlink()
        raise
    with response:
        if response.status != 206:
            arrived = 0
        etag, length = response.headers.get("ETag", ""), response.headers.get("Content-Length")
        total = arrived + int(length) if length else None
        part.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {"etag": "" if etag.startswith("W/") else etag, "total": total})
        with open(part, "ab" if arrived else "wb") as file:
            while chunk := response.read(2**16):
                file.write(chunk)
                arrived += len(chunk)
                if arrived > MAX_BYTES:
                    part.unlink()
                    note.unlink()
                    too_large = f"{url} is larger than {MAX_BYTES:,} bytes, the most that a bundle may have"
                    raise UserError(f"{too_large}; pass --bundle FOLDER (or eval_bundle.zip)")
                progress(arrived, total)
    if total is not None and arrived != total:
        raise OSError(f"{arrived} of {total} bytes arrived")
    # S3 gives the MD5 of a file uploaded in one piece as its ETag.
    if re.fullmatch('"[0-9a-f]{32}"', etag) and hashlib.md5(part.read_bytes()).hexdigest() != etag.strip('"'):
        part.unlink()
        raise OSError("it arrived damaged, its MD5 is not the server's")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the bundle in a zip file to `folder`, which appears once everything is there.

    The bundle is what is beside and below core.yaml. Raises UserError, and leaves nothing, if the file is damaged, has
    no core.yaml, or is not one to unpack (see `_check`).
    """
    try:
        with zipfile.ZipFile(archive) as bundle, atomic_folder(folder) as incoming:
            members = [member for member in bundle.infolist() if not member.is_dir()]
            _check(archive, members)
            paths = {PurePosixPath(member.filename): member for member in members}
            roots = [path.parent for path in paths if path.name == MANIFEST]
            if not roots:
                raise UserError(f"{archive} is not a CORE bundle: it has no {MANIFEST}")
            root = min(roots, key=lambda path: len(path.parts))
            for path, member in paths.items():
                if path.is_relative_to(root):
                    member.filename = str(path.relative_to(root))
                    bundle.extract(member, incoming)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last: encrypted, unknown method
        raise UserError(f"{archive} is not a usable zip file ({error}); fetch it again") from None


def _check(archive: Path, members: list[zipfile.ZipInfo]) -> None:
    """Raises UserError for a member that leads elsewhere, and for more files or bytes than a bundle has.

    zipfile writes no more of a member than the size it states.
    """

    def refuse(reason: str) -> NoReturn:
        raise UserError(f"{archive} is refused: {reason}")

    for member in members:
        if not is_inside(member.filename):
            refuse(f"{member.filename} leads out of its folder")
        if stat.S_ISLNK(member.external_attr >> 16):
            refuse(f"{member.filename} is a link")
    packed, size = archive.stat().st_size, sum(member.file_size for member in members)
    if len(members) > MAX_FILES:
        refuse(f"it has {len(members):,} files, and a bundle at most {MAX_FILES:,}")
    if size > min(MAX_BYTES, max(MAX_RATIO * packed, 2**20)):
        most = f"at most {MAX_RATIO} times as many, and at most {MAX_BYTES:,}"
        refuse(f"{packed} bytes would become {size:,}, and a bundle's become {most}")
