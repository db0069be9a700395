"""Mistakes in training are one line, on one process and on several."""

import re
import shutil
import sys
import time

import pytest
import torch
import tyro

import processes
import tiny
from gpt_runs import MODULE, flags, log_steps
from nanochat_gka.data.loader import micro_batches
from nanochat_gka.train import TrainConfig, Trainer, main
from trainkit_gka.cli import UserError, run
from trainkit_gka.distributed import Runtime

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the error is for machines without a CUDA device")


@pytest.mark.parametrize(
    "more,message",
    [
        (["--matrix-lr", "0.5"], r"--matrix-lr is 0.5 but the run in .* has 0.02"),
        (["--attention", "softmax"], "--attention is softmax"),
        (["--max-seq-len", "64", "--model-tag", "x"], "--max-seq-len 64 but .* holds rows of 32 tokens"),
        (["--total-batch-size", "100", "--model-tag", "x"], "--total-batch-size must be a multiple of .* 32, got 100"),
        (
            ["--total-batch-size", str(32 * 2000), "--model-tag", "x"],
            "packed has [0-9]+ training rows and a step takes 2,000: give more text, pack it with a smaller --sequence",
        ),
        (["--attention", "linear", "--model-tag", "x"], "or a pattern of their letters such as GGGA, got 'linear'"),
        (["--device-batch-size", "0"], "--device-batch-size must be at least 1"),
        (["--model-tag", "a/b"], "--model-tag must be a plain folder name"),
        pytest.param(["--device-type", "cuda"], "no CUDA device is visible; use --device-type cpu", marks=without_cuda),
        (["--seed", "-1"], "--seed must be between 0 and"),
        (
            ["--weight-decay", "1e6", "--model-tag", "x"],
            r"--weight-decay with --matrix-lr would take .* of every matrix entry away in one step",
        ),
        (["--num-iterations", "0"], "--num-iterations must be at least 1, or -1 for off"),
        (["--matrix-lr", "-0.02"], "--matrix-lr must be between 0 and 1e\\+38"),
        (["--sigma-lr", "nan"], "--sigma-lr must be between 0 and 1e\\+38"),
        (["--model-tag", "x", "--results", "/proc/nowhere/results.jsonl"], "/proc/nowhere: No such file"),
        (["--sigma-squared", "nan"], "--sigma-squared must be at least 0 and finite"),
        (
            ["--target-flops", "inf", "--num-iterations", "-1"],
            "--target-flops must be above 0 and finite, or -1 for off, got inf",
        ),
        (
            ["--attention", "softmax", "--head-offsets", "PS", "--model-tag", "x"],
            "head_offsets is for gka layers, and attention=softmax has none",
        ),
        (["--head-offsets", "XY", "--model-tag", "x"], "head_offsets must be made of the letters N, P, S"),
        (
            ["--num-iterations", "-1", "--target-param-data-ratio", "-1", "--model-tag", "x"],
            "set one of num_iterations, target_flops",
        ),
    ],
)
def test_bad_flags_are_one_line(packed, uninterrupted, more, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        run(main, TrainConfig, [str(flag) for flag in flags(packed, uninterrupted, *more)])
    assert exit_info.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_any_number_of_processes_that_have_a_row_each(packed, tmp_path):
    """A step has 8 rows. Nothing need divide anything, and rows at once may be more than a process has."""
    config = tyro.cli(TrainConfig, args=[str(word) for word in flags(packed, tmp_path, "--device-batch-size", 1000)])
    for processes_given in (3, 5, 7, 8):
        runtimes = [Runtime(rank, processes_given, torch.device("cpu")) for rank in range(processes_given)]
        trainer = Trainer(config, runtimes[0])
        pieces = [list(micro_batches(runtime.share(trainer.rows), trainer.batch_size)) for runtime in runtimes]
        assert [row for rank in pieces for piece in rank for row in piece] == list(range(8))
        assert all(len(rank) == 1 for rank in pieces)
    with pytest.raises(UserError, match=r"a step has 8 rows for 9 processes; raise --total-batch-size"):
        Trainer(config, Runtime(0, 9, torch.device("cpu")))


def test_every_machine_checks_its_own_copy_of_the_rows(packed, tmp_path, monkeypatch):
    """By its first process; one byte of a copy is wrong, of which its manifest says nothing."""
    shutil.copytree(packed / "packed", tmp_path / "packed")
    shard = next((tmp_path / "packed").glob("train_0*.bin"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    config = tyro.cli(TrainConfig, args=[str(word) for word in flags(tmp_path, tmp_path)])
    other_machine = Runtime(2, 4, torch.device("cpu"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match=r"train_0\d+.bin is corrupt \(wrong checksum\)"):
        Trainer(config, other_machine)
    monkeypatch.setenv("LOCAL_RANK", "1")
    Trainer(config, other_machine)


def test_errors_of_a_real_process(packed, tmp_path):
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--data", tmp_path / "nowhere"), check=False)
    tiny.assert_one_line_error(done, "no packed data in .*nowhere.*run make tokenize")


def test_error_on_rank_0_ends_all_ranks(packed, tmp_path):
    """Checksums are verified by rank 0; the others must not wait for it in a collective, nor speak."""
    shutil.copytree(packed / "packed", tmp_path / "packed")
    shard = next((tmp_path / "packed").glob("train_*.bin"))
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--data", tmp_path / "packed"), ranks=2, check=False, real=True)
    assert done.returncode != 0
    assert len(re.findall(r"error: shard .* is corrupt", done.stderr)) == 1
    assert "RuntimeError" not in done.stderr


def test_file_in_place_of_a_folder_is_one_line(packed, tmp_path):
    (tmp_path / "file").touch()
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--out", tmp_path / "file"), check=False)
    tiny.assert_one_line_error(done, "file")


def test_second_trainer_is_refused(packed, tmp_path):
    words = flags(packed, tmp_path, "--num-iterations", 100000)
    process = processes.start(MODULE, *words, folder=tmp_path / "output")
    while process.alive() and not log_steps(tmp_path):
        time.sleep(0.01)
    done = tiny.call(MODULE, *words, check=False)
    process.kill()
    tiny.assert_one_line_error(done, "another process is training in")


def test_nonfinite_loss_names_the_last_checkpoint(packed, tmp_path):
    tiny.call(MODULE, *flags(packed, tmp_path, "--stop-after", 4, "--embedding-lr", "1e38"), check=False)
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--embedding-lr", "1e38"), check=False)
    tiny.assert_one_line_error(
        done, r"the gradient is not finite at step \d+; the weights were not touched. Last checkpoint: "
    )


def test_ruined_weights_are_reported(packed, tmp_path):
    words = [str(word) for word in flags(packed, tmp_path)]
    trainer = Trainer(tyro.cli(TrainConfig, args=words), Runtime(0, 1, torch.device("cpu")))
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = torch.inf
    with pytest.raises(UserError, match=r"at step 0; an earlier step has ruined the weights. Last checkpoint: none "):
        trainer.step(asked_to_stop=False)


def test_wandb_online_without_a_key_is_one_line(packed, tmp_path):
    done = tiny.call(
        MODULE, *flags(packed, tmp_path, "--wandb", "online"), check=False, env=tiny.without_account(tmp_path)
    )
    tiny.assert_one_line_error(
        done, "--wandb online needs the key of an account: set WANDB_API_KEY, or run wandb login once"
    )
    assert log_steps(tmp_path) == []
    key = {**tiny.without_account(tmp_path), "WANDB_API_KEY": "no key"}
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--wandb", "online"), check=False, env=key)
    tiny.assert_one_line_error(done, "--wandb online: .*--wandb offline needs no account")


def test_missing_wandb_names_the_package(packed, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit):
        run(main, TrainConfig, [str(flag) for flag in flags(packed, tmp_path, "--wandb", "offline")])
    message = capsys.readouterr().err
    assert message.startswith('error: --wandb offline: wandb is not installed: run pip install "gka[wandb]"'), message
    assert message.endswith(", or leave --wandb disabled\n") and message.count("\n") == 1
