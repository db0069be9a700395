"""Command lines: every flag explained, every mistake one line and exit code 2, every passing fault one line and 75."""

import ast
import errno
import importlib
import inspect
import io
import itertools
import os
import pty
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest

import processes
from sources import ENTRY_POINT, ROOT, tracked
from trainkit_gka.cli import UserError, command_line, run

CONFIGS = {
    "nanochat_gka.train": "TrainConfig",
    "nanochat_gka.pack": "PackConfig",
    "nanochat_gka.corpus": "CorpusConfig",
    "nanochat_gka.tokenizer": "TokenizerConfig",
    "nanochat_gka.evaluate": "EvaluateConfig",
    "nanochat_gka.accounting": "AccountingConfig",
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


def test_a_bug_keeps_its_traceback():
    def crash(config):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(crash, Command, [])


def field_docs(config_class) -> dict[str, str]:
    """The strings under the fields, from the source, inherited ones included."""
    docs = {}
    for base in [base for base in reversed(config_class.__mro__) if base is not object]:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        docs |= {
            a.target.id: b.value.value
            for a, b in itertools.pairwise(body)
            if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)
        }
    return docs


@pytest.mark.parametrize("module,name", CONFIGS.items(), ids=CONFIGS.values())
def test_help_names_and_explains_every_flag(module, name, capsys):
    module = importlib.import_module(module)
    config_class, docs = getattr(module, name), field_docs(getattr(module, name))
    assert docs.keys() == {field.name for field in fields(config_class)}, "a field without a docstring"
    with pytest.raises(SystemExit) as exit_info:
        run(module.main, config_class, ["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    unwrapped = re.sub(r"[\s│]", "", text)
    for name, doc in docs.items():
        assert re.search(rf"--{name.replace('_', '-')}[ ,\n]", text), name
        assert re.sub(r"\s", "", doc) in unwrapped, name
    assert re.sub(r"\s", "", inspect.getdoc(config_class)) in unwrapped


@pytest.fixture(scope="module")
def tree():
    return state_of_the_tree()


def state_of_the_tree():
    return {path: (ROOT / path).stat().st_mtime_ns for path in tracked()}


@pytest.mark.parametrize("path", COMMANDS, ids=str)
def test_help_is_a_sentence_and_does_nothing_else(path, tmp_path, tree):
    if path.stem == "harness":
        pytest.importorskip("lm_eval")
    module = ".".join(path.with_suffix("").parts).removesuffix(".__main__")
    done = processes.call(module, "--help", folder=tmp_path)
    text = " ".join(re.sub("[│╭╰─╮╯]", " ", done.stdout).split())
    assert re.search(r"(^| )[A-Z][a-z]+ [^.]*\w\.( |$)", text) and not done.stderr, done
    assert state_of_the_tree() == tree


@pytest.mark.parametrize("module,name", CONFIGS.items(), ids=CONFIGS.values())
def test_an_unknown_flag_is_2(module, name, capsys):
    module = importlib.import_module(module)
    with pytest.raises(SystemExit) as exit_info:
        run(module.main, getattr(module, name), ["--warp-factor", "9"])
    assert exit_info.value.code == 2
    assert "--warp-factor" in capsys.readouterr().err


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
        ("--needed x --count=", "--count takes INT, got ''"),
        ("--needed x --rate fast", "--rate takes FLOAT, got 'fast'"),
        ("--needed x --on perhaps", "unknown: perhaps; --help lists the flags"),
        ("--needed x --maybe so", "--maybe takes {None}|INT, got 'so'"),
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
    with pytest.raises(SystemExit) as left:
        run(pytest.fail, Kinds, ["--help"])
    assert left.value.code == 0 and max(map(len, capsys.readouterr().out.splitlines())) <= 60


@pytest.mark.parametrize(
    "variables", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=["UTF-8", "C"]
)
def test_a_mistake_of_the_flags_is_one_line_on_a_terminal(variables):
    """tyro draws a frame there, in colour."""
    main, terminal = pty.openpty()
    environment = {**processes.environment(), "TERM": "xterm", **variables}
    words = [sys.executable, "-m", "nanochat_gka.accounting", "--depht", "4"]
    done = subprocess.run(words, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, cwd=ROOT)
    said = os.read(main, 10_000).decode()
    os.close(main)
    os.close(terminal)
    assert done.returncode == 2 and re.fullmatch(r"error: unknown: --depht, 4; did you mean --depths? .*\r\n", said), (
        said
    )


@pytest.mark.parametrize("module", ["nanochat_gka.train", "deit_gka.train"])
def test_help_of_a_trainer_is_in_groups(module, capsys):
    module = importlib.import_module(module)
    titles, known = (
        ["model", "data", "schedule", "optimiser", "logging", "run"],
        {f.name for f in fields(module.TrainConfig)},
    )
    named = [name for names in module.TrainConfig.GROUPS.values() for name in names.split()]
    assert len(set(named)) == len(named) and set(named) < known
    with pytest.raises(SystemExit):
        run(pytest.fail, module.TrainConfig, ["--help"])
    plain = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    boxes = re.split(r"^\W*(\w+) options\W*$", plain, flags=re.MULTILINE)
    shown = dict(zip(boxes[1::2], boxes[2::2]))
    assert [title for title in shown if title in titles] == titles
    for title, names in module.TrainConfig.GROUPS.items():
        assert all(f"--{name.replace('_', '-')}" in shown[title] for name in names.split()), title
    assert "--device-type" in shown["run"] and "--seed" in shown["run"]
