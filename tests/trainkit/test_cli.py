"""Command lines: every flag explained, every mistake one line and exit code 2, every passing fault one line and 75."""

import ast
import errno
import importlib
import inspect
import io
import itertools
import os
import re
import subprocess
import textwrap
from dataclasses import dataclass, fields

import pytest

import processes
from sources import ENTRY_POINT, ROOT, tracked
from trainkit.cli import UserError, command_line, run

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
    assert " -m trainkit.torchrun --standalone --nproc-per-node 2 " in command_line()


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
    for field, doc in docs.items():
        assert re.search(rf"--{field.replace('_', '-')}[ ,\n]", text), field
        assert re.sub(r"\s", "", doc) in unwrapped, field
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


@pytest.mark.parametrize("argv", [["--depth", "deep"], ["--depth"], ["20"]])
def test_a_value_that_does_not_parse_is_2(argv, capsys):
    assert call(pytest.fail, *argv) == 2
    assert argv[-1] in capsys.readouterr().err
