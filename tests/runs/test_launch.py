"""Commands that start other commands: what a signal does to both."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAINER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
print("training", flush=True)
time.sleep(60)
"""


def test_sigterm_ends_the_command_and_the_sequence():
    parent = "import sys; from runs import launch; [launch.run(['-c', sys.argv[1]]) for _ in range(2)]"
    words = [sys.executable, "-c", parent, TRAINER]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while process.stdout.readline() != "training\n":
            pass
        process.terminate()
        assert process.stdout.read() == "saved\n"
        assert process.wait() == 128 + signal.SIGTERM
