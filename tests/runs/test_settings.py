"""Settings of make with characters that mean something to make or the shell: they arrive as they are, or are refused.

In place of the environment's Python stands a script that notes the words it is called with.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from makefile import SETTINGS, TARGETS
from runs.make import SMALL_LANGUAGE, SMALL_VISION, check_gpu, check_images
from runs.settings import PATHS, WHOLE, Problem, flags_of, read
from sources import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

RUN_IT = "$(shell touch canary) $$(touch canary) `touch canary`; touch canary | touch canary & touch canary"
ODD = f' it\'s "b" {RUN_IT} > canary # % \\ \\# é : ~ * = , ${{x}} $HOME (a) [b]  two\tend'
REFUSED = {*WHOLE, "RDZV", "WANDB_MODE"}  # what is not a number, a place or a mode
TEXTS = [name for name in SETTINGS if name not in REFUSED | {"ARGS", "PYTHON", "NANOCHAT_SRC", "DEIT_SRC"}]
ARGS = f"--device-type cpu --odd 'it {RUN_IT}' \"$(touch canary)`touch canary`\" $(touch canary);touch canary"
ARGS_WORDS = [
    "--device-type",
    "cpu",
    "--odd",
    f"it {RUN_IT}",
    "$(touch canary)`touch canary`",
    "$(touch",
    "canary);touch",
]
ARGS_WORDS += ["canary"]


def shown(done):
    """The commands that make shows, after the launcher's own line."""
    return "".join(done.stdout.splitlines(keepends=True)[1:])


@pytest.fixture
def recorded(tmp_path, ready):
    """The words of every call of the environment's Python so far."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$@" >> calls\nprintf "\\n\\0" >> calls\n')
    python.chmod(0o755)
    calls = tmp_path / "calls"
    return lambda: (
        [call.strip("\0").split("\0") for call in calls.read_text().split("\0\n")[:-1]] if calls.exists() else []
    )


@pytest.fixture
def odd(tmp_path):
    """Every setting that is a path or a text, with odd characters. The folders are there."""
    settings = {name: name + ODD for name in TEXTS}
    for name in PATHS:
        (tmp_path / settings[name]).mkdir()
    python = tmp_path / f"PYTHON{ODD}"
    python.symlink_to(os.path.realpath(sys.executable))
    settings |= {name: name + ODD for name in ("NANOCHAT_SRC", "DEIT_SRC")}
    return {**settings, "PYTHON": f"./{python.name}", "ARGS": ARGS}


@pytest.mark.parametrize("target", [*(name for name in TARGETS if name != "help"), "train-deit-s-vlt"])
def test_odd_settings_arrive_as_they_are_and_run_nothing(make, tmp_path, recorded, odd, target):
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches/requirements.txt").touch()
    settings = [f"{name}={value}" for name, value in odd.items() if (target, name) != ("figures", "TEXT")]
    looked = make("-n", target, *settings)
    assert looked.returncode == 0 and not recorded(), looked.stderr
    make(target, *settings)
    called = recorded()
    for call in called:
        for name in TEXTS:
            assert all(name + ODD in word for word in call if f"{name} it" in word), call
        at = call.index("--device-type") if "--odd" in call else None
        assert at is None or call[at : at + len(ARGS_WORDS)] == ARGS_WORDS
    subprocess.run(["sh", "-e"], input=looked.stdout, cwd=tmp_path, text=True, capture_output=True)
    assert recorded() == called * 2  # make -n shows what runs
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_without_an_environment_it_is_made_once_and_first(make, target):
    lines = make("-n", target, "DATA=digits").stdout.splitlines()
    used = [number for number, line in enumerate(lines) if line.startswith(".venv/bin/")]
    made = [number for number, line in enumerate(lines) if line.endswith(" -m venv .venv")]
    assert made == made[:1] if used else not made
    assert not used or made[0] < used[0]
    assert sum("--editable" in line for line in lines) == len(made)


def test_every_text_reaches_a_command(make, recorded, odd):
    """The test above would pass if the settings went nowhere."""
    settings = [f"{name}={value}" for name, value in odd.items()]
    for target in ("pretrain-d20", "train-deit-ti", "eval-core", "sample", "report"):
        make(target, *settings)
    words = [word for call in recorded() for word in call]
    assert [name for name in TEXTS if not any(name + ODD in word for word in words)] == []
    assert "--odd" in words


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_setting_that_is_no_text_is_refused_before_anything_runs(make, tmp_path, name):
    done = make("-n", "pretrain-d20", f"{name}=1{RUN_IT}", *(["NNODES=2"] if name == "RDZV" else []))
    assert done.returncode == 2 and not shown(done) and not (tmp_path / "canary").exists()
    assert done.stderr.startswith(f"error: {name}=1{RUN_IT} must be") and done.stderr.count("\n") == 2  # one is make's


@pytest.mark.parametrize("name", SETTINGS)
def test_a_line_break_is_refused(make, tmp_path, name):
    done = make("-n", "pretrain-d20", f"{name}=1\n\ttouch canary")
    assert done.returncode == 2 and not shown(done) and not (tmp_path / "canary").exists()
    assert "line break" in done.stderr or (name == "PYTHON" and "set PYTHON=python3.x" in done.stderr)


def test_upstreams_sources_reach_the_patches(make, tmp_path):
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    sources = {name: f"/no/{name}{ODD}" for name in ("NANOCHAT_SRC", "DEIT_SRC")}
    done = make("vendor", *(f"{name}={value}" for name, value in sources.items()))
    assert done.returncode == 2 and not (tmp_path / "canary").exists()
    assert all(f" from {source} (" in done.stderr for source in sources.values())


def test_settings_of_the_environment_run_nothing_either(make, tmp_path):
    done = make("-n", "tokenize", env={"CORPUS": "$(shell touch canary)", "PYTHON": "python3"})
    assert "--source '$(shell touch canary)' " in done.stdout and not (tmp_path / "canary").exists()


@pytest.mark.parametrize("goal", ["train-deit-ti;touch canary", "train-deit-$(shell touch canary)", "a`touch canary`"])
def test_a_target_runs_nothing_that_it_does_not_name(make, tmp_path, goal):
    done = make(goal, "DATA=digits", "ARGS=--device-type cpu")
    assert done.returncode == 2 and not (tmp_path / "canary").exists()
    assert re.search("error: there is (no target|train-deit-.*, not) ", done.stderr)


def test_steps_with_odd_names_are_not_done_again(make, tmp_path, ready):
    base = "a: b's|%#"
    settings = [f"BASE={base}", "CORPUS=builtin"]
    for made in (
        "corpus/builtin/.complete",
        "tokenizer/builtin-32768/tokenizer.json",
        "packed/builtin-32768-2048/manifest.json",
    ):
        assert "nanochat_gka" in make("-n", "tokenize", *settings).stdout
        (tmp_path / base / made).parent.mkdir(parents=True)
        (tmp_path / base / made).touch()
    assert "nanochat_gka" not in make("-n", "tokenize", *settings).stdout


def test_paths_are_those_of_the_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = read({"BASE": "~/out/", "RUN": "-x/", "IMAGE": "/", "TEXT": "~ -x", "NGPU": "07", "DATA": ""})
    assert given == {"BASE": f"{tmp_path}/out", "RUN": "./-x", "IMAGE": "/", "TEXT": "~ -x", "NGPU": "7"}


def test_names_that_are_not_text_come_out_as_they_came_in(make, tmp_path):
    folder = os.fsdecode(b"caf\xe9")
    (tmp_path / folder).mkdir()
    words = ["-n", "tokenize", f"CORPUS={folder}", f"BASE={folder}"]
    shown = subprocess.run(["make", *words], cwd=tmp_path, capture_output=True).stdout
    assert re.search(rb"--corpus 'caf\xe9/corpus/caf\xe9-\d+' --tokenizer 'caf\xe9/tokenizer/caf\xe9-", shown)


def test_a_value_with_a_dash_first_is_no_flag(make):
    words = shlex.split(make("-n", "sample", "RUN=-run", "PROMPT=-5 is").stdout.splitlines()[-1])
    assert words[words.index("--run") + 1] == "./-run" and "--prompt=-5 is" in words


def test_extra_flags_keep_what_the_shell_does_for_them(make, tmp_path):
    for name in ("a.jpg", "b c.jpg"):
        (tmp_path / name).touch()
    line = make("-n", "report", "ARGS=--image *.jpg --out \"my page.html\" --text 'a $ b'").stdout.splitlines()[-1]
    assert line.endswith("""--image *.jpg --out "my page.html" --text 'a $ b'""")
    with pytest.raises(Problem, match="ARGS=--text 'a: no closing quotation"):
        flags_of("--text 'a")


def test_an_exported_run_is_named_without_the_slash_at_the_end(make):
    line = make("-n", "export", "RUN=my runs/d4/").stdout.splitlines()[-1]
    assert shlex.split(line)[-3:] == ["my runs/d4", "--out", "my runs/d4-export"]


@pytest.mark.parametrize(
    "named, count",
    [
        (None, 4),
        ("2,3", 2),
        (" 1 , 0", 2),
        ("", 0),
        ("NoDevFiles", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("1,4,2", 1),
        ("0,1,0", 0),
        ("GPU-2aaa,GPU-0", 2),
        ("GPU-2aaa,GPU-9,GPU-0", 1),
        ("GPU-", 0),
        ("MIG-1b2c", 1),
    ],
)
def test_cuda_visible_devices_decides_the_count_of_processes(make, tmp_path, ready, named, count):
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    lines = "\n".join(f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n}aaa-{n})" for n in range(4))
    smi.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && echo '{lines}'\n")
    smi.chmod(0o755)
    env = {"PATH": f"{smi.parent}:{os.environ['PATH']}"} | ({} if named is None else {"CUDA_VISIBLE_DEVICES": named})
    assert f"NGPU={count} processes" in make("help", env=env).stdout
    line = make("-n", "pretrain-d20", env=env).stdout.splitlines()[-1]
    assert f"--nproc-per-node {count} " in line if count > 1 else "torchrun" not in line


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_the_small_run_that_is_suggested_keeps_what_the_user_gave(make, tmp_path):
    def given(words):
        return dict(word.split("=", 1) for word in words)

    def suggested(*words):
        return shlex.split(make(*words).stderr.partition(" small: ")[2].splitlines()[0])

    images = tmp_path / "my images"
    images.mkdir()
    words = suggested("train-deit-ti", f"DATA={images}", "ARGS=--val-split 'the test'")
    assert words == ["BASE=out/small", f"DATA={images}", f"ARGS={SMALL_VISION} --val-split 'the test'"]
    check_images(given(words))
    assert suggested("train-deit-ti", "DATA=digits", "BASE=b c")[:2] == ["BASE=b c/small", "DATA=digits"]
    words = suggested("pretrain-d20", f"CORPUS={images}", "SEQ=64", "ARGS=--seed 3")
    small = ["make", "pretrain-d20", "DEPTH=4", f"CORPUS={images}", "VOCAB=4096", "SEQ=64"]
    assert words == [*small, f"ARGS={SMALL_LANGUAGE} --seed 3"]
    check_gpu(given(words[2:]))
    assert suggested("pretrain-d20")[3] == "CORPUS=builtin"


def test_what_a_target_runs_may_call_make_itself(make, tmp_path, ready):
    """A command does not see which targets were named: a shell that it starts would run them again."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s" "goals: $GOALS" > seen\n')
    python.chmod(0o755)
    make("test")
    assert (tmp_path / "seen").read_text() == "goals: "
