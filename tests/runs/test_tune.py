"""Tuning: every candidate is held to the error budget with its own tiles, then timed in turns."""

import subprocess
import sys

import pytest
import torch

from gka.impl.triton import configs
from gka.impl.triton.configs import Config
from operator_cases import DEVICE
from runs.bench import tune
from runs.bench.timing import Plan
from runs.bench.tune import Workload

SMALL = [Workload(kernel, 1, 20, 2, 32, window=8) for kernel in ("forward", "queries", "keys")]
SMALL += [Workload(kernel, 1, 20, 2, 32) for kernel in ("symmetric", "decode")]


def entry(kernel):
    """The configuration of the moment."""
    return configs.table_of(torch.device(DEVICE)).entries[kernel, 32, 4]


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.kernel)
def test_candidates_are_judged_and_timed_with_their_own_tiles(workload, monkeypatch):
    good, wrong, impossible = Config(16, 32, 4, 1), Config(16, 16, 4, 1), Config(48, 16, 4, 1)
    shipped, operator, tiles = entry(workload.kernel), tune.gaussian_attention, []

    def attend(*tensors, **options):
        tiles.append(entry(workload.kernel))
        return operator(*tensors, **options) * (1.01 if tiles[-1] == wrong else 1.0)

    monkeypatch.setattr(tune, "gaussian_attention", attend)
    plan = Plan(rounds=2, warmup=0)
    measured = tune.tune(workload, [wrong, impossible, good, shipped], torch.float32, torch.device(DEVICE), plan)
    assert {config: one.status for config, one in measured.items()} == {
        shipped: "ok", good: "ok", wrong: "wrong", impossible: "failed"
    }  # fmt: skip
    assert "off by 1.0e-02 of its norm" in measured[wrong].reason and "power of 2" in measured[impossible].reason
    times = [one.median_ms for one in measured.values()]
    assert times[:2] == sorted(times[:2]) and times[2:] == [None, None]
    assert tiles[-4:] == [shipped, good, good, shipped]  # two rounds, in turns
    assert entry(workload.kernel) == shipped


@pytest.mark.gpu
def test_the_command_times_a_candidate_on_the_gpu():
    flags = ["--only", "decode-d64", "--candidates", "16x64x4x2"]
    done = subprocess.run([sys.executable, "-m", "runs.bench.tune", *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ms\n") == 2
