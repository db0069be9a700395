"""Command lines: every flag explained, every mistake one line and exit code 2, every passing fault one line and 75."""

import errno
import io
import math
import re
import subprocess
import sys
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from safetensors import SafetensorError

import processes
from sources import ENTRY_POINT, ROOT, flags_of, tracked
from tiny import exit_code
from trainkit_gka import cli
from trainkit_gka.cli import Bounds, Group, UserError, flag_of, run

COMMANDS = [path for path in tracked(".py") if path.parts[0] != "tests" and ENTRY_POINT in (ROOT / path).read_text()]


@dataclass
class Command:
    """A command for these tests."""

    batch_size: int = 64


@pytest.mark.parametrize(
    "error, code, message",
    [
        (UserError("--depth 20 is too deep"), 2, "error: --depth 20 is too deep"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "full"), 2, "error: the disk is full"),
        (OSError(errno.ENOENT, "gone", "/data/rows.bin"), 2, "error: /data/rows.bin: gone"),
        (OSError(errno.ESTALE, "stale", "/data/rows.bin"), 75, "error: /data/rows.bin: stale"),
        (OSError(errno.EIO, "it does not answer"), 75, "error: a disk: it does not answer"),
        (OSError(errno.EDQUOT, "full"), 2, "error: the quota of the disk is used up"),
        (OSError(errno.EFBIG, "full"), 2, "error: a file would be larger than the system allows (see ulimit -f)"),
        (SafetensorError("I/O error: full (os error 122)"), 2, "error: the quota of the disk is used up"),
        (type("OutOfMemoryError", (RuntimeError,), {})(), 2, "error: out of GPU memory; lower --batch-size (now 64): "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_ends_the_command_with_one_line_and_its_code(error, code, message, capsys):
    def fail(config):
        raise error

    assert exit_code(fail, Command) == code
    output = capsys.readouterr()
    assert output.err.startswith(message) and output.err.count("\n") == 1 and not output.out


def test_an_error_is_the_networks_if_one_of_its_causes_is():
    cause, error, handled = ConnectionError("no answer"), ValueError("no such dataset"), ValueError("no such dataset")
    error.__cause__ = handled.__context__ = cause
    handled.__suppress_context__ = True  # as "raise ... from None" sets it
    assert cli.is_network(error) and cli.is_network(TimeoutError())
    assert not cli.is_network(handled) and not cli.is_network(OSError("disk"))


def test_unprintable_characters_become_question_marks(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    run(lambda config: print("\N{GREEK SMALL LETTER SIGMA} = 2"), Command, [])
    stream.flush()
    assert stream.buffer.getvalue() == b"? = 2\n"


def test_a_reader_that_leaves_ends_the_command_without_a_word():
    code = "from trainkit_gka import cli; cli.run(lambda _: [print(n) for n in range(10**6)], dict, [])"
    words = f"{sys.executable} -c '{code}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (141, "0\n", "")


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda config: 1 / 0, Command, [])


# The flags of a command


@pytest.mark.parametrize("package", ["nanochat_gka", "deit_gka"])
def test_help_names_and_explains_every_flag(package, capsys):
    config_class = flags_of(package)[f"{package}.train"]
    assert exit_code(pytest.fail, config_class, "--help") == 0
    text, docs = re.sub("\x1b\\[[0-9;]*m|[\\s│]", "", capsys.readouterr().out), cli._field_docs(config_class)
    for name in [one.name for one in fields(config_class)]:
        assert flag_of(name) in text and re.sub(r"\s", "", docs[name]) in text, name


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMANDS, ids=str)
def test_every_command_has_help(path, tmp_path):
    module = ".".join(path.with_suffix("").parts).removesuffix(".__main__")
    done = processes.call(module, "--help", folder=tmp_path)
    assert done.stdout and not done.stderr, done


BOUNDED = [  # the type of a flag, values that are refused and values that are not
    (Annotated[float, Bounds(0)], (-0.1, math.nan, math.inf), (0.0,)),
    (Annotated[float, Bounds(0, 1, open_least=True)], (0.0, 1.1, math.nan), (1.0,)),
    (Annotated[float, Bounds(0, 1)], (-0.1, 2.0, math.inf), (0.0,)),
    (Annotated[float, Bounds(0, 1, open_most=True)], (1.0, -0.1), (0.99,)),
    (Annotated[int, Bounds(1, other=(-1, "all"))], (0, -2), (-1,)),
    (Annotated[int | str, Bounds(1)], (0,), (1, "auto")),
    (Annotated[tuple[int, ...], Bounds(1)], ((3, 0),), ((), (1, 2))),
    (cli.Seed, (-1, 2**63), (2**63 - 1,)),
]


@pytest.mark.parametrize("kind, refused, taken", BOUNDED, ids=str)
def test_a_number_out_of_bounds_is_named(kind, refused, taken):
    config_class = make_dataclass("Bounded", [("a_number", kind)])
    for value in refused:
        with pytest.raises(UserError, match=r"^--a-number must be "):
            cli.check_bounds(config_class(value))
    for value in taken:
        cli.check_bounds(config_class(value))


@dataclass(frozen=True)
class Grouped:
    """Flags of every kind, in boxes and outside."""

    needed: Annotated[Path, Group.DATA]
    """a path"""
    data: str = "digits"
    """named like a group"""
    depth: cli.MayChange[Annotated[cli.Count, Group.MODEL]] = 20
    """number of layers"""
    size: tuple[int, int] = (1, 2)
    """two whole numbers"""
    form: Literal["rows", "heads"] = "rows"
    """a word"""


@pytest.mark.parametrize(
    "argv, flag",
    [
        ("", "--needed"),
        ("--needed x --depth 1.5", "--depth"),
        ("--needed x --size 1", "--size"),
        ("--needed x --form columns", "--form"),
        ("--needed x --detph 3", "--detph"),
        ("--needed x --depth 0", "--depth"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_flags_are_named_on_rank_0_and_exit_with_2(argv, flag, rank, capsys, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert exit_code(pytest.fail, Grouped, *argv.split()) == 2
    output = capsys.readouterr()
    assert not output.out and "Traceback" not in output.err
    # Bounds are checked after parsing: each rank names the flag if it is alone.
    assert flag in output.err if rank == 0 or argv.endswith(" 0") else not output.err


def test_flags_of_a_group_share_a_box_and_settings_stay_flat(capsys):
    assert cli.parse(Grouped, ["--depth", "3", "--needed", "x"]) == Grouped(Path("x"), "digits", 3)
    assert exit_code(pytest.fail, Grouped, "--help") == 0
    _, *parts = re.split(r"^\W*((?:\w+ )?options)\b.*", capsys.readouterr().out, flags=re.MULTILINE)
    flags = {title: re.findall(r" --(\w+) [A-Z{]", text) for title, text in zip(parts[::2], parts[1::2])}
    assert flags == {"options": ["data", "size", "form"], "model options": ["depth"], "data options": ["needed"]}
