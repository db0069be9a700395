"""Ten minutes of a GPU: which steps run, resume and are stopped, and the folder that is carried."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
import zipfile

import pytest

from nanochat_gka.train import TrainConfig
from processes import still_there
from runs.bench import attention, deit, gpt, parts
from runs.gpu import __main__ as program
from runs.gpu import carry
from runs.gpu.steps import Step, all_steps
from sources import ROOT
from trainkit_gka import cli

WORK = """
import pathlib, signal, subprocess, sys, time
kind, place = sys.argv[1], pathlib.Path(sys.argv[2])
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    place.write_text(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid))
if kind == "saves" and not place.exists():
    signal.signal(signal.SIGTERM, lambda *_: (place.write_text("saved"), sys.exit(0)))
    time.sleep(600)
time.sleep(600 * (kind == "deaf"))
sys.exit("the last line" if kind == "fails" else 0)
"""
WHEEL = {"METADATA": "Metadata-Version: 2.1\nName: carried-thing\nVersion: 1.0\n", "RECORD": ""}
WHEEL["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def call(tmp_path, capsys):
    """Runs steps of the command WORK for `left` seconds; returns (output, seconds)."""
    (tmp_path / "gpu/site").mkdir(parents=True)
    (tmp_path / "gpu/site/work.py").write_text(WORK)

    def run(*steps, left=60.0):
        places = ["--base", str(tmp_path), "--results", str(tmp_path / "results")]
        minutes, began = str((left + program.ENDING) / 60), time.monotonic()
        program.Call(program.parse(["--quick", "--minutes", minutes, *places]), began).run(list(steps))
        return capsys.readouterr().out, time.monotonic() - began

    return run


def step(kind, tmp_path, seconds=1.0, module="work", **about):
    return Step(kind, seconds, [[module, kind, str(tmp_path / kind)]], **about)


def test_what_fits_runs_once_and_a_failure_is_a_line(call, tmp_path, monkeypatch):
    monkeypatch.setitem(program.NEEDS, "lacking", ["no_such_package"])
    steps = [step("fails", tmp_path), step("works", tmp_path), step("long", tmp_path, seconds=100)]
    steps += [step("absent", tmp_path, module="lacking"), step("unfed", tmp_path, module="nanochat_gka.train")]
    output, _ = call(*steps)
    assert "failed after" in output and "the last line" in output and "works: about 1 s" in output
    left_over = output.split("Left for the next call:")[1].strip().splitlines()
    assert [line.split(":")[0].strip() for line in left_over] == ["fails", "long", "absent", "unfed"]
    with open(tmp_path / "gpu/steps.jsonl", "a") as file:
        file.write('{"cut')  # the call was killed
    for _ in range(2):
        output, _ = call(*steps[:2])
        assert "fails: about 0 s" in output and "works: finished before" in output
    for name, fails in (("works", False), ("fails", True)):
        monkeypatch.setattr(program, "miniature", lambda _, name=name: [step(name, tmp_path)])
        with pytest.raises(SystemExit, match="1") if fails else contextlib.nullcontext():
            program.main(["--device-type", "cpu", "--quick", "--base", str(tmp_path)])


def test_what_outlives_its_time_is_stopped_and_what_saves_continues(call, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "GRACE", {True: 2.0, False: 1.0})
    deaf, saves = step("deaf", tmp_path), step("saves", tmp_path, seconds=300, least=0.1)
    output, seconds = call(deaf, left=3)
    assert "deaf: stopped" in output and seconds < 20 and not still_there([int((tmp_path / "deaf").read_text())])
    assert program.estimate(deaf, list(program.read_lines(tmp_path / "gpu/steps.jsonl"))) > deaf.seconds
    assert "saves: stopped" in call(saves, left=4)[0] and (tmp_path / "saves").read_text() == "saved"
    assert "finished after" in call(saves, left=4)[0]


def test_every_command_of_a_gpu_is_understood():
    configs = {
        attention: attention.AttentionConfig,
        deit: deit.DeitConfig,
        gpt: gpt.GPTBenchConfig,
        parts: parts.PartsConfig,
    }
    modules = {module.__name__: (module, config) for module, config in configs.items()}
    for name, *words in (command for step in all_steps() for command in step.commands):
        if name in modules:
            module, config = modules[name]
            chosen = cli.parse(config, words).choose(module.Case.parse, module.standard_cases, "cuda")
            assert module is not gpt or [case.config(kind) for case, _ in chosen for kind in gpt.KINDS]
        elif name == "pytest":
            assert all((ROOT / word).is_file() for word in words if word.startswith("tests/"))
        else:
            cli.parse(TrainConfig, words).check()


def test_the_carried_folder_brings_packages_and_the_same_rows(packed, tmp_path, monkeypatch):
    def fetch(folder, python):
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "carried_thing-1.0-py3-none-any.whl", "w") as wheel:
            for name, text in WHEEL.items():
                wheel.writestr(f"carried_thing-1.0.dist-info/{name}", text)

    monkeypatch.setattr(carry, "fetch", fetch)
    rows = packed / "packed"
    carry.pack(tmp_path / "carried", rows, "3.12")
    unpacked = carry.unpack(tmp_path / "carried", tmp_path / "rows")
    before, after = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (rows, unpacked))
    assert before == after
    carry.install(tmp_path / "carried", tmp_path / "site")
    assert list((tmp_path / "site").glob("carried_thing*"))


@pytest.mark.parametrize("only", [["--only", "operator-preset", "gpt-parts"], pytest.param([], marks=pytest.mark.slow)])
def test_a_copied_tree_runs_in_miniature(packed, tmp_path, only):
    """Without .git."""
    ignored = shutil.ignore_patterns("*.jsonl", "log", "__pycache__")
    for name in ("gka", "trainkit_gka", "nanochat_gka", "deit_gka", "runs", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {name: os.environ[name] for name in os.environ.keys() - {"PYTHONPATH", "PYTEST_XDIST_WORKER"}}
    words = ["-m", "runs.gpu", "--device-type", "cpu", "--quick", "--data", packed / "packed", *only]
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Nothing is left." in done.stdout, done.stdout + done.stderr
    assert "gka" in done.stdout.split("What was learned")[1]
