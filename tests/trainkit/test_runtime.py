"""Files, locks, devices, logs and results: what every command of the project stands on."""

import errno
import importlib.metadata
import json
import re
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import tiny
from trainkit_gka import compiling, results
from trainkit_gka.cli import PassingFault, UserError
from trainkit_gka.command import command_line
from trainkit_gka.distributed import Runtime, setup
from trainkit_gka.exports import export_folder
from trainkit_gka.files import atomic_folder, locked
from trainkit_gka.progress import Pace, RunLog
from trainkit_gka.results import append_result, describe_hardware, is_processor, processor_name
from trainkit_gka.run_config import RunConfig

HERE = Runtime(0, 1, torch.device("cpu"))

# Files


def test_atomic_folder_is_replaced_or_stays(tmp_path):
    """Also where a kill came between the two renames."""
    for content in ("old", "new"):
        with atomic_folder(tmp_path / "folder") as temporary:
            assert not any(temporary.iterdir()) and temporary.parent == tmp_path
            (temporary / "inner").mkdir()
            (temporary / "inner" / content).touch()
        assert [path.name for path in tmp_path.rglob("*")] == ["folder", "inner", content]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "folder") as temporary:
            (temporary / "half").touch()
            raise ZeroDivisionError
        assert [path.name for path in tmp_path.rglob("*")] == ["folder", "inner", "new"]
        (tmp_path / "folder").rename(tmp_path / ".tmp-replaced-folder")


def test_an_export_does_not_take_the_place_of_other_files(tmp_path):
    (tmp_path / "notes.txt").touch()
    with tiny.one_line_error("is not empty and does not hold an exported model"):
        export_folder(tmp_path, lambda: True).__enter__()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_locks_can_be_used_with_a_warning(number, tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(number, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    with locked(tmp_path, "packing"):
        assert "no locks" in capsys.readouterr().err


# Devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error is for machines without a CUDA device")
def test_absent_device_is_refused():
    with tiny.one_line_error("no CUDA device is visible; use --device-type cpu"):
        setup("cuda")


def test_without_a_compiler_compiling_is_refused_where_it_is_asked_for_and_left_out_elsewhere(no_compiler, capsys):
    with tiny.one_line_error(r"^--compile on: "):
        compiling.mode("--compile", "on", "off", HERE)
    assert {compiling.mode("--compile", *words, HERE) for words in (("off", "on"), ("auto", "off"))} == {"off"}
    assert not capsys.readouterr().out
    assert compiling.mode("--compile", "auto", "max-autotune", HERE) == "off"
    assert re.fullmatch("--compile auto: .*\n", capsys.readouterr().out)


@tiny.needs_compiler
def test_a_machine_that_can_compile_does():
    assert compiling.mode("--compile", "auto", "on", HERE) == "on"


@pytest.mark.parametrize("failures, code", [([PassingFault], 75), ([UserError], 2), ([PassingFault, UserError], 2)])
def test_a_process_leaves_with_the_code_of_those_that_failed(failures, code, monkeypatch):
    """A mistake on one of them decides: torchrun need not try it again."""
    kinds = iter([UserError, PassingFault])  # each process asks for both, in turn
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flag: flag.add_(failures.count(next(kinds))))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as end:
        Runtime(0, 3, torch.device("cpu")).agree(lambda: "ready")
    assert end.value.code == code


# Logs and results


def strict(line: str):
    """JSON as other programs read it: NaN and Infinity are not in it."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_lines_are_on_disk_as_soon_as_they_are_logged_and_are_json(tmp_path, capsys):
    log = RunLog(RunConfig(tmp_path, "run"))
    nan = float("nan")
    log.log("train", 1, "step [bold]1[/bold]", loss=nan, rate=float("-inf"), text="NaN", sigma={"0": [1.0, nan]})
    record = strict(log.path.read_text())
    assert record.pop("time") > 0
    assert record == dict(event="train", step=1, loss=None, rate=None, text="NaN", sigma={"0": [1.0, None]})
    assert capsys.readouterr().out == "step [bold]1[/bold]\n"
    log.close()


def test_pace_leaves_out_the_first_steps():
    now = [0.0]
    pace = Pace(2, clock=lambda: now[0])
    # The first two steps compile; the last is followed by an evaluation.
    for seconds, remaining in ((100, None), (50, None), (4, 40), (2, 30), (9, 50)):
        now[0] += seconds
        pace.step()
        assert pace.seconds_for(10) == remaining
    now[0] += 6
    assert pace.seconds_for(10) == 70


def test_a_processor_is_described_by_name_instructions_and_threads(threads, monkeypatch):
    entries = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: {}\nflags\t\t: fpu\n"
    assert processor_name(entries.format("AMD EPYC")) == "AMD EPYC family 25 model 17"  # a name without a number
    assert processor_name(entries.format("Intel Xeon 8488C")) == "Intel Xeon 8488C"
    threads(2)
    name = describe_hardware(torch.device("cpu"))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    limited = describe_hardware(torch.device("cpu"))
    assert name.endswith(", 2 threads") and limited == name.replace(", 2 threads", " held to AVX2, 2 threads")
    assert is_processor(name) and is_processor(limited) and not is_processor("NVIDIA H100 80GB HBM3")


def test_result_line_names_commit_command_and_hardware(tmp_path):
    path, config = tmp_path / "deep" / "results.jsonl", {"out": Path("out/runs"), "depth": 20}
    for metrics in ({"val_bpb": 0.5}, {"val_bpb": 0.25}):
        append_result(path, "pretrain", config, metrics, torch.device("cpu"), world_size=3)
    record = strict(path.read_text().splitlines()[1])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", record.pop("date"))
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", record.pop("commit"))
    assert record.pop("command") == command_line() != "" and is_processor(record.pop("hardware"))
    expected = {"kind": "pretrain", "processes": 3, "torch": torch.__version__}
    assert record == {**expected, "config": {"out": "out/runs", "depth": 20}, "metrics": {"val_bpb": 0.25}}


def test_the_commit_is_that_of_the_start_and_a_changed_kernel_is_marked(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    (tmp_path / "kernel.cpp").write_text("// 1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a")
    monkeypatch.setattr(results, "PROJECT", tmp_path)
    results.git_commit.cache_clear()
    first = results.git_commit()
    for changed, mark in (("notes.md", ""), ("new.py", "+"), ("kernel.cpp", "+")):
        (tmp_path / changed).write_text("// 2")
        assert results.git_commit.__wrapped__() == first + mark and results.git_commit() == first != "unknown"
        git("stash", "-uq")
    monkeypatch.setattr(results, "PROJECT", tmp_path / "copy")
    assert results.git_commit.__wrapped__().endswith(", installed")
    monkeypatch.setattr("importlib.metadata.version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    assert results.git_commit.__wrapped__() == "unknown"
    results.git_commit.cache_clear()
