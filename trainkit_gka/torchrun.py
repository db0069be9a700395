"""torchrun, but a mistake ends with its message and exit code alone, and restarted processes do not hang.

    python -m trainkit_gka.torchrun --standalone --nproc-per-node 7 -m -- nanochat_gka.train --data PACKED

The flags are torchrun's; the dashes keep it from taking our --run for its --run-path. torchrun itself runs the same
commands, but prints a traceback after any error and exits with 1, ends at SIGHUP under nohup and at a second signal
while processes still save, and hangs where the machine's name does not resolve.
"""

import json
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from trainkit_gka import signals
from trainkit_gka.cli import PassingFault
from trainkit_gka.command import LAST_ERROR, LAUNCHER, MISTAKE, STORE_SWITCH, TORCHRUN, end_with_launcher, program

# Seconds for a step and a save after SIGTERM or Ctrl-C; torchrun's own 30 may be too few.
SETTINGS = {STORE_SWITCH: "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}
LOOPBACK = "lo"  # the name that Linux gives the interface
STOPPED = {code for number in signals.ENDING for code in (-number, 128 + number)}  # exit codes after these


def on_one_machine(words: Sequence[str]) -> list[str]:
    """torchrun's flags, with the loopback address for --standalone: the machine's name may not resolve."""
    if "--standalone" not in words:
        return [*words]
    if "GLOO_SOCKET_IFNAME" not in os.environ and LOOPBACK in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    before = words.index("--standalone") + 1  # a later --local-addr counts
    return [*words[:before], "--local-addr", "127.0.0.1", *words[before:]]


def main(words: Sequence[str]) -> int:
    """Run torchrun with `words`. Returns the command's exit code.

    After a signal that is --stopped-code (default 0) if training saved, else 128 + the signal's number.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    end_with_launcher()
    os.environ |= {LAUNCHER: str(os.getpid()), TORCHRUN: shlex.join([*program(), *words])}
    signals.keep_output()
    signals.outlive_readers()
    from torch.distributed import run  # reads the settings
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ending = signals.ending()

    def terminate(number: int, frame: FrameType | None) -> None:
        """torchrun's handler, but later signals are ignored: a closed terminal sends two, and processes still save."""
        if number in ending or number != signal.SIGHUP:
            for later in signals.ENDING:
                signal.signal(later, signal.SIG_IGN)
            raise api.SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))

    api._terminate_process_handler = terminate
    api.logger.addFilter(lambda record: not record.msg.startswith(("failed (exitcode", "Sending process")))
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "error.json")
        os.environ[LAST_ERROR] = str(note)
        try:
            run.main(on_one_machine(words))
        except ChildFailedError as failed:
            codes = {failure.exitcode for failure in failed.failures.values()}
            message, code = _read(note)
            if code in {MISTAKE, *codes}:  # a mistake counts also where its process was ended before it exited
                return _print(message, code)
            if codes <= STOPPED:
                return max(128 - code if code < 0 else code for code in codes)
            return _print_first(failed.failures)
        except api.SignalException as signalled:  # from outside, or a command whose mistake must not be tried again
            message, code = _read(note)
            if code is not None and (not message or code == MISTAKE):
                return _print(message, code)
            return 128 + signalled.sigval
        message, code = _read(note)
        return 0 if message else code or 0  # a signal that the processes had by themselves


def _read(note: Path) -> tuple[str, int | None]:
    """The message and the exit code that a process wrote into `note` at its end; no code if none did."""
    if not note.exists():
        return "", None
    end = json.loads(note.read_text(encoding="utf-8"))
    return end["message"], end["code"]


def _print_first(failures: dict[int, Any]) -> int:
    """Print how the first process that failed ended, one that was killed before those that failed for it."""
    rank, failure = min(failures.items(), key=lambda one: (one[1].exitcode > 0, one[1].timestamp))
    if failure.exitcode > 0:
        return _print(f"process {rank} ended with exit code {failure.exitcode}, see above", failure.exitcode)
    ended = f"process {rank} was ended by signal {-failure.exitcode} (out of memory?)"
    return _print(f"{ended}; run the same command again", PassingFault.code)


def _print(message: str, code: int) -> int:
    if message:
        print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
