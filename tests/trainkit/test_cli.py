"""Command lines: every flag explained, every mistake one line and exit code 2, every passing fault one line and 75."""

import ast
import errno
import importlib
import inspect
import io
import itertools
import math
import os
import pty
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import pytest

import processes
from sources import ENTRY_POINT, ROOT, tracked
from trainkit_gka.cli import Bounds, Seed, UserError, check_bounds, command_line, run

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


def test_a_full_disk_is_one_line(capsys):
    def fill(config):
        with open("/dev/full", "w") as file:  # Linux's own full disk
            file.write("x")

    assert call(fill) == 2
    assert capsys.readouterr().err == "error: the disk is full; free some space and run the same command again\n"


@pytest.mark.parametrize(
    "number, code",
    [(errno.ESTALE, 75), (errno.ETIMEDOUT, 75), (errno.ENOENT, 2), (errno.EACCES, 2), (errno.EDQUOT, 2)],
    ids=["stale handle", "timeout", "missing", "forbidden", "over quota"],
)
def test_a_file_that_fails_is_one_line_and_75_if_the_next_try_may_read_it(number, code, capsys):
    def read(config):
        raise OSError(number, os.strerror(number), "/data/rows.bin")

    assert call(read) == code
    advice = "; run the same command again" if code == 75 else ""
    assert capsys.readouterr().err == f"error: /data/rows.bin: {os.strerror(number)}{advice}\n"


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


def documented(config_class) -> dict[str, str]:
    """The strings under the fields, from the source, inherited ones included."""
    docs = {}
    for base in [base for base in reversed(config_class.__mro__) if base is not object]:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for one, two in itertools.pairwise(body):
            if isinstance(one, ast.AnnAssign) and isinstance(two, ast.Expr):
                docs[one.target.id] = two.value.value
    return docs


def help_of(config_class, capsys) -> str:
    with pytest.raises(SystemExit) as left:
        run(pytest.fail, config_class, ["--help"])
    assert left.value.code == 0
    return re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)


@pytest.mark.parametrize("module,name", CONFIGS.items(), ids=CONFIGS)
def test_help_names_and_explains_every_flag(module, name, capsys):
    config_class = getattr(importlib.import_module(module), name)
    docs, text = documented(config_class), help_of(config_class, capsys)
    assert docs.keys() == {field.name for field in fields(config_class)}, "a field without a docstring"
    unwrapped = re.sub(r"[\s│]", "", text)
    for name, doc in docs.items():
        assert re.search(rf"--{name.replace('_', '-')}[ ,\n]", text), name
        assert re.sub(r"\s", "", doc) in unwrapped, name
    assert re.sub(r"\s", "", inspect.getdoc(config_class)) in unwrapped


@pytest.mark.parametrize("module", ["nanochat_gka.train", "deit_gka.train"])
def test_help_of_a_trainer_is_in_groups(module, capsys):
    config_class = importlib.import_module(module).TrainConfig
    named = [name for names in config_class.GROUPS.values() for name in names.split()]
    assert len(set(named)) == len(named) and set(named) < {field.name for field in fields(config_class)}
    boxes = re.split(r"^\W*(\w+) options\W*$", help_of(config_class, capsys), flags=re.MULTILINE)
    shown = dict(zip(boxes[1::2], boxes[2::2]))
    assert [title for title in shown if title != "run"][-len(config_class.GROUPS) :] == list(config_class.GROUPS)
    for title, names in config_class.GROUPS.items():
        assert all(f"--{name.replace('_', '-')}" in shown[title] for name in names.split()), title
    assert "--device-type" in shown["run"] and "--seed" in shown["run"]


def state_of_the_tree():
    return {path: (ROOT / path).stat().st_mtime_ns for path in tracked()}


@pytest.fixture(scope="module")
def tree():
    return state_of_the_tree()


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMANDS, ids=str)
def test_help_is_a_sentence_and_does_nothing_else(path, tmp_path, tree):
    module = ".".join(path.with_suffix("").parts).removesuffix(".__main__")
    done = processes.call(module, "--help", folder=tmp_path)
    text = " ".join(re.sub("[│╭╰─╮╯]", " ", done.stdout).split())
    assert re.search(r"(^| )[A-Z][a-z]+ [^.]*\w\.( |$)", text) and not done.stderr, done
    assert state_of_the_tree() == tree


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
    "field, refused, words",
    [
        ("rate", (-0.1, math.nan, math.inf, -math.inf), "at least 0 and finite"),
        ("share", (0.0, 1.1, math.nan), "above 0 and at most 1"),
        ("part", (-0.1, 2.0, math.inf), "between 0 and 1"),
        ("rest", (1.0, -0.1), "at least 0 and below 1"),
        ("count", (0, -2), "at least 1, or -1 for all"),
        ("size", (0,), "at least 1"),
        ("seed", (-1, 2**63), f"between 0 and {2**63 - 1}"),
    ],
)
def test_a_number_out_of_bounds_is_named_with_its_bounds(field, refused, words):
    for value in refused:
        with pytest.raises(UserError, match=f"^--{field} must be {words}, got {value}$"):
            check_bounds(Bounded(**{field: value}))


def test_numbers_within_bounds_and_what_has_none_are_taken(capsys):
    check_bounds(Bounded())
    check_bounds(Bounded(rate=0.0, share=1.0, part=0.0, rest=0.99, count=-1, size=1, sizes=(), seed=2**63 - 1))
    with pytest.raises(UserError, match="--sizes must be at least 1, got 0"):
        check_bounds(Bounded(sizes=(3, 0)))
    with pytest.raises(SystemExit) as left:
        run(pytest.fail, Bounded, ["--part", "1e999"])
    assert left.value.code == 2 and capsys.readouterr().err == "error: --part must be between 0 and 1, got inf\n"


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
    on: bool = False
    """a switch"""
    maybe: int | None = None
    """nothing or a whole number"""
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
    last_rate: float = 1.0
    """a number"""


@pytest.mark.parametrize(
    "argv, message",
    [
        ("", "missing: --needed PATH"),
        ("--neded x --count 2", "missing: --needed PATH; unknown: --neded, x; --help lists the flags"),
        ("--needed", "--needed needs a value"),
        ("--needed x --count", "--count needs a value"),
        ("--needed x --count 1.5", "--count takes INT, got '1.5'"),
        ("--needed x --on perhaps", "unknown: perhaps; --help lists the flags"),
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


def test_help_has_the_width_of_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, help_of(Kinds, capsys).splitlines())) <= 60


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
