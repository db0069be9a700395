"""Command lines: a dataclass becomes flags, a mistake one line and exit code 2, a passing fault one line and 75.

A field's type holds what its flag needs beside the value: `MayChange[Annotated[int, Bounds(1), Group.MODEL]]`.
"""

import ast
import contextlib
import errno
import inspect
import io
import itertools
import math
import os
import re
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar, get_type_hints

from trainkit_gka import command, interrupted, signals

# The flags to lower when a GPU's memory is full: they change the speed, not the result.
BATCH_FLAGS = ("device_batch_size", "batch_tokens", "max_rows", "batch_size")
# Errors of files that may be gone at the next try: a disk or a machine on the network did not answer.
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOTCONN, errno.ESHUTDOWN}
PASSING |= {errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH}
PASSING |= {errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH}
LOST_PROCESS = "gloo/transport"  # in an error of processes on CPUs of which one has ended
# Errors of writing, which often name no file, and what to do about them.
FULL = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the quota of the disk is used up; delete files or have it raised",
    errno.EFBIG: "a file would be larger than the system allows (see ulimit -f); raise that limit",
}
UNNAMED = {errno.EIO, errno.ESTALE}  # the passing ones of reading and writing, which name no file either
NETWORK = ("ConnectionError", "ConnectError", "ConnectTimeout", "ReadTimeout", "LocalEntryNotFoundError")


class UserError(Exception):
    """A mistake that the user can correct; the message says how. Commands print it alone and exit with 2."""

    code = command.MISTAKE


class PassingFault(UserError):
    """A fault that may be gone at the next try, such as a lost network. Commands print it and exit with 75.

    75 is EX_TEMPFAIL of sysexits.h. torchrun restarts the processes after it, and not after a mistake of the user.
    """

    code = 75


def reason_of(error: BaseException) -> str:
    """The first line of an error's message without its full stop; the error's type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")


def of_files(error: BaseException) -> UserError | None:
    """The line for an error of a file or of its disk; None for any other error. A UserError is its own.

    safetensors has a type of error for itself, which has the system's number in its text.
    """
    if isinstance(error, UserError):
        return error
    number, file = getattr(error, "errno", None), getattr(error, "filename", None)
    if type(error).__name__ == "SafetensorError" and (match := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(match[1])
    if number in FULL:
        return UserError(f"{FULL[number]} and run the same command again. What was saved is kept")
    if not isinstance(error, OSError) or (file is None and number not in UNNAMED):
        return None
    if number in PASSING:
        return PassingFault(f"{file or 'a disk'}: {error.strerror}; run the same command again")
    return UserError(f"{file}: {error.strerror}")


def is_network(error: BaseException | None) -> bool:
    """Whether an error or one of its causes is a network or a hub that does not answer, by the names of libraries."""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError)) or type(error).__name__ in NETWORK:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


@dataclass(frozen=True)
class Bounds:
    """The values that a numeric flag may have, in the type of its field: `Annotated[float, Bounds(0, 1)]`.

    least, most: the range, ends included; open_least and open_most exclude an end. other: one more allowed value and
    its meaning. Infinity and NaN are never in bounds.
    """

    least: float = -math.inf
    most: float = math.inf
    open_least: bool = False
    open_most: bool = False
    other: tuple[float, str] | None = None

    def check(self, flag: str, value: float) -> None:
        """Raises UserError, naming `flag`, if `value` is out of bounds."""
        excluded = (value, True) in ((self.least, self.open_least), (self.most, self.open_most))
        in_range = self.least <= value <= self.most and abs(value) < math.inf and not excluded
        if not (in_range or (self.other is not None and value == self.other[0])):
            least = f"{'above' if self.open_least else 'at least'} {self.least}" if math.isfinite(self.least) else ""
            most = f"{'below' if self.open_most else 'at most'} {self.most}" if math.isfinite(self.most) else ""
            ends = " and ".join(filter(None, (least, most or ("finite" if isinstance(value, float) else ""))))
            other = f", or {self.other[0]:g} for {self.other[1]}" if self.other else ""
            raise UserError(f"{flag} must be {ends}{other}, got {value}")


class Group(Enum):
    """The box of a flag in --help, in the order of the boxes."""

    MODEL = "model"
    DATA = "data"
    AUGMENTATION = "augmentation"
    SCHEDULE = "schedule"
    OPTIMISER = "optimiser"
    LOGGING = "logging"


T = TypeVar("T")
MAY_CHANGE = "may change when a run is continued"
MayChange = Annotated[T, MAY_CHANGE]  # the type of such a flag is MayChange[int]; see `trainkit_gka.run_config`


def flag_of(field: str) -> str:
    """The flag of a dataclass's field."""
    return f"--{field.replace('_', '-')}"


def check_bounds(config: Any) -> None:
    """Raises UserError for the first field of `config`, of any class with annotations, that is out of its Bounds.

    Those of a tuple or list are its values'. Strings and None have no bounds.
    """
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name, None)
        for bounds in getattr(hint, "__metadata__", ()):
            for number in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(bounds, Bounds) and isinstance(number, (int, float)):
                    bounds.check(flag_of(name), number)


Seed = Annotated[int, Bounds(0, 2**63 - 1)]  # as torch's generators take them
Count = Annotated[int, Bounds(1)]
CountOrOff = Annotated[int, Bounds(1, other=(-1, "off"))]
CountOrAll = Annotated[int, Bounds(1, other=(-1, "all"))]
Probability = Annotated[float, Bounds(0, 1)]
Share = Annotated[float, Bounds(0, 1, open_most=True)]  # a part that is not the whole
CountOrAutomatic = Annotated[int, Bounds(1, other=(-1, "automatic"))]


def parse(config_class: type, argv: list[str] | None) -> Any:
    """The flags in `argv` as a `config_class`. Raises UserError without a message after tyro's box, on rank 0."""
    import tyro

    output = io.StringIO() if os.environ.get("RANK", "0") != "0" else None  # tyro's console_outputs leaves some boxes
    options = {"prog": shlex.join(command.program()), "description": inspect.getdoc(config_class)}
    try:
        with contextlib.redirect_stdout(output or sys.stdout), contextlib.redirect_stderr(output or sys.stderr):
            parsed = tyro.cli(_in_boxes(config_class), args=argv, config=[tyro.conf.OmitArgPrefixes], **options)
    except SystemExit as refusal:
        if refusal.code:
            raise UserError("") from None
        raise
    if type(parsed) is config_class:
        return parsed
    values = {}
    for name, value in vars(parsed).items():
        values |= vars(value) if name in Group.__members__ else {name: value}
    return config_class(**values)


def _in_boxes(config_class: type) -> type:
    """`config_class` for tyro, with a dataclass for the fields of each Group; itself if no field has a Group."""
    import tyro

    hints = get_type_hints(config_class, include_extras=True)
    group_of = {name: g for name, hint in hints.items() for g in getattr(hint, "__metadata__", ()) if type(g) is Group}
    if not group_of:
        return config_class
    docs = _field_docs(config_class)
    members = {group: [] for group in (None, *Group)}
    for one in sorted(fields(config_class), key=lambda one: [*docs].index(one.name)):
        hint = Annotated[hints[one.name], tyro.conf.arg(help=docs[one.name])]
        copy = field(default=one.default, default_factory=one.default_factory)
        members[group_of.get(one.name)].append((one.name, hint, copy))
    for group in filter(members.get, Group):
        part = make_dataclass(group.value, members[group], kw_only=True)
        members[None].append((group.name, Annotated[part, tyro.conf.arg(name=group.value, help="")]))
    return make_dataclass("Flags", members[None], kw_only=True)


def _field_docs(config_class: type) -> dict[str, str | None]:
    """The docstrings of the fields, which only the source has: of the class itself, then of its bases."""
    docs = {}
    for base in filter(inspect.get_annotations, config_class.__mro__):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for one, two in itertools.pairwise([*body, None]):
            if isinstance(one, ast.AnnAssign):
                docs.setdefault(one.target.id, " ".join(two.value.value.split()) if isinstance(two, ast.Expr) else None)
    return docs


def run(main: Callable[[Any], None], config_class: type, argv: list[str] | None = None) -> None:
    """Parse `argv` (default: the process's) into `config_class` and call `main` with it.

    The docstrings of `config_class` and of its fields are the help text. Exit codes: 2 for `UserError`, values out of
    Bounds and files that cannot be used, 75 for `PassingFault` and files that the next try may be able to use, 130 for
    Ctrl-C, 143 for SIGTERM and 129 for a closed terminal. Signals end the command within seconds.
    """
    if signal.getsignal(signal.SIGINT) is interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command.end_with_launcher()
    signals.keep_output()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the terminal cannot show becomes "?"
            stream.reconfigure(errors="replace")
    try:
        with signals.at_once():
            config = parse(config_class, argv)
            check_bounds(config)
            main(config)
    except BrokenPipeError:  # the reader has ended: keep the interpreter from flushing the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        command.end(141)
    except Exception as error:
        if line := of_files(error):
            command.fail(str(line), line.code)
        if command.is_distributed() and LOST_PROCESS in str(error):
            time.sleep(3)  # a torchrun that lost that process itself ends this one, and says so
            command.fail("the connection to another process was lost; run the same command again", PassingFault.code)
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported for its name alone
            raise
        flags = [f"{flag_of(name)} (now {getattr(config, name)})" for name in BATCH_FLAGS if hasattr(config, name)]
        lower = flags[0] if flags else "the batch size"
        command.fail(f"out of GPU memory; lower {lower}: it changes the speed, not the result. What was saved is kept")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        command.end(130)
    except signals.Stopped as stopped:
        signals.say(stopped)
        command.end(stopped.code, at_once=True)  # an ordinary end waits for workers that were about to start
    except SystemExit as end:
        command.end(end.code)
    if command.is_distributed():
        command.end(0)
