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
import shlex
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar, get_type_hints

from trainkit_gka import command, signals

# The flags to lower when a GPU's memory is full, whichever a command has: they change the speed, not the result.
BATCH_FLAGS = ("device_batch_size", "batch_tokens", "max_rows", "batch_size")
# Errors of files that may be gone at the next try: a disk or a machine on the network did not answer.
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOTCONN, errno.ESHUTDOWN}
PASSING |= {errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH}
PASSING |= {errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH}


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


NETWORK = ("ConnectionError", "ConnectError", "ConnectTimeout", "ReadTimeout", "LocalEntryNotFoundError")


def is_network(error: BaseException | None) -> bool:
    """Whether an error or one of its causes is a network or a hub that does not answer; libraries name such errors
    differently.
    """
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
        above = value > self.least if self.open_least else value >= self.least
        below = value < self.most if self.open_most else value <= self.most
        in_range = above and below and (isinstance(value, int) or math.isfinite(value))
        if not (in_range or (self.other is not None and value == self.other[0])):
            least = f"{'above' if self.open_least else 'at least'} {self.least}" if math.isfinite(self.least) else ""
            most = f"{'below' if self.open_most else 'at most'} {self.most}" if math.isfinite(self.most) else ""
            ends = " and ".join(filter(None, (least, most or ("finite" if isinstance(value, float) else ""))))
            other = f", or {self.other[0]:g} for {self.other[1]}" if self.other else ""
            raise UserError(f"{flag} must be {ends}{other}, got {value}")


class Group(Enum):
    """The box of a flag in --help, in their order there. In the type of the field: `Annotated[int, Group.MODEL]`."""

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

    Every value of a tuple or list must be in them. Strings and None have no bounds.
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

    grouped = _with_groups(config_class)
    options = {"prog": shlex.join(command.program()), "description": inspect.getdoc(config_class)}
    try:
        with contextlib.ExitStack() as output:
            if os.environ.get("RANK", "0") != "0":  # some boxes come even with tyro's console_outputs=False
                output.enter_context(contextlib.redirect_stdout(io.StringIO()))
                output.enter_context(contextlib.redirect_stderr(io.StringIO()))
            parsed = tyro.cli(grouped, args=argv, config=[tyro.conf.OmitArgPrefixes], **options)
    except SystemExit as refusal:
        if refusal.code:
            raise UserError("") from None
        raise
    if grouped is config_class:
        return parsed
    values = vars(parsed)
    groups = [values.pop(group.name) for group in Group if group.name in values]
    return config_class(**values, **{name: value for group in groups for name, value in vars(group).items()})


def _with_groups(config_class: type) -> type:
    """`config_class` for tyro, the fields of each Group in a dataclass of their own; itself if no field has a Group."""
    import tyro

    hints, members = get_type_hints(config_class, include_extras=True), {}
    group_of = {name: g for name, hint in hints.items() for g in getattr(hint, "__metadata__", ()) if type(g) is Group}
    if not group_of:
        return config_class
    docs, known = _field_docs(config_class), {one.name: one for one in fields(config_class)}
    names = [name for base in config_class.__mro__ for name in inspect.get_annotations(base) if name in known]
    for name in dict.fromkeys(names):  # of the class itself, then those of its bases
        hint = Annotated[hints[name], tyro.conf.arg(help=docs.get(name))]
        copy = field(default=known[name].default, default_factory=known[name].default_factory)
        members.setdefault(group_of.get(name), []).append((name, hint, copy))
    for group in Group:
        if group in members:
            part = make_dataclass(group.value, members.pop(group), kw_only=True)
            title = tyro.conf.arg(name=group.value, help="")  # of the box
            members.setdefault(None, []).append((group.name, Annotated[part, title]))
    return make_dataclass("Flags", members[None], kw_only=True)


def _field_docs(config_class: type) -> dict[str, str]:
    """The docstrings of the fields, which only the source has; inherited fields included."""
    docs = {}
    for base in [base for base in reversed(config_class.__mro__) if inspect.get_annotations(base)]:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for one, two in itertools.pairwise(body):
            if isinstance(one, ast.AnnAssign) and isinstance(two, ast.Expr):
                docs[one.target.id] = " ".join(two.value.value.split())
    return docs


def run(main: Callable[[Any], None], config_class: type, argv: list[str] | None = None) -> None:
    """Parse `argv` (default: the process's) into `config_class` and call `main` with it.

    The docstring of `config_class` is the help text, the docstrings of its fields are the flags' help, and values out
    of the fields' Bounds are refused. Exit codes: 2 for `UserError` and files that cannot be used, 75 for
    `PassingFault` and files that the next try may be able to use, 130 for Ctrl-C, 143 for SIGTERM and 129 for a closed
    terminal. Signals end the command within seconds.
    """
    signals.keep_output()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the terminal cannot show becomes "?"
            stream.reconfigure(errors="replace")
    try:
        with signals.at_once():
            config = parse(config_class, argv)
            check_bounds(config)
            main(config)
    except UserError as error:
        command.fail(str(error), error.code)
    except BrokenPipeError:  # the reader has ended: keep the interpreter from flushing the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        command.end(141)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            command.fail("the disk is full; free some space and run the same command again")
        if error.filename is None:  # not about a path of the user's
            raise
        if error.errno in PASSING:
            command.fail(f"{error.filename}: {error.strerror}; run the same command again", PassingFault.code)
        command.fail(f"{error.filename}: {error.strerror}")
    except RuntimeError as error:
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
