"""Settings of make with characters that mean something to make or the shell: they arrive as they are, or are refused.

In place of the environment's Python stands a script that notes the words it is called with.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import get_type_hints

import pytest

from makefile import SETTINGS, TARGETS
from nanochat_gka.data import fineweb, tokenizer
from nanochat_gka.pack import PackConfig
from runs import make as launcher
from runs.settings import PATHS, WHOLE, Problem, flags_of, read
from sources import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

RUN_IT = "$(shell touch canary) $$(touch canary) `touch canary`; touch canary | touch canary & touch canary"
ODD = f' it\'s "b" {RUN_IT} > canary # % \\ \\# é : ~ * = , ${{x}} $HOME (a) [b]  two\tend'
REFUSED = {*WHOLE, "RDZV", "WANDB_MODE"}  # what is not a number, a place or a mode
PYTHONS = ("PYTHON", "ENV_PYTHON")
TEXTS = [name for name in SETTINGS if name not in REFUSED | {"ARGS", *PYTHONS, "NANOCHAT_SRC", "DEIT_SRC"}]
ARGS = f"--device-type cpu --odd 'it {RUN_IT}' \"$(touch canary)`touch canary`\" $(touch canary);touch canary"
ARGS_WORDS = ["--device-type", "cpu", "--odd", f"it {RUN_IT}", "$(touch canary)`touch canary`"]
ARGS_WORDS += ["$(touch", "canary);touch", "canary"]


def shown(done):
    """The commands that make shows, after the launcher's own line."""
    return "".join(done.stdout.splitlines(keepends=True)[1:])


@pytest.fixture
def recorded(tmp_path, scripted):
    """The words of every call of the environment's Python so far."""
    scripted('printf "%s\\0" "$@" >> calls\nprintf "\\n\\0" >> calls\n')
    calls = tmp_path / "calls"
    return lambda: (
        [call.strip("\0").split("\0") for call in calls.read_text().split("\0\n")[:-1]] if calls.exists() else []
    )


@pytest.fixture
def odd(tmp_path):
    """Every setting that is a path or a text, with odd characters. The folders are there."""
    settings = {name: name + ODD for name in TEXTS}
    for name in PATHS - {*PYTHONS}:
        (tmp_path / settings[name]).mkdir()
    python = tmp_path / f"PYTHON{ODD}"
    python.symlink_to(os.path.realpath(sys.executable))
    settings |= {name: name + ODD for name in ("NANOCHAT_SRC", "DEIT_SRC")}
    return {**settings, "PYTHON": f"./{python.name}", "ARGS": ARGS}


@pytest.mark.parametrize("target", [*(name for name in TARGETS if name != "help"), "train-deit-s-vlt"])
def test_no_target_lets_a_setting_run_or_change(lines, tmp_path, recorded, odd, target):
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches/requirements.txt").touch()
    settings = {name: value for name, value in odd.items() if (target, name) != ("figures", "TEXT")}
    script = "".join(f"{line}\n" for line in lines(target, look=False, **settings))
    subprocess.run(["sh", "-e"], input=script, cwd=tmp_path, text=True, capture_output=True)
    for call in recorded():
        for name in TEXTS:
            assert all(name + ODD in word for word in call if f"{name} it" in word), call
        at = call.index("--device-type") if "--odd" in call else None
        assert at is None or call[at : at + len(ARGS_WORDS)] == ARGS_WORDS
    assert not (tmp_path / "canary").exists()


def test_every_text_reaches_a_command_through_make_which_shows_what_runs(make, tmp_path, recorded, odd):
    settings = [f"{name}={value}" for name, value in odd.items()]
    for target in ("pretrain-d20", "train-deit-ti", "eval-core", "sample", "report"):
        before = recorded()
        looked = make("-n", target, *settings)
        assert looked.returncode == 0 and recorded() == before, looked.stderr
        make(target, *settings)
        called = recorded()[len(before) :]
        subprocess.run(["sh", "-e"], input=looked.stdout, cwd=tmp_path, text=True, capture_output=True)
        assert called and recorded() == [*before, *called, *called]
    words = [word for call in recorded() for word in call]
    assert [name for name in TEXTS if not any(name + ODD in word for word in words)] == []
    assert "--odd" in words and not (tmp_path / "canary").exists()


def test_settings_of_the_environment_run_nothing_either(make, tmp_path):
    done = make("-n", "tokenize", env={"CORPUS": "$(shell touch canary)", "PYTHON": "python3"})
    assert "--source '$(shell touch canary)' " in done.stdout and not (tmp_path / "canary").exists()


def test_upstreams_sources_reach_the_patches(make, tmp_path):
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    sources = {name: f"/no/{name}{ODD}" for name in ("NANOCHAT_SRC", "DEIT_SRC")}
    done = make("vendor", *(f"{name}={value}" for name, value in sources.items()))
    assert done.returncode == 2 and not (tmp_path / "canary").exists()
    assert all(f" from {source} (" in done.stderr for source in sources.values())


# What is refused, before anything runs


@pytest.mark.parametrize("name", ["NGPU", "RDZV", "WANDB_MODE"])
def test_a_setting_that_is_no_text_is_refused(make, tmp_path, name):
    done = make("-n", "pretrain-d20", f"{name}=1{RUN_IT}", *(["NNODES=2"] if name == "RDZV" else []))
    assert done.returncode == 2 and not shown(done) and not (tmp_path / "canary").exists()
    assert done.stderr.startswith(f"error: {name}=1{RUN_IT} must be") and done.stderr.count("\n") == 2  # one is make's


@pytest.mark.parametrize("name", ["ARGS", "BASE", "NGPU", "PYTHON", "RDZV"])
def test_a_line_break_is_refused(make, tmp_path, name):
    done = make("-n", "pretrain-d20", f"{name}=1\n\ttouch canary")
    assert done.returncode == 2 and not shown(done) and not (tmp_path / "canary").exists()
    assert "line break" in done.stderr or (name == "PYTHON" and "set PYTHON=python3.x" in done.stderr)


@pytest.mark.parametrize("goal", ["train-deit-ti;touch canary", "train-deit-$(shell touch canary)", "a`touch canary`"])
def test_a_target_runs_nothing_that_it_does_not_name(make, tmp_path, goal):
    done = make(goal, "DATA=digits", "ARGS=--device-type cpu")
    assert done.returncode == 2 and not (tmp_path / "canary").exists()
    assert re.search("error: there is (no target|train-deit-.*, not) ", done.stderr)


def test_whole_numbers_have_bounds():
    for name, (least, most) in WHOLE.items():
        assert read({name: f"0{least}"})[name] == str(least)
        for wrong in ("x", "1.5", "1:2", str(least - 1), *([str(most + 1)] if most else [])):
            with pytest.raises(Problem, match=f"{name}={wrong} must be a whole number"):
                read({name: wrong})


def test_bounds_are_those_of_the_flags_that_settings_become():
    flags = {"SHARDS": fineweb.SHARDS, "VOCAB": tokenizer.VOCAB}
    flags["SEQ"] = get_type_hints(PackConfig, include_extras=True)["sequence_len"].__metadata__[0]
    assert {name: WHOLE[name] for name in flags} == {name: (b.least, b.most) for name, b in flags.items()}


def test_paths_are_those_of_the_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = read({"BASE": "~/out/", "RUN": "-x/", "IMAGE": "/", "TEXT": "~ -x", "NGPU": "07", "DATA": ""})
    assert given == {"BASE": f"{tmp_path}/out", "RUN": "./-x", "IMAGE": "/", "TEXT": "~ -x", "NGPU": "7"}


def test_a_quote_that_does_not_end_is_named():
    with pytest.raises(Problem, match="ARGS=--text 'a: no closing quotation"):
        flags_of("--text 'a")


# The number of processes


@pytest.mark.parametrize(
    "named, count",
    [("2,3", 2), (" 1 , 0", 2), ("", 0), ("0,-1,1", 1), ("0,1,0", 0), ("GPU-2aaa,GPU-9,GPU-0", 1), ("MIG-1b2c", 1)],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(named, count):
    assert launcher.visible([f"GPU-{n}aaa-{n}" for n in range(4)], named) == count


@pytest.mark.parametrize("named, count", [(None, 4), ("1", 1)])
def test_a_process_is_started_for_each_visible_gpu(make, tmp_path, ready, named, count):
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    listed = "\n".join(f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n}aaa-{n})" for n in range(4))
    smi.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && echo '{listed}'\n")
    smi.chmod(0o755)
    env = {"PATH": f"{smi.parent}:{os.environ['PATH']}"} | ({} if named is None else {"CUDA_VISIBLE_DEVICES": named})
    done = make("-n", "pretrain-d20", "help", env=env)
    assert f"NGPU={count} processes" in done.stdout
    last = shlex.split(done.stdout.splitlines()[-1])
    assert last[last.index("--nproc-per-node") + 1] == str(count) if count > 1 else "trainkit_gka.torchrun" not in last
