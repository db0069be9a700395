"""Commands that start other commands: what a signal does to both."""

import signal
import subprocess
import sys
import time

import pytest

from sources import ROOT

TRAINER = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: (print("saved", flush=True), sys.exit(0)))
print("training", flush=True)
time.sleep(60)
"""


ALONE = "import sys; from runs import launch; [launch.run(['-c', sys.argv[1]]) for _ in range(2)]"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_and_the_sequence(number):
    words = [sys.executable, "-c", ALONE, TRAINER]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while process.stdout.readline() != "training\n":
            pass
        process.send_signal(number)
        assert process.stdout.read() == "saved\n"
        assert process.wait() == 128 + number


DEMO = """
import sys
from pathlib import Path
from runs.demo.commands import run_side_by_side
from runs.jobs import Job
from runs.demo.outlook import Outlook
from trainkit_gka.cli import run

class FromText(Job):
    def start(self, threads):
        self.module, self.flags = "timeit", ["-n", "1", "-r", "1", sys.argv[1]]
        super().start(threads)

folder = Path(sys.argv[2])
jobs = [FromText(name, "", [], folder / name, 1) for name in "ab"]
run(lambda config: run_side_by_side(jobs, 1, Outlook({"training": 2.0})), dict, [])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_commands_side_by_side_after_they_have_saved(number, tmp_path):
    words = [sys.executable, "-c", DEMO, TRAINER, tmp_path]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        output = tmp_path / "a/output.txt"
        while not output.exists() or "training\n" not in output.read_text():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        assert process.stderr.read() == f"stopped by {number.name}\n" and process.wait() == 128 + number
    assert "saved" in output.read_text() and not (tmp_path / "b").exists()
