"""Command lines: every flag explained, every mistake one line and exit code 2, every passing fault one line and 75."""

import errno
import importlib
import io
import math
import os
import pty
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import pytest

import processes
from sources import ENTRY_POINT, ROOT, tracked
from trainkit_gka.cli import (
    Bounds,
    Seed,
    UserError,
    _field_docs,
    as_typed,
    check_bounds,
    command_line,
    flag_of,
    is_network,
    run,
)

CONFIGS = {
    "nanochat_gka.train": "TrainConfig",
    "nanochat_gka.pack": "PackConfig",
    "deit_gka.train": "TrainConfig",
}
COMMANDS = [path for path in tracked(".py") if path.parts[0] != "tests" and ENTRY_POINT in (ROOT / path).read_text()]


@dataclass
class Command:
    """A command for these tests."""

    depth: int = 20
    """number of layers"""


def call(main, *argv):
    with pytest.raises(SystemExit) as exit_info:
        run(main, Command, [str(arg) for arg in argv])
    return exit_info.value.code


def test_a_mistake_is_one_line_and_exit_code_2(capsys):
    def refuse(config):
        raise UserError(f"--depth {config.depth} is too deep")

    assert call(refuse, "--depth", 99) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: --depth 99 is too deep\n" and not captured.out


def test_a_launcher_that_cannot_be_seen_is_not_named(monkeypatch):
    """Its process has ended, or belongs to somebody else: an error here would lose a finished run's numbers."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "gone")
    monkeypatch.setattr("os.getppid", lambda: gone.pid)
    assert " -m trainkit_gka.torchrun --standalone --nproc-per-node 2 " in command_line()
    monkeypatch.setattr("trainkit_gka.cli.console_script", "/opt/gka-train-lm")
    given = shlex.split(command_line())
    assert given[1:8] == ["-m", "trainkit_gka.torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", "--"]
    assert given[0] == as_typed(sys.executable) and given[8] == "/opt/gka-train-lm"


def test_a_network_is_at_fault_if_it_caused_an_error_and_not_if_that_was_dealt_with():
    def raised(cause):
        try:
            try:
                raise ConnectionError("no answer")
            except ConnectionError as error:
                if cause is None:
                    raise ValueError("no such dataset") from None
                raise ValueError("no such dataset") from error
        except ValueError as error:
            return error

    assert [is_network(raised(cause)) for cause in (True, None)] == [True, False]
    assert is_network(TimeoutError()) and not is_network(OSError("disk"))


def test_interrupted_is_130(capsys):
    def interrupt(config):
        raise KeyboardInterrupt

    assert call(interrupt) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_unprintable_characters_become_question_marks(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", shown)
    run(lambda config: print("\N{GREEK SMALL LETTER SIGMA} = 2"), Command, [])
    shown.flush()
    assert shown.buffer.getvalue() == b"? = 2\n"


NO_ROOM = (None, errno.ENOSPC, "the disk is full; free some space and run the same command again", 2)
STALE = ("/data/rows.bin", errno.ESTALE, f"/data/rows.bin: {os.strerror(errno.ESTALE)}; run the same command again", 75)
MISSING = ("/data/rows.bin", errno.ENOENT, f"/data/rows.bin: {os.strerror(errno.ENOENT)}", 2)


@pytest.mark.parametrize("path, number, message, code", [NO_ROOM, STALE, MISSING])
def test_a_file_that_fails_is_one_line_and_75_if_the_next_try_may_read_it(path, number, message, code, capsys):
    def read(config):
        raise OSError(number, os.strerror(number), path)

    assert call(read) == code
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_full_gpu_names_the_flag_to_lower(capsys):
    @dataclass
    class Batched(Command):
        batch_size: int = 64

    def fill(config):
        raise type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")

    with pytest.raises(SystemExit) as left:
        run(fill, Batched, [])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: out of GPU memory; lower --batch-size (now 64): ")


def test_a_reader_that_leaves_ends_the_command_without_a_word():
    code = "from trainkit_gka import cli; cli.run(lambda _: [print(n) for n in range(10**6)], dict, [])"
    words = f"{sys.executable} -c '{code}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (141, "0\n", "")


def test_a_bug_keeps_its_traceback():
    def crash(config):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(crash, Command, [])


# The flags of a command


@pytest.mark.parametrize("module,name", CONFIGS.items(), ids=CONFIGS)
def test_help_names_and_explains_every_flag(module, name, capsys):
    config_class = getattr(importlib.import_module(module), name)
    with pytest.raises(SystemExit) as left:
        run(pytest.fail, config_class, ["--help"])
    assert left.value.code == 0
    text, docs = re.sub("\x1b\\[[0-9;]*m|[\\s│]", "", capsys.readouterr().out), _field_docs(config_class)
    for name in [one.name for one in fields(config_class)]:
        assert flag_of(name) in text and re.sub(r"\s", "", docs[name]) in text, name


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMANDS, ids=str)
def test_every_command_has_help(path, tmp_path):
    module = ".".join(path.with_suffix("").parts).removesuffix(".__main__")
    done = processes.call(module, "--help", folder=tmp_path)
    assert done.stdout and not done.stderr, done


@dataclass
class Bounded:
    """Numbers with bounds of every kind."""

    rate: Annotated[float, Bounds(0)] = 1.0
    share: Annotated[float, Bounds(0, 1, open_least=True)] = 1.0
    part: Annotated[float, Bounds(0, 1)] = 1.0
    rest: Annotated[float, Bounds(0, 1, open_most=True)] = 0.0
    count: Annotated[int, Bounds(1, other=(-1, "all"))] = 1
    size: Annotated[int | str, Bounds(1)] = "auto"
    sizes: Annotated[tuple[int, ...], Bounds(1)] = (1, 2)
    seed: Seed = 0


@pytest.mark.parametrize(
    "field, refused, taken",
    [
        ("rate", (-0.1, math.nan, math.inf), (0.0,)),
        ("share", (0.0, 1.1, math.nan), (1.0,)),
        ("part", (-0.1, 2.0, math.inf), (0.0,)),
        ("rest", (1.0, -0.1), (0.99,)),
        ("count", (0, -2), (-1,)),
        ("size", (0,), (1,)),
        ("sizes", ((3, 0),), ((),)),
        ("seed", (-1, 2**63), (2**63 - 1,)),
    ],
)
def test_a_number_out_of_bounds_is_named(field, refused, taken):
    for value in refused:
        with pytest.raises(UserError, match=f"^--{field} must be "):
            check_bounds(Bounded(**{field: value}))
    for value in taken:
        check_bounds(Bounded(**{field: value}))


# Mistakes


@dataclass
class Kinds:
    """A command with flags of every kind."""

    needed: Path
    """required"""
    count: int = 1
    """a whole number"""
    rate: float = 1.0
    """a number"""
    share: float | Literal["auto"] = "auto"
    """a number or a word"""
    size: tuple[int, int] = (1, 2)
    """two whole numbers"""
    many: tuple[int, ...] = ()
    """whole numbers"""
    words: dict[str, int] = field(default_factory=dict)
    """names and whole numbers"""
    form: Literal["rows", "heads"] = "rows"
    """a word"""
    last_rate: Annotated[float, Bounds(0)] = 1.0
    """a number with bounds"""


@pytest.mark.parametrize(
    "argv, message",
    [
        ("", "missing: --needed PATH"),
        ("--neded x --count 2", "missing: --needed PATH; unknown: --neded, x; --help lists the flags"),
        ("--needed x --count", "--count needs a value"),
        ("--needed x --last-rate 1e999", "--last-rate must be at least 0 and finite, got inf"),
        ("--needed x --count 1.5", "--count takes INT, got '1.5'"),
        ("--needed x --share all", "--share takes FLOAT|{auto}, got 'all'"),
        ("--needed x --size 1", "--size needs 2 values"),
        ("--needed x --size 1 wide", "--size takes INT INT, got '1', 'wide'"),
        ("--needed x --size 1 2 3", "unknown: 3; --help lists the flags"),
        ("--needed x --many 1 few", "--many takes [INT [INT ...]], got '1', 'few'"),
        ("--needed x --words a", "--words takes [STR INT [STR INT ...]]"),
        ("--needed x --form columns", "--form takes one of 'rows', 'heads', got 'columns'"),
        ("--needed x --cuont 3", "unknown: --cuont, 3; did you mean --count INT"),
        ("--needed x --zzz " + "very/long/" * 30, f"unknown: --zzz, {'very/long/' * 30}; --help lists the flags"),
        ("--needed x --ratee 1 --cout 2", "unknown: --ratee, 1, --cout, 2; similar to --ratee: --rate FLOAT"),
    ],
)
def test_a_mistake_of_the_flags_is_one_line(argv, message, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit) as left:
        run(pytest.fail, Kinds, argv.split())
    said = capsys.readouterr()
    assert left.value.code == 2 and not said.out and os.environ["COLUMNS"] == "60"
    if argv.count("--") < 3:
        assert said.err == f"error: {message}\n"
    else:  # tyro lists the unknown flags in any order
        assert said.err.count("\n") == 1 and "similar to --cout: --count INT" in said.err
        assert message.split("; ")[0] in said.err and message.split("; ")[1] in said.err


@pytest.mark.parametrize(
    "variables", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=["UTF-8", "C"]
)
def test_a_mistake_of_the_flags_is_one_line_on_a_terminal(variables):
    """tyro draws a frame there, in colour."""
    main, terminal = pty.openpty()
    code = "from dataclasses import make_dataclass as make; from trainkit_gka import cli; "
    code += "cli.run(print, make('Command', [('depth', int, 1)], namespace={'__doc__': 'A command.'}))"
    environment = {**processes.environment(), "TERM": "xterm", **variables}
    words = [sys.executable, "-c", code, "--depht", "4"]
    done = subprocess.run(words, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, cwd=ROOT)
    said = os.read(main, 10_000).decode()
    os.close(main)
    os.close(terminal)
    assert done.returncode == 2, said
    assert re.fullmatch(r"error: unknown: --depht, 4; did you mean --depth .*\r\n", said), said
