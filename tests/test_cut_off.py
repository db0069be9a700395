"""Tests that are cut off leave no process behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

import processes
import watchdog
from sources import ROOT

TESTS = """
import multiprocessing
import subprocess
import time
import tiny

def test_that_does_not_end(tmp_path):
    worker = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    worker.start()
    subprocess.Popen("sleep 600 & exec sleep 600", shell=True, start_new_session=True)
    places = ["--out", tmp_path, "--results", tmp_path / "results.jsonl", "--model-tag", "run"]
    tiny.start("toy_trainer", *places, "--steps", 10**6, "--seconds", 0.05, "--device-type", "cpu", ranks=2)
    time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the watchdog needs Linux")
@pytest.mark.parametrize("number", [signal.SIGKILL], ids=["kill -9"])
def test_nothing_runs_after_pytest_was_killed(tmp_path, number):
    """Under xdist, in the middle of a training on two ranks, whose workers torchrun puts in sessions of their own."""
    (tmp_path / "test_inner.py").write_text(TESTS)
    paths = os.pathsep.join(map(str, (ROOT / "tests", ROOT / "tests/support", ROOT)))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-n", "1", "--basetemp", tmp_path / "out", tmp_path]
    with open(tmp_path / "output.txt", "w") as output:
        options = dict(cwd=tmp_path, env={**processes.environment(), "PYTHONPATH": paths})
        pytest_process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, **options)
    while not [*tmp_path.glob("out/**/run/log.jsonl")]:  # the ranks have met and train
        assert pytest_process.poll() is None, (tmp_path / "output.txt").read_text()
        time.sleep(0.02)
    started = watchdog.started_by(pytest_process.pid)
    assert len(started) >= 9  # xdist's worker, its watchdog, two servers, their worker, two sleeps, torchrun, two ranks
    pytest_process.send_signal(number)
    assert pytest_process.wait() and not processes.still_there(started, seconds=20)
    assert not watchdog.started_by(pytest_process.pid)
