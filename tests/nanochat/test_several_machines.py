"""Training by two torchrun agents that meet on the loopback interface, as two machines would; crashes and mistakes."""

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
pytestmark = pytest.mark.slow


def train(folder, commands, meanwhile=lambda agents: None) -> tuple[list[int], str]:
    """Exit codes of the two machines' torchruns, of one process and two restarts each; and what both printed."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    meet += ["--rdzv-endpoint", f"localhost:{port}", "--local-addr", "127.0.0.1", "--max-restarts", "2"]
    outputs, agents = [folder / f"{number}.txt" for number in range(2)], []
    try:
        for output, command in zip(outputs, commands):
            words = [sys.executable, "-m", "trainkit_gka.torchrun", *meet, "-m", "--", MODULE, *map(str, command)]
            with open(output, "w") as file:
                agents.append(subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment()))
        meanwhile(agents)
        codes = [agent.wait(HANG_AFTER) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                for process in (*psutil.Process(agent.pid).children(recursive=True), agent):
                    process.kill()
    return codes, "".join(out.read_text() for out in outputs)


def test_a_killed_worker_is_restarted_and_the_run_ends_with_the_same_bits(packed, tmp_path):
    settings = ["--num-iterations", STEPS, "--save-every", 5]
    shutil.copytree(packed, tmp_path / "own")  # the other machine's disk
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    codes, _ = train(whole, [flags(data, whole, *settings) for data in (packed, tmp_path / "own")])
    assert codes == [0, 0]

    def kill_one(agents):
        while len(log_steps(killed)) < 12:
            assert agents[0].poll() is None
            time.sleep(0.01)
        (worker,) = psutil.Process(agents[1].pid).children()
        os.kill(worker.pid, signal.SIGKILL)

    codes, said = train(killed, [flags(data, killed, *settings) for data in (packed, tmp_path / "own")], kill_one)
    assert codes == [0, 0] and "resuming at step" in said, said
    assert final(killed, STEPS) == final(whole, STEPS)
