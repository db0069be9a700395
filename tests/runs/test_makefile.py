"""The Makefile: the commands of its targets, what it refuses, and that settings and signals reach the commands."""

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import tyro

import tiny_vision
import vision_runs
from nanochat_gka.accounting import AccountingConfig, account
from nanochat_gka.data import fineweb, tokenizer
from nanochat_gka.train import TrainConfig
from runs import check
from sources import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
CPU, STANDARD = "--device-type cpu", sys.stdlib_module_names
TEXT = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z][a-z0-9-]*):.*  ## ", TEXT, re.MULTILINE)
SETTINGS = re.search(r"^SETTINGS := ((?:.*\\\n)*.*)$", TEXT, re.MULTILINE)[1].replace("\\\n", " ").split()
FILES = ("Makefile", "requirements.txt", "pyproject.toml", "runs/check.py", "trainkit_gka/gpus.py", "patches/apply.py")
NOT_INHERITED = re.compile(f"MAKE.*|MFLAGS|CUDA_VISIBLE_DEVICES|PYTHONPATH|{'|'.join(SETTINGS)}")


class Tree:
    """A folder where make runs, with a copy of what the Makefile needs. settings: by name, for every call."""

    def __init__(self, folder: Path, **settings: str):
        self.folder, self.settings = folder, settings
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.environment = {name: os.environ[name] for name in os.environ if not NOT_INHERITED.fullmatch(name)}

    def command(self, *words: str, **settings: str) -> list[str]:
        assigned = [f"{name}={value}" for name, value in {**self.settings, **settings}.items()]
        return ["make", "-C", str(self.folder), "--no-print-directory", *words, *assigned]

    def make(self, *words: str, **settings: str) -> subprocess.CompletedProcess:
        return subprocess.run(self.command(*words, **settings), capture_output=True, text=True, env=self.environment)

    def record(self, script: str = "") -> None:
        """Make ENV_PYTHON a script that notes the words of each call, and then runs `script`."""
        python = self.folder / "my env/python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" \'\n\' >> calls\n{script}\n')
        python.chmod(0o755)
        self.settings["ENV_PYTHON"] = str(python)

    def calls(self) -> list[list[str]]:
        """The words of the calls so far, from the module on."""
        file = self.folder / "calls"
        text = file.read_text() if file.exists() else ""
        return [call.strip("\0").split("\0")[1:] for call in text.split("\0\n")[:-1]]

    def lines(self, target: str, **settings: str) -> list[list[str]]:
        """The words of the commands that `make -n` shows, from the module on."""
        done = self.make("-n", target, **settings)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.replace("\\\n", " ").splitlines()
        return [shlex.split(line)[2:] for line in lines if " -m " in line and "runs.check" not in line]


@pytest.fixture
def tree(tmp_path):
    """Without GPUs, whatever this machine has."""
    tree = Tree(tmp_path)
    tree.environment["CUDA_VISIBLE_DEVICES"] = ""
    return tree


def test_machines_meet_by_torchrun_and_a_model_of_ones_own_is_trained(tree):
    words = tree.lines("pretrain-d20-base", NNODES="2", RDZV="first:29500", NGPU="8", RESTARTS="3")[-1]
    meet = "trainkit_gka.torchrun --nnodes 2 --rdzv-backend c10d --rdzv-id gka --rdzv-endpoint first:29500"
    launched = f"{meet} --max-restarts 3 --nproc-per-node 8 -m -- nanochat_gka.train".split()
    assert words[: len(launched)] == launched
    assert tree.lines("train-deit-b-base", DATA="x", MODEL="resnet18")[-1][-2:] == ["--model", "resnet18"]


PRESET = dict(
    attention="gka", head_offsets="PS", gka_values="unrotated", value_embeds="every-second", channel_bandwidths=True
)
PRESET |= dict(channel_lr=0.08, head_gates=True, gate_lr=0.005)


def test_language_models_have_the_form_and_the_budget_that_the_makefile_states(tree):
    for target in ("", "-base", "-best"):
        config = tyro.cli(TrainConfig, args=tree.lines(f"pretrain-d20{target}")[-1][1:])
        shared = {field.name for field in fields(AccountingConfig)} & {field.name for field in fields(TrainConfig)}
        counts = account(AccountingConfig(**{name: getattr(config, name) for name in shared - {"max_seq_len"}}))
        header = re.search(rf"((?:^#.*\n)+)pretrain-d20{target}:", TEXT, re.MULTILINE)[1]
        assert all(f"{counts[name]:,}" in header for name in ("parameters", "train_tokens"))
    small = tyro.cli(TrainConfig, args=tree.lines("pretrain-small")[-1][1:])
    assert all({name: getattr(trained, name) for name in PRESET} == PRESET for trained in (config, small))
    assert (str(small.data), small.depth, small.num_iterations) == ("out/packed/builtin-4096-512", 4, 512)


def test_an_environment_of_ones_own_takes_the_place_of_venv(tree):
    tree.record()
    done = tree.make("-n", *(name for name in TARGETS if name not in ("help", "setup", "clean")), DATA="digits")
    assert done.returncode == 0 and ".venv" not in done.stdout and "pip " not in done.stdout
    assert tree.make("setup").returncode == 2 and not (tree.folder / ".venv").exists()


def test_own_text_is_prepared_each_time_and_a_fixed_corpus_once(tree):
    tree.record()
    text = tree.folder / "my notes/text"
    text.mkdir(parents=True)
    steps = ["nanochat_gka.corpus", "nanochat_gka.tokenizer", "nanochat_gka.pack", "nanochat_gka.train"]
    for corpus, remaining in ((str(text), steps), ("builtin", steps[-1:])):
        before = tree.lines("pretrain-small", CORPUS=corpus)
        packed = before[-1][before[-1].index("--data") + 1]
        (tree.folder / packed).mkdir(parents=True)
        (tree.folder / packed / "manifest.json").touch()
        assert [words[0] for words in before] == steps
        assert [words[0] for words in tree.lines("pretrain-small", CORPUS=corpus)] == remaining
    assert (tree.folder / "out/packed/text-4096-512").exists()


def test_args_are_for_the_named_targets_and_a_dry_run_prepares_nothing(tree):
    tree.record()
    flags = {words[0].partition(".")[2]: words[-1] for words in tree.lines("pretrain-small", ARGS="--x")}
    assert [name for name, last in flags.items() if last == "--x"] == ["train"] and len(flags) == 4
    for flag in ("--dry-run", "--dry_run"):
        assert [words[0] for words in tree.lines("pretrain-d20", ARGS=flag)] == ["nanochat_gka.train"]
        assert {words[0] for words in tree.lines("ablate-projections", ARGS=flag)} == {"deit_gka.train"}  # no table


def test_python_finds_our_modules_where_it_is_told_not_to_look_in_the_folder(tree):
    tree.environment["PYTHONSAFEPATH"] = "1"
    done = tree.make("-n", "test")
    assert done.returncode == 0 and not done.stderr
    done = tree.make("check", DEPTH="0", ENV_PYTHON=sys.executable)
    assert done.returncode == 2 and "DEPTH=0 must be" in done.stderr


@pytest.mark.parametrize("selection, count", [(None, 4), ("2,3", 2), ("GPU-2aaa", 1)])
def test_a_process_is_started_for_each_visible_gpu(tree, selection, count):
    smi = tree.folder / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {n}: H100 (UUID: GPU-{n}aaa)'\n" for n in range(4)))
    smi.chmod(0o755)
    tree.environment["PATH"] = f"{smi.parent}:{os.environ['PATH']}"
    tree.environment.pop("CUDA_VISIBLE_DEVICES")
    tree.environment |= {} if selection is None else {"CUDA_VISIBLE_DEVICES": selection}
    words = tree.lines("pretrain-d20")[-1]
    assert [words[at + 1] for at, word in enumerate(words) if word == "--nproc-per-node"] == [str(count)] * (count > 1)
    assert "trainkit_gka.torchrun" not in tree.lines("pretrain-small")[-1]  # whose step has four rows


@pytest.mark.parametrize(
    "target, settings, message",
    [
        ("pretrain-d20", {}, "no GPU is visible.* make pretrain-small$"),
        ("train-deit-ti", dict(DATA="cifar10", ARGS="--lr 1"), "no GPU.* make train-small$"),
        ("train-deit-ti", dict(ARGS=CPU), "no images.* DATA=cifar10"),
        ("train-small", {}, "no images.* DATA=cifar10"),
        ("train-small", dict(DATA="photos"), "DATA=photos: there is no such folder"),
        ("ablate-projections", dict(DATA="wds:/nope", ARGS=CPU), "DATA=wds:/nope: there is no such folder"),
        ("tokenize", dict(SHARDS="1"), "SHARDS=1 must be a whole number between 2 and 1823"),
        ("eval-bpb", dict(DEPTH="0"), "DEPTH=0 must be"),
        ("pretrain-small", dict(NGPU="x"), "NGPU=x must be"),
        ("pretrain-small", dict(NNODES="2"), "NNODES=2 .*RDZV"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_a_line_before_anything_starts(tree, target, settings, message):
    assert "runs.check" in tree.make("-n", target, **settings).stdout.splitlines()[0]
    tree.record()
    done = tree.make(target, **settings)
    error, of_make = done.stderr.splitlines()
    assert done.returncode == 2 and re.match(f"error: {message}", error) and "Error 2" in of_make
    assert not tree.calls()


@pytest.mark.slow
def test_the_small_vision_model_learns_and_continues(tree):
    for more in ("--stop-after 20", ""):
        flags = f"{CPU} --num-workers 0 --epochs 12 --eval-every -1 {more}"
        command = tree.lines("train-small", DATA="digits", BASE=str(tree.folder / "out"), ARGS=flags)[-1]
        done = tiny_vision.call(*command, folder=tree.folder / "output")
    assert "32 pixels a side" in done.stdout and "resuming at update 20" in done.stdout
    assert vision_runs.accuracy(tree.folder / "out/runs", "small-digits") > 45  # chance is 10


@pytest.mark.parametrize("name", ["runs/check.py", "trainkit_gka/gpus.py"])
def test_what_runs_before_the_environment_needs_nothing_but_an_old_python(name, monkeypatch):
    code = ast.parse((ROOT / name).read_text(), feature_version=(3, 8))
    assert {one.name for node in code.body if isinstance(node, ast.Import) for one in node.names} <= STANDARD
    monkeypatch.setattr(sys, "version_info", (3, 8, 0))
    with pytest.raises(check.Problem, match=r"Python 3\.10 or newer is needed"):
        check.check(["setup"], {})
    for name, bounds in {"SHARDS": fineweb.SHARDS, "VOCAB": tokenizer.VOCAB}.items():  # of the flags they become
        assert check.BOUNDS[name] == (bounds.least, bounds.most)


def test_settings_reach_the_commands_as_they_are(tree):
    """Spaces and ~ in paths; quotes, $ and more in texts, and quotes in ARGS."""
    tree.record()
    odd = 'It\'s "so" for $5 & `more`'
    places = dict(BASE="~/my out", RUN="~/my out/d4/", IMAGE="my cat.jpg", DATA="my images", BUNDLE="a b")
    (tree.folder / "my images").mkdir()
    tree.environment["HOME"] = str(tree.folder)
    for target in ("sample", "report", "eval-deit", "eval-core", "export"):
        assert tree.make(target, PROMPT=odd, TEXT=odd, ARGS="--also 'a  b' \"c d\"", **places).returncode == 0
    sample, report, evaluate, core, export = tree.calls()
    run = f"{tree.folder}/my out/d4/"
    assert sample == ["nanochat_gka.generate", "--run", run, f"--prompt={odd}", "--stream", "--also", "a  b", "c d"]
    assert {f"{tree.folder}/my out", run, "my cat.jpg", f"--text={odd}"} < set(report)
    assert {run, "my images", f"{tree.folder}/my out/results.jsonl"} < set(evaluate)
    assert {run, "a b"} < set(core) and {run, f"{run[:-1]}-export"} < set(export)
    small = tree.lines("train-small", DATA="hf:me/my cats/")[-1]
    assert small[small.index("--model-tag") + 1] == "small-my cats"
    assert tree.make("sample", PROMPT="").returncode == 0  # as if it were not given
    assert "--prompt=The" in tree.calls()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_command_which_saves_and_no_other_starts(tree, number):
    """SIGTERM to make alone, and Ctrl-C, which a terminal sends to all."""
    tree.record("trap 'sleep 0.3; echo saved > saved; exit 0' TERM INT; : > ready; while :; do sleep 0.05; done")
    command = tree.command("tokenize", CORPUS="builtin", DATA="digits", ARGS=f'{CPU} "a b"')
    with subprocess.Popen(command, env=tree.environment, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        while not (tree.folder / "ready").exists():
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, number) if number == signal.SIGTERM else os.killpg(process.pid, number)
        process.wait(timeout=60)
    assert (tree.folder / "saved").exists()
    assert [words[0].partition(".")[2] for words in tree.calls()] == ["corpus"]


def test_help_names_every_target_and_setting():
    text = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert all(re.search(rf"\b{name}\b", text) for name in (*TARGETS, *SETTINGS))
