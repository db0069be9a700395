"""The command that started this process: the words that one types to start it again, and its end."""

import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time

MISTAKE = 2  # the exit code of a user's mistake, which torchrun need not try again
OUR_TORCHRUN = "trainkit_gka.torchrun"
# Set by it: its command, and the file into which a process writes the error that it prints last.
TORCHRUN, LAST_ERROR = "GKA_TORCHRUN", "GKA_LAST_ERROR"
# Set by a program that starts others: its process id. They end when it has ended, however it did.
LAUNCHER = "GKA_LAUNCHER"
# Read by torchrun: 1 gives restarted workers a new store. With the old one they meet dead peers' addresses and hang.
STORE_SWITCH = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def is_distributed() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def fail(message: str, code: int = MISTAKE) -> None:
    """Exit with `code` after `message`; an empty one is printed already."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)  # rank 0 prints the same and ends everyone; this rank prints only if it is alone
    under_torchrun = write_note(message, code)
    if message and not (under_torchrun and code == MISTAKE):  # which is not tried again, so torchrun prints it once
        print(f"error: {message}", file=sys.stderr)
    end(code)


def write_note(message: str, code: int) -> bool:
    """Write the message, "" for none, and the code with which `trainkit_gka.torchrun` ends, if it started this process.

    Returns whether it did.
    """
    if note := os.environ.get(LAST_ERROR):
        with open(f"{note}.{os.getpid()}", "w", encoding="utf-8") as file:
            json.dump({"message": message, "code": code}, file)
        os.replace(file.name, note)
    return bool(note)


def end(code, at_once: bool = False) -> None:
    """End the process, and after a user's mistake a `trainkit_gka.torchrun` that would try it again.

    at_once: without cleaning up, as always if there are several processes: a thread of gloo's may ask for the
    interpreter while that closes down, and then aborts.
    """
    if code == MISTAKE and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and TORCHRUN in os.environ:
        sys.stdout.flush()
        os.kill(os.getppid(), signal.SIGTERM)
    if (at_once or is_distributed()) and isinstance(code, int):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def as_typed(program: str) -> str:
    """A program as one types it here: by its name if the shell finds it so, else by its path, relative if below."""
    name, path = os.path.basename(program), os.path.abspath(program)
    if name == program or shutil.which(name) == path:
        return name
    near = os.path.relpath(path)
    return path if near.startswith(os.pardir) else near if os.sep in near else os.path.join(os.curdir, near)


def program() -> list[str]:
    """The words before the flags that started this process: `python -m module`, or an installed command."""
    words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    if len(words) > 1 and os.access(words[1], os.X_OK):  # a script that names its interpreter
        del words[0]
    return [as_typed(words[0]), *words[1:]]


def command_line() -> str:
    """The command this process was started with, as one types it, or that of the `trainkit_gka.torchrun` above it."""
    return os.environ.get(TORCHRUN) or shlex.join([*program(), *sys.argv[1:]])


def is_under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_launcher() -> None:
    """From now on, SIGTERM ends this process within a second after the end of the program that started it, if that set
    $GKA_LAUNCHER or is torchrun: SIGKILL lets it end nothing itself. A training saves then.
    """
    if not is_under_torchrun() and LAUNCHER not in os.environ:
        return
    import psutil

    launcher, process = int(os.environ.get(LAUNCHER, os.getppid())), psutil.Process()

    def watch() -> None:
        while any(ancestor.pid == launcher for ancestor in process.parents()):
            time.sleep(1)
        os.kill(process.pid, signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
