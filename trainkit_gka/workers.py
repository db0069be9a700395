"""Worker processes, forked from a server process without threads, never from the process that uses them.

A process with threads must not fork: the child inherits every lock as it is at that moment, without the thread that
would release it. Until Python 3.12 the interpreter's list of threads has such a lock, which threads of gloo and of
autograd take at any time, so a forked child could hang before its first line.
"""

import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from pathlib import Path

from trainkit_gka import signals
from trainkit_gka.cli import UserError

BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# Where Linux mounts control groups, and the file that lists those of this process.
GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LIMITS = {  # the files of a control group that hold a limit, in its versions 2 and 1
    "cpu": (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]),
    "memory": (["memory.max"], ["memory.limit_in_bytes"]),
}
SHARED_MEMORY = "/dev/shm"  # where Linux has semaphores and the memory that processes share
SHORT, LONGEST = "/tmp", 75  # bytes of a folder in which multiprocessing can make a socket
# Without these variables, importing numpy and pyarrow starts threads.
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

# The tracker removes the semaphores of a process that had to end at once, and would print two lines of them.
QUIET = "ignore:resource_tracker"


def cores(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """The number of cores that this process may use: those it may run on, or a container's quota, rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.ceil(quota / period) for quota, period in _limits("cpu", groups, membership)]
    return max(1, min([allowed, *quotas]))


def main_memory(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Bytes of main memory that this process may use: the machine's, or a container's limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for [limit] in _limits("memory", groups, membership))])


def _limits(controller: str, groups: Path, membership: Path) -> Iterator[list[int]]:
    """The numbers in the files of each control group around this process that has a limit."""
    for line in membership.read_text(encoding="utf-8").splitlines() if membership.exists() else []:
        _, controllers, place = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = groups / controllers  # empty in version 2
        for folder in (top / place.lstrip("/"), *(top / place.lstrip("/")).parents):
            for names in LIMITS[controller]:
                if all((folder / name).exists() for name in names):
                    words = " ".join((folder / name).read_text(encoding="utf-8") for name in names).split()
                    if words[0] not in ("max", "-1"):
                        yield list(map(int, words))
            if folder == top:
                break


def context(*packages: str) -> BaseContext:
    """The multiprocessing context whose worker processes are forked from the server.

    The first call starts the server, which imports `packages` and those of their modules that this process has
    imported, in the background: call it early. Workers start with SIGINT, SIGTERM and SIGHUP blocked, which are sent to
    a whole process group; the first function that a worker calls is `begin`. Raises UserError where the system lets no
    process share memory or make a socket.
    """
    server_context, packages = multiprocessing.get_context("forkserver"), ("trainkit_gka", *packages)
    # Every worker repeats the imports of the main program, which take no time if the server has made them.
    prefixes = tuple(f"{package}." for package in packages)
    server_context.set_forkserver_preload([*packages, *(name for name in sys.modules if name.startswith(prefixes))])
    quiet = f"{os.environ.get('PYTHONWARNINGS', '')},{QUIET}".lstrip(",")
    variables = {**NO_THREADS, "PYTHONWARNINGS": quiet}
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        resource_tracker.ensure_running()  # the server would start it, and that unblocks the signals
        _check_system(server_context)
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
    return server_context


def _check_system(server_context: BaseContext) -> None:
    """Raises UserError if no semaphore can be made. Sockets will be in /tmp where $TMPDIR is too long for their names.

    Raises OSError if nothing can be written there.
    """
    try:
        server_context.Lock()
    except OSError as error:
        reason = f"nothing can be written to {SHARED_MEMORY}, which worker processes share ({error.strerror})"
        raise UserError(f"{reason}; mount it writable, in Docker with --shm-size=8g") from None
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > LONGEST:
        tempfile.tempdir = SHORT
        util.get_temp_dir()  # it stays that of this process and of its workers
        tempfile.tempdir = usual


def shared_memory() -> float:
    """Free bytes of the memory that processes share; infinite where it has no limit."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:  # not on every system
        return math.inf
    return status.f_bavail * status.f_frsize if status.f_blocks else math.inf


@contextmanager
def interrupt_held_back() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, in which workers start.

    A worker whose start is interrupted is in no list of processes to end: it would go on running.
    """
    held_back: list[int] = []
    try:
        with signals.handled(lambda number, _: held_back.append(number), [signal.SIGINT]):
            yield
    finally:
        if held_back:
            signal.raise_signal(signal.SIGINT)


def begin(on_sigterm=signal.SIG_DFL) -> None:
    """The first call of a worker: end with the process it works for, however that ends, and unblock SIGTERM.

    SIGINT and SIGHUP stay blocked. on_sigterm: a handler as signal.signal takes it.
    """
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, on_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def end_with_parent() -> None:
    multiprocessing.parent_process().join()  # waits on a pipe: for the operating system the parent is the server
    os._exit(1)
