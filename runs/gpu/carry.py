"""A folder to carry to a machine without a network: packages that an image with PyTorch may lack, and packed rows.

The standard library alone: it runs before the packages are there.
"""

import contextlib
import importlib
import importlib.metadata
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEBIBYTE = 2**20
MOST_CARRIED, MOST_UNPACKED = 60, 1024  # MiB
ARCHIVE, WHEELS, MANIFEST = "rows.tar.xz", "wheels", "manifest.json"
# Rows are 16-bit numbers: whether a byte is the first or the second of one tells more than the byte before it.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 2, "lp": 1, "pb": 1}]
PACKAGES = (
    *("tyro", "docstring-parser", "typeguard", "rustbpe", "tiktoken", "regex", "safetensors", "psutil"),
    *("rich", "markdown-it-py", "mdurl", "pygments", "timm", "pytest", "pluggy", "iniconfig", "hypothesis"),
    *("sortedcontainers", "pyyaml"),
)


class Problem(Exception):
    """Something the user can mend; the message says how."""


def requirement(name: str) -> tuple[str, tuple[int, ...]]:
    """What pip is asked for, and the least version, from requirements.txt; the name alone where that has none."""
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        words = line.split("#")[0].strip()
        if found := re.match(rf"{name}(?:[=>]=([\d.]+))", words, re.IGNORECASE):
            return words, version_of(found[1])
    return name, ()


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def pack(folder: Path, rows: Path | None, python: str) -> None:
    """Make the folder: wheels for Linux on x86-64, and the rows. Raises Problem if that is impossible or too large."""
    if folder.exists():
        raise Problem(f"--pack {folder}: it is there already; delete it, or choose another folder")
    if rows is not None and not (rows / MANIFEST).is_file():
        raise Problem(f"--data {rows}: there are no packed rows (no {MANIFEST}); make them by nanochat_gka.pack")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        part = Path(temporary) / "part"
        fetch(part / WHEELS, python)
        if rows is not None:
            with lzma.open(part / ARCHIVE, "wb", filters=FILTERS) as file, tarfile.open(fileobj=file, mode="w") as tar:
                tar.add(rows, ".")
        sizes = {path: path.stat().st_size / MEBIBYTE for path in part.rglob("*") if path.is_file()}
        total = sum(sizes.values())
        if total > MOST_CARRIED:
            largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
            names = ", ".join(f"{path.name} {sizes[path]:.1f}" for path in largest)
            raise Problem(f"--pack: {total:.1f} MiB, {MOST_CARRIED} may be carried: {names}; give --data fewer rows")
        part.rename(folder)
    print(f"{folder}: {len(sizes)} files, {total:.1f} MiB")


def fetch(folder: Path, python: str) -> None:
    """Download the wheels for this Python on Linux. Raises Problem if pip cannot."""
    platforms = [f"--platform=manylinux{name}_x86_64" for name in ("_2_28", "_2_17", "2014")]
    words = ["--quiet", "--no-deps", "--only-binary=:all:", *platforms, f"--python-version={python}"]
    words += ["--dest", str(folder), *(requirement(name)[0] for name in PACKAGES)]
    if reason := pip("download", *words):
        raise Problem(f"--pack: the packages could not be fetched: {reason}")


def pip(*words: str) -> str | None:
    """Run pip. Returns the last line of its error, None if there is none."""
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1] if done.returncode else None


def install(carried: Path, site: Path) -> None:
    """Install the carried packages that are missing here, or older than the project needs, into `site`."""
    missing = []
    for wheel in sorted((carried / WHEELS).glob("*.whl")):
        name = wheel.name.split("-")[0].replace("_", "-").lower()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if version_of(importlib.metadata.version(name)) >= requirement(name)[1]:
                continue
        missing.append(str(wheel))
    words = ["install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    if missing and pip(*words, *missing):  # one of them is for another Python
        for wheel in missing:
            if reason := pip(*words, wheel):
                print(f"{Path(wheel).name} was not installed: {reason}")
    importlib.invalidate_caches()


def unpack(carried: Path, folder: Path) -> Path | None:
    """The carried rows in `folder`, unpacked once; None if there are none."""
    if (folder / MANIFEST).is_file() or not (carried / ARCHIVE).is_file():
        return folder if (folder / MANIFEST).is_file() else None
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(carried / ARCHIVE) as archive:
        if sum(member.size for member in archive) > MOST_UNPACKED * MEBIBYTE:
            raise Problem(f"{carried / ARCHIVE} holds more than {MOST_UNPACKED} MiB")
        archive.extractall(part, filter="data")
    part.rename(folder)
    return folder
