"""Ends every process that the tests started when the process that runs them ends, in whichever way.

They inherit a variable with the runner's id, over any number of generations. A process that outlives the runner kills
all that have it: torchrun's workers in other sessions, loading workers whose server died before them, browsers. A test
that sets the environment of a process therefore starts from `os.environ`.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

PREFIX = "GKA_STARTED_BY_TESTS_OF_"


def start() -> None:
    """Start the process that waits for the end of this one. Call it before anything else is started."""
    if hasattr(os, "pidfd_open"):  # Linux
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        # Ctrl-C and `timeout` signal a whole group, which the watchdog must outlive.
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True).stdout.readline()
        os.environ[PREFIX + str(os.getpid())] = "1"


def started_by(runner: int) -> list[int]:
    """The running processes that the tests of process `runner` started, whoever their parents are."""
    mark, pids = f"{PREFIX}{runner}=1".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                pids.append(int(process.name))
    return pids


if __name__ == "__main__":
    runner = int(sys.argv[1])
    handle = os.pidfd_open(runner)
    print("watching", flush=True)
    select.select([handle], [], [])
    while pids := started_by(runner):  # again: they may have started others meanwhile
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
