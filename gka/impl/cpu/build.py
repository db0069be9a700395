"""The compiled kernel: taken from the user's cache folder, or built into it by the system's compiler at the first use.

The file's name is a hash of source and flags, with the instruction set, which is named, never "native": a home folder
that machines share serves each of them, also those without a compiler. A folder that another user owns or may write to
is not used, nor one that is missing or read-only: each process then compiles into a temporary one.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from gka.impl.cpu import structs
from gka.request import TURNED_OFF

SWITCH = "GKA_CPU_KERNEL"  # 0 turns the kernel off
FOLDER = "GKA_CACHE_DIR"  # where it is kept
SOURCE = Path(__file__).with_name("source")
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off", "-w")
INSTRUCTIONS = {"AVX512": ("-mavx512f", "-mavx512dq", "-mavx2", "-mfma"), "AVX2": ("-mavx2", "-mfma")}
TIMEOUT = 600  # seconds of compiling
LOG = logging.getLogger("gka")

_lock = threading.Lock()
_outcome: ctypes.CDLL | str | None = None  # the library, or why it is missing; None: not asked for yet


def _renew_lock() -> None:
    """In a forked child: a thread that it does not have may have held the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on every system
    os.register_at_fork(after_in_child=_renew_lock)


class Unavailable(Exception):
    """Why the library is missing, in one line or, if the compiler said more, in several."""


def obstacle() -> str | None:
    """Why the library is missing, or None. The first call loads or builds it, also while torch.compile traces.

    Raises RuntimeError if the struct has another size in the library than in structs.py.
    """
    global _outcome
    with _lock:
        if _outcome is None:
            try:
                loaded = _load()
            except Unavailable as error:
                _outcome = str(error)
                return _outcome
            if (size := loaded.gka_size_of_GkaRequest()) != structs.SIZE:
                raise RuntimeError(f"GkaRequest has {size} bytes in the library and {structs.SIZE} bytes in structs.py")
            _outcome = loaded
    return _outcome if isinstance(_outcome, str) else None


# torch.compile calls it while it traces and keeps the answer, as torch.compiler.assume_constant_result would have it,
# which imports all of torch._dynamo.
obstacle._dynamo_marked_constant = True  # type: ignore[attr-defined]


def library() -> ctypes.CDLL:
    """The loaded library; RuntimeError where there is none."""
    if reason := obstacle():
        raise RuntimeError(f"the CPU kernel is unavailable: {reason}")
    assert isinstance(_outcome, ctypes.CDLL)
    return _outcome


def _load() -> ctypes.CDLL:
    """The library from the cache, built first if it is not there. Raises Unavailable."""
    if os.environ.get(SWITCH) == "0":
        raise Unavailable(f"{TURNED_OFF} by {SWITCH}=0")
    if sys.platform != "linux":
        raise Unavailable(f"the CPU kernel is built on Linux, this is {sys.platform}")
    instructions = torch.backends.cpu.get_cpu_capability()
    if platform.machine() != "x86_64" or instructions not in INSTRUCTIONS:
        raise Unavailable(f"the CPU kernel needs AVX-512 or AVX2, torch reports {instructions} ({platform.machine()})")
    try:
        folder = cache_folder()
        folder.mkdir(0o700, parents=True, exist_ok=True)
        status = folder.stat()  # a library in it is run
        if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return ctypes.CDLL(str(_built(instructions, folder)))
        reason = f"another user owns or may write to {folder}"
    except (OSError, RuntimeError) as error:  # no folder, or one to which nothing is written or from which nothing runs
        reason = str(error).rstrip(".")
    LOG.warning("gka: the CPU kernel is compiled for this process: %s; %s chooses another folder", reason, FOLDER)
    try:
        with tempfile.TemporaryDirectory(prefix="gka-") as temporary:  # the library stays loaded
            return ctypes.CDLL(str(_built(instructions, Path(temporary))))
    except OSError as error:
        raise Unavailable(f"{str(error).rstrip('.')}; {FOLDER} chooses another folder") from None


def cache_folder() -> Path:
    """$GKA_CACHE_DIR, or gka in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get(FOLDER):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gka"


def _built(instructions: str, folder: Path) -> Path:
    """Path of the library in `folder`. Raises Unavailable if the compiler is missing or fails, OSError for a folder."""
    import fcntl  # not on every system

    flags = (*FLAGS, *INSTRUCTIONS[instructions])
    end = _digest(flags).encode()
    path = folder / f"gka-{instructions.lower()}-{end.decode()}.so"
    if not path.exists():
        command = [*_compiler(), *flags]
        with open(folder / "lock", "wb") as lock:
            with contextlib.suppress(OSError):  # of file systems without locks, where several processes may build
                fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it if this process dies
                for abandoned in folder.glob("building-*"):  # by a killed process: nobody else builds here now
                    shutil.rmtree(abandoned, ignore_errors=True)
            if not path.exists():
                LOG.warning("gka: compiling the CPU kernel, once, for a few seconds: %s", path)
                _compile(command, path, end)
    if not path.read_bytes().endswith(end):  # loading a library that was cut short ends the process
        raise Unavailable(f"{path} is damaged; remove it")
    return path


def _compile(command: list[str], path: Path, end: bytes) -> None:
    """Write the library to `path`, followed by `end`; it appears there when it is complete."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as scratch:
        output, sources = Path(scratch) / path.name, sorted(SOURCE.glob("*.cpp"))
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        _run([[*command, "-c", str(cpp), "-o", o] for cpp, o in zip(sources, objects)], TIMEOUT)
        _run([[*command, *objects, "-o", str(output)]], TIMEOUT)
        with open(output, "ab") as file:
            file.write(end)
        output.chmod(0o755)  # whatever the umask is
        os.replace(output, path)


def _compiler() -> list[str]:
    """$CXX with its arguments, or the first compiler that is installed."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise Unavailable(f"CXX={os.environ['CXX']} is not a command: {error}") from None
    for words in [chosen] if chosen else [[name] for name in COMPILERS]:
        if path := shutil.which(words[0]):
            return [path, *words[1:]]
    if chosen:
        raise Unavailable(f"CXX={os.environ['CXX']} names a compiler that is not there, {chosen[0]}")
    raise Unavailable(f"no C++ compiler was found (CXX, {', '.join(COMPILERS)}); install one, such as g++")


def _digest(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _run(commands: list[list[str]], seconds: float) -> None:
    """Run the commands at the same time.

    Raises Unavailable, with its error, if one fails or takes longer; then the others are ended.
    """
    pipes: dict[str, Any] = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as running:
        try:
            processes = [running.enter_context(_Ended(words, **pipes, start_new_session=True)) for words in commands]
            for process in processes:
                _, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
                if code := process.returncode:
                    raise Unavailable(f"{commands[0][0]} failed with exit code {code}: {_first_error(errors)}")
        except OSError as error:
            raise Unavailable(f"the compiler did not run: {error}") from None
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{commands[0][0]} did not finish in {seconds} seconds") from None


def _first_error(errors: str) -> str:
    """The compiler's output with the line that names the error first: it may be all that is logged."""
    lines = errors.strip().splitlines() or ["it said nothing"]
    first = next((line for line in lines if "error" in line), lines[0])
    return first if len(lines) == 1 else "\n".join([first, *lines])


class _Ended(subprocess.Popen):
    """A process that does not outlive its `with`, nor do its children: what is called may be a script."""

    def __exit__(self, *error):
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        super().__exit__(*error)
