"""Mistakes in training are one line, on one process and on several."""

import re
import shutil

import pytest

import gpt_runs
import tiny
from nanochat_gka.model.accounting import meta_model
from nanochat_gka.train import TrainConfig

BAD = [
    ("--max-seq-len 64", "--max-seq-len 64 but .* holds rows of 32 tokens"),
    ("--total-batch-size 100", "--total-batch-size must be a multiple of .* 32, got 100"),
    ("--total-batch-size 64000", "[0-9]+ training rows and a step takes 2,000: give more text"),
    ("--attention linear", "or a pattern of their letters such as GGGA, got 'linear'"),
    ("--weight-decay 1e6", "--weight-decay with --matrix-lr would take .* away in one step"),
    ("--depth 10000 --attention softmax", r"--depth 10000 is a model of \d.* parameters .* GB of memory and there are"),
]


@pytest.mark.parametrize("more,message", BAD)
def test_bad_flags_are_one_line(packed, tmp_path, more, message, capsys):
    assert gpt_runs.train(packed, tmp_path, *more.split()) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_more_processes_than_rows_are_refused():
    config = TrainConfig(depth=2, num_iterations=1, total_batch_size=8 * tiny.SEQUENCE_LEN)
    model = meta_model(config.shape(2, tiny.SEQUENCE_LEN, 300))
    with tiny.one_line_error("a step has 8 rows for 9 processes; raise --total-batch-size"):
        config.horizon(model, processes=9)


def damaged(packed, folder):
    """A copy of the rows with one wrong byte, of which its manifest says nothing."""
    shutil.copytree(packed / "packed", folder / "packed")
    shard = next((folder / "packed").glob("train_0*.bin"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    return folder


@pytest.mark.parametrize("local_rank, checks", [("0", True), ("1", False)])
def test_every_machine_checks_its_own_copy_of_the_rows(packed, tmp_path, monkeypatch, capsys, local_rank, checks):
    """By its first process."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    code = gpt_runs.train(damaged(packed, tmp_path), tmp_path, "--num-iterations", 1)
    assert code == (2 if checks else 0) and ("wrong checksum" in capsys.readouterr().err) == checks


def test_nonfinite_gradient_names_the_last_checkpoint(packed, tmp_path, capsys):
    for _ in range(2):
        code = gpt_runs.train(packed, tmp_path, "--embedding-lr", "1e38")
    message = r"the gradient is not finite at step \d+; the weights were not touched. Last checkpoint: "
    assert code == 2 and re.search(message, capsys.readouterr().err)
