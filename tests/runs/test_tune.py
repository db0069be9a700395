"""Tuning: every candidate is held to the error budget with its own tiles, then timed in turns."""

import subprocess
import sys

import pytest
import torch

from gka.impl.triton import configs
from gka.impl.triton.configs import Config
from operator_cases import DEVICE
from runs.bench import tune
from runs.bench.tune import Workload

SMALL = [
    Workload("forward", 1, 20, 2, 32, causal=True, window=8, with_values=True),
    Workload("symmetric", 1, 20, 2, 32),
    Workload("queries", 1, 20, 2, 32, causal=True, window=8, with_values=True),
    Workload("keys", 1, 20, 2, 32, causal=True, window=8, with_values=True),
    Workload("decode", 1, 20, 2, 32, causal=True, queries=1),
]


def entry(kernel):
    """The configuration of the moment."""
    return configs.table_of(torch.device(DEVICE)).entries[kernel, 32, 4]


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.kernel)
def test_candidates_are_judged_and_timed_with_their_own_tiles(workload, monkeypatch):
    good, wrong, impossible = Config(16, 32, 4, 1), Config(16, 16, 4, 1), Config(48, 16, 4, 1)
    shipped, operator, turns = entry(workload.kernel), tune.gaussian_attention, []

    def attend(*tensors, **options):
        return operator(*tensors, **options) * (1.01 if entry(workload.kernel) == wrong else 1.0)

    def milliseconds(call):
        call()
        turns.append(entry(workload.kernel))
        return {shipped: 2.0, good: 1.0}[turns[-1]] + (len(turns) > 4) * 10.0  # of three rounds the last is disturbed

    monkeypatch.setattr(tune, "gaussian_attention", attend)
    monkeypatch.setattr(tune, "milliseconds", milliseconds)
    timed = tune.tune(workload, [wrong, impossible, good, shipped], torch.float32, torch.device(DEVICE), rounds=3)
    assert turns == [shipped, good] * 3
    assert [(one.config, one.median) for one in timed[:2]] == [(good, 1.0), (shipped, 2.0)]
    reasons = {one.config: one.reason for one in timed[2:]}
    assert reasons.keys() == {wrong, impossible} and "off by 1.0e-02 of its norm" in reasons[wrong]
    assert "power of 2" in reasons[impossible]
    assert entry(workload.kernel) == shipped


@pytest.mark.parametrize(
    "flags,line",
    [
        (["--only", "backward"], "--only backward: no such workload; there are forward-d32"),
        (["--candidates", "12x3"], "12x3 is not rows x columns x warps x stages, such as 128x64x8x3"),
        ([], "tuning needs a CUDA device"),
    ],
)
def test_mistakes_are_one_line(flags, line, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tune", *flags])
    with pytest.raises(SystemExit) as stopped:
        tune.main()
    [error] = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line in error


@pytest.mark.gpu
def test_the_command_times_a_candidate_on_the_gpu():
    flags = ["--only", "decode-d64", "--candidates", "16x64x4x2", "--rounds", "1"]
    done = subprocess.run([sys.executable, "-m", "runs.bench.tune", *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ms\n") == 2
