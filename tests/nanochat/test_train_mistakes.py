"""Mistakes in training are one line, on one process and on several."""

import re
import shutil
import sys
import time

import pytest
import torch

import gpt_runs
import processes
import tiny
from gpt_runs import MODULE, flags, log_steps

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the error is for machines without a CUDA device")
BAD = [
    ("--matrix-lr 0.5", r"--matrix-lr is 0.5 but the run in .* has 0.02"),
    ("--attention softmax", "--attention is softmax"),
    ("--max-seq-len 64 --model-tag x", "--max-seq-len 64 but .* holds rows of 32 tokens"),
    ("--total-batch-size 100 --model-tag x", "--total-batch-size must be a multiple of .* 32, got 100"),
    ("--total-batch-size 64000 --model-tag x", "[0-9]+ training rows and a step takes 2,000: give more text"),
    ("--attention linear --model-tag x", "or a pattern of their letters such as GGGA, got 'linear'"),
    ("--model-tag a/b", "--model-tag must be a plain folder name"),
    pytest.param("--device-type cuda", "no CUDA device is visible; use --device-type cpu", marks=without_cuda),
    ("--weight-decay 1e6 --model-tag x", "--weight-decay with --matrix-lr would take .* away in one step"),
    ("--model-tag x --results /proc/nowhere/results.jsonl", "/proc/nowhere: No such file"),
    ("--attention softmax --head-offsets PS --model-tag x", "head_offsets is for gka layers, and attention=softmax"),
    ("--head-offsets XY --model-tag x", "head_offsets must be made of the letters N, P, S"),
    ("--num-iterations -1 --target-param-data-ratio -1 --model-tag x", "set one of num_iterations, target_flops"),
    (
        "--depth 10000 --attention softmax --model-tag x",
        r"--depth 10000 is a model of \d.* parameters .* GB of memory and there are",
    ),
    ("--data nowhere --model-tag x", "no packed data in nowhere"),
    ("--sigma-lr nan", "--sigma-lr must be between 0 and"),
]


@pytest.mark.parametrize("more,message", BAD)
def test_bad_flags_are_one_line(packed, uninterrupted, more, message, capsys):
    assert gpt_runs.train(packed, uninterrupted, *more.split()) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_more_processes_than_rows_are_refused(packed, tmp_path):
    done = tiny.call(MODULE, *flags(packed, tmp_path), ranks=9, check=False)
    assert done.returncode == 2 and "a step has 8 rows for 9 processes; raise --total-batch-size" in done.stderr


def damaged(packed, folder):
    """A copy of the rows with one wrong byte, of which its manifest says nothing."""
    shutil.copytree(packed / "packed", folder / "packed")
    shard = next((folder / "packed").glob("train_0*.bin"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    return folder


def test_error_of_one_rank_ends_all_ranks(packed, tmp_path):
    """Checksums are verified by one; the others must not wait for it in a collective, nor speak."""
    words = flags(damaged(packed, tmp_path), tmp_path)
    done = tiny.call(MODULE, *words, ranks=2, check=False)
    assert done.returncode != 0
    assert len(re.findall(r"error: shard .* is corrupt", done.stderr)) == 1
    assert "RuntimeError" not in done.stderr


@pytest.mark.parametrize("local_rank, checks", [("0", True), ("1", False)])
def test_every_machine_checks_its_own_copy_of_the_rows(packed, tmp_path, monkeypatch, capsys, local_rank, checks):
    """By its first process."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    code = gpt_runs.train(damaged(packed, tmp_path), tmp_path, "--num-iterations", 1)
    assert code == (2 if checks else 0) and ("wrong checksum" in capsys.readouterr().err) == checks


def test_second_trainer_is_refused(packed, tmp_path, capsys):
    process = processes.start(MODULE, *flags(packed, tmp_path, "--num-iterations", 100000), folder=tmp_path / "output")
    while process.alive() and not log_steps(tmp_path):
        time.sleep(0.01)
    assert gpt_runs.train(packed, tmp_path, "--num-iterations", 100000) == 2
    process.kill()
    assert "another process is training in" in capsys.readouterr().err


def test_nonfinite_gradient_names_the_last_checkpoint(packed, tmp_path, capsys):
    for _ in range(2):
        code = gpt_runs.train(packed, tmp_path, "--embedding-lr", "1e38")
    message = r"the gradient is not finite at step \d+; the weights were not touched. Last checkpoint: "
    assert code == 2 and re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "steps, said",
    [
        ("ten", "--profile takes the first and the last step, such as 10-15, got ten"),
        ("6-5", "--profile 6-5: steps count from 1, and the last is not before the first"),
        ("0-2", "--profile 0-2: steps count from 1"),
        ("5-9", "--profile 5-9: the run has 8 steps"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["train", "dry run"])
def test_steps_that_cannot_be_profiled_are_one_line(packed, tmp_path, capsys, steps, said, more):
    assert gpt_runs.train(packed, tmp_path, "--num-iterations", 8, "--profile", steps, *more) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {said}") and message.count("\n") == 1 and log_steps(tmp_path) == []


def test_tensorboard_without_package_is_one_line(packed, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert gpt_runs.train(packed, tmp_path, "--tensorboard") == 2
    message = capsys.readouterr().err
    assert 'tensorboard is not installed: run pip install "gka[tensorboard]"' in message and message.count("\n") == 1


def test_wandb_without_package_or_key_is_one_line(packed, tmp_path, monkeypatch, capsys):
    words, account = flags(packed, tmp_path, "--wandb", "online"), tiny.without_account(tmp_path)
    done = tiny.call(MODULE, *words, check=False, env=account)
    tiny.assert_one_line_error(done, "--wandb online needs the key of an account: set WANDB_API_KEY")
    assert log_steps(tmp_path) == []
    done = tiny.call(MODULE, *words, check=False, env={**account, "WANDB_API_KEY": "no key"})
    tiny.assert_one_line_error(done, "--wandb online: .*--wandb offline needs no account")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert gpt_runs.train(packed, tmp_path, "--wandb", "offline") == 2
    message = capsys.readouterr().err
    assert 'wandb is not installed: run pip install "gka[wandb]"' in message and message.count("\n") == 1
