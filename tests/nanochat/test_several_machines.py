"""Training by two torchrun agents that meet on the loopback interface, as two machines would, one with a crash."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from gpt_runs import MODULE, final, flags, log_steps
from processes import HANG_AFTER, environment

STEPS = 40


def train(folder, disks, meanwhile=lambda agents: None) -> str:
    """What the two machines' torchruns printed, of one process and two restarts each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    meet += ["--rdzv-endpoint", f"localhost:{port}", "--local-addr", "127.0.0.1", "--max-restarts", "2"]
    folder.mkdir()
    agents = []
    try:
        for number, disk in enumerate(disks):
            training = flags(disk, folder, "--num-iterations", STEPS, "--save-every", 5)
            command = [sys.executable, "-m", "trainkit_gka.torchrun", *meet, "-m", "--", MODULE, *map(str, training)]
            with open(folder / f"{number}.txt", "w") as file:
                agents.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment()))
        meanwhile(agents)
        codes = [agent.wait(HANG_AFTER) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                for process in (*psutil.Process(agent.pid).children(recursive=True), agent):
                    process.kill()
    output = "".join((folder / f"{number}.txt").read_text() for number in range(2))
    assert codes == [0, 0], output
    return output


@pytest.mark.slow
def test_a_killed_worker_is_restarted_and_the_run_ends_with_the_same_bits(packed, tmp_path):
    disks = packed, shutil.copytree(packed, tmp_path / "disk")
    train(tmp_path / "plain", disks)

    def kill_one(agents):
        while len(log_steps(tmp_path / "killed")) < 12:
            assert agents[0].poll() is None
            time.sleep(0.01)
        (worker,) = psutil.Process(agents[1].pid).children()
        os.kill(worker.pid, signal.SIGKILL)

    assert "resuming at step" in train(tmp_path / "killed", disks, kill_one)
    assert final(tmp_path / "killed", STEPS) == final(tmp_path / "plain", STEPS)
