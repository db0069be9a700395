"""Worker processes. They are forked from a server that does nothing else, never from the process that wants them.

A process that has threads must not fork: the child gets every lock as it is at that moment, and nobody is there to
release it. Python's own list of threads is behind such a lock (until 3.12), which gloo's and autograd's threads take
at any time, so that a child waited for ever before its first line. The server has no threads, not even of libraries.
"""

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext

DEAF_TO = {signal.SIGINT, signal.SIGTERM}
# Without these, importing numpy and pyarrow starts threads.
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


def cores() -> int:
    """How many cores this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def context(*packages: str) -> BaseContext:
    """Where worker processes come from.

    The first call starts the server, which imports `packages`, and what of them this process has imported, while this
    process goes on: call it early. Workers are born deaf to SIGINT and SIGTERM, which reach a whole process group;
    the first thing they call is `begin`.
    """
    found, packages = multiprocessing.get_context("forkserver"), ("trainkit", *packages)
    # Each worker prepares the program that runs again, and finds what that imports.
    theirs = tuple(f"{package}." for package in packages)
    found.set_forkserver_preload([*packages, *(name for name in sys.modules if name.startswith(theirs))])
    resource_tracker.ensure_running()  # the server would start it, and that unblocks the signals
    mine = {name: os.environ[name] for name in NO_THREADS if name in os.environ}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)
    try:
        os.environ.update(NO_THREADS)
        forkserver.ensure_running()
    finally:
        for name in NO_THREADS:
            del os.environ[name]
        os.environ.update(mine)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return found


def begin(on_sigterm=signal.SIG_DFL) -> None:
    """What a worker does first: die with the process it works for, however that ends, and hear SIGTERM again.

    It stays deaf to SIGINT. on_sigterm: a handler as signal.signal takes it.
    """
    threading.Thread(target=_die_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, on_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _die_with_parent() -> None:
    multiprocessing.parent_process().join()  # a pipe's end; the parent of the system's is the server
    os._exit(1)
