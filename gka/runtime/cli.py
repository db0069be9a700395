"""Command lines: a dataclass becomes flags; a mistake becomes one line and exit code 2."""

import errno
import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

# What to lower when a GPU's memory is full, in the commands that have it: it changes the speed, not the result.
BATCH_FLAGS = ("device_batch_size", "batch_tokens", "max_rows", "batch_size")


class UserError(Exception):
    """Something the user can mend; the message says what to do. Entry points print it without a traceback and exit with 2."""


def run(main: Callable[[Any], None], config_class: type, argv: list[str] | None = None) -> None:
    """Parse `argv` (default: the process's) into `config_class` and call `main` with it.

    The docstring of `config_class` is the help text, its field docstrings the flags' help. `UserError`, a file that cannot be used and Ctrl-C exit with 2, 2 and 130.
    """
    import tyro

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what the terminal's encoding lacks is shown as "?", and ends nothing
            stream.reconfigure(errors="replace")
    program = sys.modules["__main__"].__spec__
    prog = f"python -m {program.name}" if program else None
    config = tyro.cli(config_class, args=argv, prog=prog, description=config_class.__doc__)
    try:
        main(config)
    except UserError as error:
        _leave(str(error))
    except BrokenPipeError:  # the reader has left; the interpreter must not try to flush what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit(141)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _leave("the disk is full; free some space and run the same command again")
        if error.filename is None:  # not about a path the user gave
            raise
        _leave(f"{error.filename}: {error.strerror}")
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's; torch itself is not imported for a name
            raise
        flag = next((f"--{flag.replace('_', '-')} (now {getattr(config, flag)})" for flag in BATCH_FLAGS if hasattr(config, flag)), "the batch size")
        _leave(f"out of GPU memory; lower {flag}: it changes the speed, not the result. What was saved is kept")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        _exit(130)
    except SystemExit as left:
        _exit(left.code)
    if _is_distributed():
        _exit(0)


def _is_distributed() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _leave(message: str) -> None:
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)  # rank 0 has the same to say and ends everyone; this rank speaks only if it is alone
    print(f"error: {message}", file=sys.stderr)
    _exit(2)


def _exit(code) -> None:
    """Leave. With several processes at once: now and then a thread of gloo's asks for the interpreter while that closes down, and aborts the process."""
    if _is_distributed() and isinstance(code, int):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def command_line() -> str:
    """The command this process was started with, as one would type it."""
    program = sys.modules["__main__"].__spec__
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    launcher = "python" if ranks == 1 else f"torchrun --standalone --nproc-per-node {ranks}"
    return shlex.join([*launcher.split(), *(["-m", program.name] if program else sys.argv[:1]), *sys.argv[1:]])
