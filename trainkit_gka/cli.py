"""Command lines: a dataclass becomes flags, a mistake one line and exit code 2, a passing fault one line and 75."""

import ast
import contextlib
import errno
import inspect
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from trainkit_gka import signals

# The flags to lower when a GPU's memory is full, whichever a command has: they change the speed, not the result.
BATCH_FLAGS = ("device_batch_size", "batch_tokens", "max_rows", "batch_size")
OUR_TORCHRUN = "trainkit_gka.torchrun"
TORCHRUN = ("torchrun", "torch.distributed.run", OUR_TORCHRUN)
console_script = (
    ""  # the path of the installed command that this process was started as; `trainkit_gka.console` sets it
)
LAST_ERROR = "GKA_LAST_ERROR"  # from `trainkit_gka.torchrun`: the file for the error that it prints as the last line
# Of torchrun: 1 gives restarted workers a store of their own. Without it they meet dead peers' addresses and hang.
STORE_SWITCH = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# Of torchrun too: the seconds that processes have for their step and a save after a signal.
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# Errors of files that the same command may not meet again: a disk or a machine on the network does not answer.
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOTCONN, errno.ESHUTDOWN}
PASSING |= {errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH}
PASSING |= {errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH}


class UserError(Exception):
    """Something the user can mend: the message says what to do. Commands print it alone and exit with 2."""

    code = 2


class PassingFault(UserError):
    """A fault that may be gone at the next try, such as a lost network. Commands print it alone and exit with 75.

    That is EX_TEMPFAIL of sysexits.h. torchrun's restarts try again after it, and not after a mistake of the user.
    """

    code = 75


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, without its full stop; its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")


NETWORK = ("ConnectionError", "ConnectError", "ConnectTimeout", "ReadTimeout", "LocalEntryNotFoundError")


def is_network(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a network or a hub that does not answer: libraries have classes of their
    own for that.
    """
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError)) or type(error).__name__ in NETWORK:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


@dataclass(frozen=True)
class Bounds:
    """The values that a numeric flag may have, in the type of its field: `Annotated[float, Bounds(0, 1)]`.

    least, most: the range, ends included; open_least, open_most leave an end out. other: one more value that is
    allowed, and what it stands for. Infinity and NaN are never in bounds.
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
            raise UserError(f"{flag} must be {self._words(isinstance(value, float))}, got {value}")

    def _words(self, is_float: bool) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most) and not (self.open_least or self.open_most):
            words = [f"between {self.least} and {self.most}"]
        else:
            words = [f"{'above' if self.open_least else 'at least'} {self.least}"] if math.isfinite(self.least) else []
            if math.isfinite(self.most):
                words += [f"{'below' if self.open_most else 'at most'} {self.most}"]
            elif is_float:
                words += ["finite"]
        return " and ".join(words) + (f", or {self.other[0]:g} for {self.other[1]}" if self.other else "")


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


USAGE = "\0"  # in what follows: how the help writes the flag's value, such as INT
# What tyro says in its boxes, and how we say it.
PARSER_SAYS = [
    (r"Missing value for argument '(.*?)'\. Expected 1 values", r"\1 needs a value"),
    (r"Missing value for argument '(.*?)'\. Expected (\d+) values", r"\1 needs \2 values"),
    (r"invalid choice ('.*') for argument '(.*?)'\. Expected one of \((.*?),?\)", r"\2 takes one of \3, got \1"),
    (r"Error parsing (.*?): no type matching .* could be instantiated from \[(.*)\]", rf"\1 takes {USAGE}, got \2"),
    (r"Error parsing (.*?): .*(?:base 10|to float|arguments): (\[?)(.*?)\]?$", rf"\1 takes {USAGE}, got \3"),
    (r"Error parsing (.*?): Could not parse arguments \[(.*)\] into .*", rf"\1 takes {USAGE}, got \2"),
    (r"Error parsing (.*?): Failed to parse key-value pairs!", rf"\1 takes {USAGE}"),
    ("Error parsing ", ""),
    ("Missing from .*?: ", "missing: "),
    ("Unrecognized options: ([^;]*)$", r"unknown: \1; --help lists the flags"),
    ("Unrecognized options: ", "unknown: "),
    ("Perhaps you meant: ", "did you mean "),
    ("Arguments similar to", "similar to"),
]


def parse(config_class: type, argv: list[str] | None) -> Any:
    """The flags in `argv` as a `config_class`. Raises UserError, a line of what tyro says in a box, for a mistake."""
    import tyro

    said, before = io.StringIO(), os.environ.get("COLUMNS")
    if not {"-h", "--help"} & set(sys.argv[1:] if argv is None else argv):
        os.environ["COLUMNS"] = "100000"  # the box's lines as they are, not folded
    try:
        with contextlib.redirect_stderr(said):
            program, about = shlex.join(_program()), inspect.getdoc(config_class)
            if groups := getattr(config_class, "GROUPS", None):
                grouped = _grouped(config_class, groups)
                parts = tyro.cli(
                    grouped, args=argv, prog=program, description=about, config=[tyro.conf.AvoidSubcommands]
                )
                config = config_class(**{k: v for part in vars(parts).values() for k, v in vars(part).items()})
            else:
                config = tyro.cli(config_class, args=argv, prog=program, description=about)
    except SystemExit as left:
        if left.code != UserError.code:
            raise
        raise UserError(_in_a_line(said.getvalue())) from None
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before
    sys.stderr.write(said.getvalue())  # a warning
    return config


def _grouped(config_class: type, groups: dict[str, str]) -> type:
    """A class whose fields are the groups of `config_class`, for tyro; what no group names goes to the group "run"."""
    import tyro

    docs = _field_docs(config_class)
    hints, known = get_type_hints(config_class, include_extras=True), {f.name: f for f in fields(config_class)}
    named = {title: names.split() for title, names in groups.items()}
    named["run"] = [name for name in known if not any(name in names for names in named.values())]

    def part(title: str, names: list[str]) -> tuple[str, Any, Any]:
        own = [
            (n, Annotated[hints[n], tyro.conf.arg(help=docs.get(n), prefix_name=False)], _copy(known[n])) for n in names
        ]
        group = make_dataclass(title, own, frozen=True, kw_only=True)
        return title, Annotated[group, tyro.conf.arg(help="")], field(default_factory=group)

    return make_dataclass("Flags", [part(title, names) for title, names in named.items()], frozen=True)


def _copy(known: Field) -> Any:
    return field(default=known.default, default_factory=known.default_factory)


def _field_docs(config_class: type) -> dict[str, str]:
    """The strings under the fields, from the source, inherited ones included."""
    docs = {}
    for base in [base for base in reversed(config_class.__mro__) if inspect.get_annotations(base)]:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for one, two in itertools.pairwise(body):
            if isinstance(one, ast.AnnAssign) and isinstance(two, ast.Expr):
                docs[one.target.id] = " ".join(two.value.value.split())
    return docs


def _in_a_line(box: str) -> str:
    """What tyro's box says: the parts between its rules up to an empty line, without the help of flags."""
    # The frame is of │ and ─, or of nothing and - where the terminal has no UTF-8; colours are escape sequences.
    rows = re.sub("\x1b\\[[0-9;]*m", "", box).splitlines()[1:-1]
    lines = [re.sub(r"^[│ ] |\s*│?$", "", row) for row in rows]
    parts = [list(part) for rule, part in itertools.groupby(lines, re.compile(" *[-─]{3,}$").match) if not rule]
    usage = next((part[1].strip() for part in parts if part[0] == "Argument helptext:"), "")
    sentences = []
    for part in parts:
        if part[0].startswith(("For full helptext", "Argument helptext")):
            continue
        said = list(itertools.takewhile(bool, part))
        listed = [line.strip() for line in said if line.startswith("    ") and not line.startswith("     ")]
        told = " ".join(line for line in said if not line.startswith("    "))
        sentences.append(" ".join(filter(None, [told, ", ".join(listed)])))
    line = "; ".join(sentences)
    for said, plain in PARSER_SAYS:
        line = re.sub(said, plain, line)
    return line.replace(USAGE, usage.partition(" ")[2]).rstrip(".") or box.strip()


def run(
    main: Callable[[Any], None], config_class: type | Callable[[list[str]], type], argv: list[str] | None = None
) -> None:
    """Parse `argv` (default: the process's) into `config_class` and call `main` with it. A function gives the class of
    the words in `argv`.

    The docstring of `config_class` is the help text, the docstrings of its fields are the flags' help, and values out
    of the fields' Bounds are refused. `UserError`, a file that cannot be used and Ctrl-C exit with 2, 2 and 130;
    `PassingFault`, and a file that the next try may be able to use, with 75; SIGTERM and a closed terminal with 143
    and 129, within seconds.
    """
    signals.keep_output()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the terminal cannot show becomes "?"
            stream.reconfigure(errors="replace")
    try:
        with signals.at_once():
            if not isinstance(config_class, type):
                config_class = config_class(sys.argv[1:] if argv is None else argv)
            config = parse(config_class, argv)
            check_bounds(config)
            main(config)
    except UserError as error:
        _leave(str(error), error.code)
    except BrokenPipeError:  # the reader has left: keep the interpreter from flushing the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit(141)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _leave("the disk is full; free some space and run the same command again")
        if error.filename is None:  # not about a path the user gave
            raise
        if error.errno in PASSING:
            _leave(f"{error.filename}: {error.strerror}; run the same command again", PassingFault.code)
        _leave(f"{error.filename}: {error.strerror}")
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported for its name alone
            raise
        flags = [f"{flag_of(name)} (now {getattr(config, name)})" for name in BATCH_FLAGS if hasattr(config, name)]
        lower = flags[0] if flags else "the batch size"
        _leave(f"out of GPU memory; lower {lower}: it changes the speed, not the result. What was saved is kept")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        _exit(130)
    except signals.Stopped as stopped:
        signals.say(stopped)
        _exit(stopped.code, at_once=True)  # an ordinary end waits for workers that were about to start
    except SystemExit as left:
        _exit(left.code)
    if _is_distributed():
        _exit(0)


def _is_distributed() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _leave(message: str, code: int = UserError.code) -> None:
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)  # rank 0 prints the same and ends everyone; this rank speaks only if it is alone
    note = leave_note(message, code)
    if not note or code != UserError.code:  # a fault may be tried again: the reason should stand before that
        print(f"error: {message}", file=sys.stderr)
    _exit(code)


def leave_note(message: str, code: int) -> bool:
    """Tell `trainkit_gka.torchrun` what its command ends with; no message: all is saved after a signal.

    Returns whether that has started this process.
    """
    if note := os.environ.get(LAST_ERROR):
        with open(f"{note}.{os.getpid()}", "w") as file:
            json.dump({"message": message, "code": code}, file)
        os.replace(file.name, note)
    return bool(note)


def _exit(code, at_once: bool = False) -> None:
    """Leave; one of several processes leaves at once. A user's mistake ends a torchrun that would try it again.

    A thread of gloo's may ask for the interpreter while that closes down, and then aborts the process.
    """
    if code == UserError.code and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and _torchrun_line():
        sys.stdout.flush()
        os.kill(os.getppid(), signal.SIGTERM)
    if (at_once or _is_distributed()) and isinstance(code, int):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def module_name() -> str:
    """The name after `python -m` that this process was started with; empty for a file or an interpreter."""
    program = sys.modules["__main__"].__spec__
    return program.name.removesuffix(".__main__") if program else ""


def as_typed(program: str) -> str:
    """What one types here for a program: its name if the shell finds it by that, else its path, from here if near."""
    name, path = os.path.basename(program), os.path.abspath(program)
    if name == program or shutil.which(name) == path:
        return name
    near = os.path.relpath(path)
    return path if near.startswith(os.pardir) else near if os.sep in near else os.path.join(os.curdir, near)


def _program() -> list[str]:
    """The words before the flags that started this process, as one would type them."""
    if console_script:
        return [as_typed(console_script)]
    name = module_name()
    return [as_typed(sys.executable), *(["-m", name] if name else sys.argv[:1])]


def command_line() -> str:
    """The command this process was started with, as one would type it; that of torchrun's processes is torchrun's."""
    if given := _torchrun_line():
        return given
    program, ranks = _program(), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        launcher = ["-m", OUR_TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)]
        python, *words = [as_typed(sys.executable), "--no-python", *program] if console_script else program
        program = [python, *launcher, *words[:-1], "--", words[-1]]
    return shlex.join([*program, *sys.argv[1:]])


def is_under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _torchrun_line() -> str:
    """The command of the torchrun that started this process; empty if something else did."""
    if not is_under_torchrun():
        return ""
    import psutil

    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # it has ended, or is another user's
        return ""
    started = next((i for i, word in enumerate(words) if os.path.basename(word) in TORCHRUN), None)
    if started is None:
        return ""
    program, *flags = words if words[started - 1] == "-m" else words[started:]  # a module of Python, or a script
    given = {name: os.environ.get(name) for name in (STORE_SWITCH, SHUTDOWN_TIMEOUT) if OUR_TORCHRUN not in words}
    settings = [f"{name}={value}" for name, value in given.items() if value]
    return shlex.join([*settings, as_typed(program), *flags])
