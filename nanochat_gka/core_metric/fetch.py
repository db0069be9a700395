"""Get the bundle: a folder, a zip file, or a download that resumes; the checksums in a zip file find any damage."""

import http.client
import stat
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

from nanochat_gka.core_metric.bundle import MANIFEST, is_inside
from trainkit_gka.cli import Group, MayChange, PassingFault, UserError
from trainkit_gka.distributed import Runtime
from trainkit_gka.files import atomic_folder, locked, sha256
from trainkit_gka.progress import progress_bar

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
FETCHED = "eval_bundle"  # the folder of the bundle that was fetched
TIMEOUT = 30  # seconds without a byte
PAUSES = (1, 2, 4, 8)  # seconds between the attempts
REFUSED, NO_MORE_BYTES = (401, 403, 404), 416  # HTTP statuses; another attempt does not change the first three
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
        name = FETCHED if self.bundle is None else f"bundle-{sha256(self.bundle)[:12]}"
        unpacked, archive = folder / name, self.bundle or folder / f".{name}.zip"
        if (unpacked / MANIFEST).exists():
            return unpacked
        with locked(folder, "unpacking a bundle into"):
            if (unpacked / MANIFEST).exists():  # by another process
                return unpacked
            if unpacked.exists():
                problem = f"{unpacked} is in the way: it is not a CORE bundle (it has no {MANIFEST})"
                raise UserError(f"{problem}; move it away, or choose another --out")
            if self.bundle is None and not archive.exists():
                download(self.bundle_url, archive)
            unpack(archive, unpacked, keep=self.bundle is not None)
        return unpacked

    def open_on_all(self, folder: Path, runtime: Runtime) -> Path:
        """Open it on every process: the first one fetches, the others find the result."""
        runtime.agree(lambda: self.open_bundle(folder) if runtime.is_main else None)
        return self.open_bundle(folder)


def download(url: str, path: Path) -> None:
    """Fetch `url` to `path`, continuing after an interruption."""
    if not url.startswith(("https://", "http://")):
        raise UserError(f"--bundle-url must begin with https:// or http://, got {url}")
    part = path.with_suffix(".part")
    for pause in (*PAUSES, None):
        try:
            _continue(url, part)
            part.replace(path)
            return
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            status = getattr(error, "code", None)
            if status == NO_MORE_BYTES:
                part.unlink()
            if pause is None or status in REFUSED:
                problem = f"could not download {url}: {getattr(error, 'reason', None) or error}"
                advice = "Check the network and run the same command again (it continues where it stopped)"
                by_hand = "or pass --bundle FOLDER (or eval_bundle.zip)"
                raise (UserError if status in REFUSED else PassingFault)(f"{problem}. {advice}, {by_hand}") from None
            time.sleep(pause)


def _continue(url: str, part: Path) -> None:
    """One attempt: append the missing bytes to `part`. Raises OSError if the file is incomplete then."""
    arrived = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={arrived}-"} if arrived else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response, progress_bar() as bar:
        arrived = arrived if response.status == 206 else 0
        length = response.headers.get("Content-Length")
        total = arrived + int(length) if length else None
        task = bar.add_task("CORE bundle", total=total, status="bytes")
        with open(part, "ab" if arrived else "wb") as file:
            while chunk := response.read(2**16):
                file.write(chunk)
                arrived += len(chunk)
                if arrived > MAX_BYTES:
                    part.unlink()
                    raise UserError(f"{url} is larger than {MAX_BYTES:,} bytes, the most that a bundle may have")
                bar.update(task, completed=arrived)
    if total is not None and arrived != total:
        raise OSError(f"{arrived} of {total} bytes arrived")


def unpack(archive: Path, folder: Path, keep: bool) -> None:
    """Unpack the bundle in a zip file to `folder`, which appears once everything is there.

    The bundle is the folder of the zip with core.yaml in it. keep: False deletes the file once it is unpacked, or found
    unusable. Raises UserError, and unpacks nothing, if it is damaged, has no core.yaml, or is unsafe: it has a link, a
    path out of the folder, or too many files or bytes. (zipfile writes no more of a member than the size it states.)
    """
    try:
        with zipfile.ZipFile(archive) as bundle, atomic_folder(folder) as incoming:
            members = [member for member in bundle.infolist() if not member.filename.endswith("/")]
            _check_safe(members, archive.stat().st_size)
            paths = [PurePosixPath(member.filename) for member in members]
            roots = sorted((path.parent for path in paths if path.name == MANIFEST), key=lambda path: len(path.parts))
            for path, member in zip(paths, members):
                if path.is_relative_to(roots[0]):
                    member.filename = str(path.relative_to(roots[0]))
                    bundle.extract(member, incoming)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last: encrypted, unknown method
        if not keep:
            archive.unlink()
        raise UserError(f"{archive} is not a usable zip file of a CORE bundle: {error}") from None
    if not keep:
        archive.unlink()


def _check_safe(members: list[zipfile.ZipInfo], packed_bytes: int) -> None:
    """Raises BadZipFile for members that are not those of a bundle."""
    for member in members:
        if not is_inside(member.filename):
            raise zipfile.BadZipFile(f"{member.filename or 'a file without a name'} leads out of its folder")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise zipfile.BadZipFile(f"{member.filename} is a link")
    size = sum(member.file_size for member in members)
    most = min(MAX_BYTES, max(MAX_RATIO * packed_bytes, 2**20))
    if len(members) > MAX_FILES or size > most:
        limits = f"at most {MAX_FILES:,} files of {most:,} bytes, {MAX_RATIO} times those of the zip file"
        raise zipfile.BadZipFile(f"it has {len(members):,} files of {size:,} bytes, and a bundle has {limits}")
    if not any(PurePosixPath(member.filename).name == MANIFEST for member in members):
        raise zipfile.BadZipFile(f"it has no {MANIFEST}")
