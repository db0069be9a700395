"""The Makefile as a user meets it: what it would run, and what it says when it cannot."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def make(tmp_path):
    """Run make in a bare copy of the tree: no environment, no outputs."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    ours = {
        "NGPU",
        "DEPTH",
        "CORPUS",
        "SHARDS",
        "VOCAB",
        "SEQ",
        "ARGS",
        "BASE",
        "RUN",
        "PYTHON",
        "WANDB_MODE",
        "DATA",
        "MODEL",
    }
    # These tests run under `make test`: its settings and its talk of entering folders are not theirs.
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("MAKE") and key not in ours and key != "MFLAGS"
    }

    def run(*words):
        return subprocess.run(["make", *words], cwd=tmp_path, capture_output=True, text=True, env=environment)

    return run


def test_dry_run_of_pretraining_shows_the_whole_chain(make):
    lines = make("-n", "pretrain-d20", "NGPU=7").stdout
    order = ["venv .venv", "pip install", "nanochat_gka.corpus --source fineweb", "nanochat_gka.tokenizer", "nanochat_gka.pack",
             "torchrun --standalone --nproc-per-node 7 -m -- nanochat_gka.train"]  # fmt: skip
    positions = [lines.index(step) for step in order]
    assert positions == sorted(positions)
    assert (
        "--depth 20" in lines
        and "--attention gka --target-param-data-ratio 8.25" in lines
        and "--sequence-len 2048" in lines
    )
    baseline = make(
        "-n", "pretrain-d20-base", "DEPTH=12", "WANDB_MODE=offline", "ARGS=--device-batch-size 8"
    ).stdout.splitlines()[-1]
    assert (
        "--depth 12" in baseline
        and "--attention softmax --target-param-data-ratio 10.5 --device-batch-size 8" in baseline
        and "--wandb offline" in baseline
    )


def test_a_finished_step_is_not_run_again(make, tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    (tmp_path / "out/packed/fineweb-170-32768-2048").mkdir(parents=True)
    (tmp_path / "out/tokenizer/fineweb-170-32768").mkdir(parents=True)
    (tmp_path / "out/corpus/fineweb-170").mkdir(parents=True)
    for made in (
        "corpus/fineweb-170/.complete",
        "tokenizer/fineweb-170-32768/tokenizer.json",
        "packed/fineweb-170-32768-2048/manifest.json",
    ):
        (tmp_path / "out" / made).touch()
    lines = make("-n", "pretrain-d20").stdout
    assert "nanochat_gka.train" in lines
    assert not any(
        step in lines for step in ("pip", "nanochat_gka.corpus", "nanochat_gka.tokenizer", "nanochat_gka.pack")
    )


def test_every_corpus_has_its_own_names_and_args_go_to_the_named_target(make, tmp_path):
    for folder in ("a/text", "b/text"):
        (tmp_path / folder).mkdir(parents=True)
    lines = {
        what: make("-n", "tokenize", what, "ARGS=--workers 2").stdout
        for what in ("CORPUS=a/text", "CORPUS=b/text", "SHARDS=8", "SHARDS=9")
    }
    packed = {what: re.search(r"nanochat_gka.pack .* --out (\S+) --workers 2", text)[1] for what, text in lines.items()}
    assert len(set(packed.values())) == 4
    assert all(
        "--workers" not in line
        for text in lines.values()
        for line in text.splitlines()
        if "nanochat_gka.tokenizer" in line
    )


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_without_a_gpu_pretraining_says_what_to_run_instead(make):
    for target in ("pretrain-d20", "pretrain-d20-base"):
        done = make(target)
        assert done.returncode == 2
        assert "no GPU is visible" in done.stderr and 'Run "make demo"' in done.stderr
    # The alternative it names must get past that check: here it fails later, at the missing Python.
    done = make("pretrain-d20", "ARGS=--device-type cpu", "PYTHON=python-is-missing")
    assert "no GPU is visible" not in done.stderr and "python-is-missing" in done.stderr


@pytest.mark.parametrize(
    "target, model",
    [
        ("train-deit-ti", "deit_tiny_gka"),
        ("train-deit-s-vlt", "deit_small_vlt"),
        ("train-deit-b-base", "deit_base"),
        ("train-deit-b", "deit_base_gka"),
    ],
)
def test_vision_targets_train_the_model_they_name(make, target, model):
    last = make("-n", target, "DATA=/some/images", "NGPU=7", "ARGS=--epochs 2 --device-type cpu").stdout.splitlines()[
        -1
    ]
    assert last.startswith(
        ".venv/bin/torchrun --standalone --nproc-per-node 7 -m -- deit_gka.train --data '/some/images'"
    )
    assert f"--model {model}_patch16_224 --epochs 2" in last
    assert "--model resnet18 " in make("-n", target, "DATA=x", "MODEL=resnet18", "ARGS=--device-type cpu").stdout


def test_the_ablation_trains_three_models_and_prints_the_table(make):
    lines = make("-n", "ablate-projections", "DATA=digits", "ARGS=--device-type cpu").stdout.splitlines()[-4:]
    assert [re.search(r"--model (\S+)", line)[1] for line in lines[:3]] == [
        f"deit_tiny{kind}_patch16_224" for kind in ("", "_vlt", "_gka")
    ]
    assert lines[3].endswith("runs.paper.ablation --runs out/runs")


def test_evaluation_takes_the_named_run_or_the_models(make):
    for words, run in (((), "out/runs/deit_tiny_gka_patch16_224"), (("MODEL=deit_base_patch16_224",), "out/runs/deit_base_patch16_224"),
                       (("RUN=elsewhere",), "elsewhere")):  # fmt: skip
        assert f"deit_gka.evaluate --run {run} --data 'digits'" in make("-n", "eval-deit", "DATA=digits", *words).stdout


@pytest.mark.parametrize("target", ["eval-deit", "eval-bpb"])
def test_torchrun_leaves_our_flags_to_us(make, tmp_path, target):
    """It has a --run-path, and would take our --run for a short form of it."""
    line = make(
        "-n", target, "NGPU=2", "DATA=digits", f"RUN={tmp_path}/none", "ARGS=--device-type cpu"
    ).stdout.splitlines()[-1]
    words = shlex.split(line.replace(".venv/bin/torchrun", f"{sys.executable} -m torch.distributed.run"))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert f"error: no checkpoint in {tmp_path}/none" in done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_vision_without_images_or_gpu_says_what_is_missing(make):
    done = make("train-deit-ti")
    assert done.returncode == 2 and "no images and no GPU" in done.stderr and 'run "make demo"' in done.stderr
    done = make("ablate-projections", "DATA=/some/images")
    assert done.returncode == 2 and "no GPU is visible" in done.stderr and "--device-type cpu" in done.stderr
    assert "--data" not in make("-n", "eval-deit").stdout.splitlines()[-1]  # the run knows its images
    done = make("train-deit-ti-softmax", "DATA=digits", "ARGS=--device-type cpu", "PYTHON=true")
    assert done.returncode == 2


def test_bits_per_byte_never_fetch_a_corpus(make):
    """A run knows its rows; only a corpus that is named on the command line is another choice."""
    for target, run in (("eval-bpb", "out/runs/d20-gka"), ("eval-bpb-base", "out/runs/d20-softmax")):
        lines = make("-n", target).stdout
        assert f"nanochat_gka.evaluate --results out/results.jsonl  --run {run}" in lines and "--data" not in lines
        assert "nanochat_gka.corpus" not in lines and "nanochat_gka.pack" not in lines
    named = make("-n", "eval-bpb", "CORPUS=builtin", "VOCAB=4096", "SEQ=256", "RUN=elsewhere").stdout
    assert "--data out/packed/builtin-4096-256 --run elsewhere" in named and "nanochat_gka.corpus" not in named


def test_a_corpus_that_is_not_there_is_one_line(make, tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    done = make("tokenizer", "CORPUS=no/such/folder")
    assert "error: CORPUS=no/such/folder is neither fineweb nor builtin nor a folder" in done.stderr


def test_help_lists_every_public_target(make):
    declared = (
        re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
        .replace("\\", "")
        .split()
    )
    listed = re.findall(r"^  make ([a-z0-9-]+)", make("help").stdout, re.MULTILINE)
    assert {name for name in declared if not name.startswith("check-")} == set(listed)


def test_readme_names_real_targets():
    text, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:`|^)make ([a-z][a-z0-9-]+)", text, re.MULTILINE))
    assert {"demo", "test", "pretrain-d20", "eval-bpb"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
