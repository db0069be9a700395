"""Mistakes in training are one line, on one process and on several."""

import re
import shutil

import numpy as np
import pytest

import gpt_runs
import tiny
from nanochat_gka import pack
from nanochat_gka.model.accounting import meta_model
from nanochat_gka.train import TrainConfig
from tiny_pack import config

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
    training = TrainConfig(depth=2, num_iterations=1, total_batch_size=8 * tiny.SEQUENCE_LEN)
    model = meta_model(training.shape(2, tiny.SEQUENCE_LEN, 300))
    with tiny.one_line_error("8 rows for 9 processes; raise --total-batch-size"):
        training.horizon(model, processes=9)


@pytest.mark.parametrize("local_rank, checks", [("0", True), ("1", False)])
def test_every_machine_checks_its_own_copy_of_the_rows(packed, tmp_path, monkeypatch, capsys, local_rank, checks):
    """By its first process: here one byte is wrong."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    shutil.copytree(packed / "packed", tmp_path / "packed")
    shard = next((tmp_path / "packed").glob("train_0*.bin"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    code = gpt_runs.train(tmp_path, tmp_path, "--num-iterations", 1)
    assert code == (2 if checks else 0) and ("wrong checksum" in capsys.readouterr().err) == checks


def test_nonfinite_gradient_names_the_last_checkpoint(packed, tmp_path, capsys):
    for _ in range(2):
        code = gpt_runs.train(packed, tmp_path, "--embedding-lr", "1e38")
    message = r"the gradient is not finite at step \d+; the weights were not touched. Last checkpoint: "
    assert code == 2 and re.search(message, capsys.readouterr().err)


def test_rows_of_another_length_and_another_dtype_are_refused(packed, tmp_path, capsys):
    pack.main(config(packed, tmp_path / "longer", sequence_len=64))
    assert gpt_runs.train(packed, tmp_path, "--stop-after", 2) == 0
    assert gpt_runs.train(packed, tmp_path, "--data", tmp_path / "longer") == 2
    assert "was packed with another context length than the run in" in capsys.readouterr().err
    assert gpt_runs.train(packed, tmp_path, "--dtype", "bfloat16") == 2
    assert "--dtype is bfloat16 but the run in" in capsys.readouterr().err


def test_ids_that_are_not_in_the_vocabulary_name_file_and_row(packed, tmp_path, capsys):
    """Of a damaged file whose checksum nobody verifies; training reads the rows in another order."""
    shutil.copytree(packed / "packed", tmp_path / "packed")
    path = tmp_path / "packed/train_000000.bin"
    rows = np.fromfile(path, dtype="<u2").reshape(-1, tiny.SEQUENCE_LEN + 1)
    for first_wrong in (60000, 300):
        rows[1, 5] = rows[1, 6] = first_wrong
        rows.tofile(path)
        assert gpt_runs.train(tmp_path, tmp_path / "out", "--no-verify-data", "--save-every", -1) == 2
        errors = capsys.readouterr().err
        assert f"{path} is damaged: row 1 has id {first_wrong}, and the vocabulary has 300 tokens" in errors
        assert errors.count("\n") == 1
