"""Commands that a signal or a closed terminal ends: in time, in one line, and saved what is to be saved."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from processes import environment, still_there
from sources import ROOT
from trainkit_gka.signals import GRACE

COMMAND = """
import ctypes, os, sys, time
from dataclasses import dataclass
from pathlib import Path
from trainkit_gka import cli
from trainkit_gka.files import atomic

@dataclass
class Command:
    work: str
    folder: Path

def main(config):
    with atomic(config.folder / "result") as temporary:
        temporary.write_text("half")
        try:
            print("working", flush=True)
            if config.work == "a native call":  # which looks at no signal, as a collective does whose others are gone
                ctypes.CDLL(None).system(b"cat")
            while True:
                time.sleep(0.01)
        except BaseException as error:
            if config.work == "a library":  # that takes an error for one of its own
                time.sleep(60)
            # From a library that makes an error of its own of any.
            raise SystemError("the callback returned a result with an exception set") from error

cli.run(main, Command)
"""


def start(words, **options) -> subprocess.Popen:
    env = {**environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
    options = {"text": True, "env": env, "cwd": ROOT, "stdin": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, *map(str, words)], **options)


def command(work: str, folder: Path, **options) -> subprocess.Popen:
    (folder / "command.py").write_text(COMMAND)
    words = [folder / "command.py", "--work", work, "--folder", folder]
    process = start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    assert process.stdout.readline() == "working\n", process.stderr.read()
    return process


@pytest.mark.parametrize(
    "work, number",
    [
        ("steps", signal.SIGTERM),
        ("steps", signal.SIGHUP),
        ("a native call", signal.SIGTERM),
        ("a library", signal.SIGTERM),
    ],
)
def test_a_command_ends_in_time_with_one_line(work, number, tmp_path):
    process = command(work, tmp_path)
    began = time.monotonic()
    process.send_signal(number)
    process.wait(60)
    assert time.monotonic() - began < 2 * GRACE
    errors = process.communicate()[1]
    assert process.returncode == 128 + number and errors == f"stopped by {number.name}\n"
    remains = {path.name for path in tmp_path.iterdir()} - {"command.py"}
    assert not remains or (
        work != "steps" and all(name.startswith(".tmp-") for name in remains)
    )  # nothing looks complete


def test_nohup_ignores_sighup(tmp_path):
    process = command("steps", tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM


# --- Several processes, and commands that start others ---

TWO = r"""
import os, sys, time
from trainkit_gka import cli, distributed

def main(config):
    with distributed.running("cpu") as runtime:
        sys.stdout.write("working\n")  # print would write the line's end apart
        if os.environ["RANK"] == "0":
            time.sleep(600)
        runtime.barrier()  # for a rank that does not come

cli.run(main, dict)
"""
TORCHRUN = ["-m", "trainkit_gka.torchrun", "--standalone", "--nproc-per-node", "2", "--"]


@pytest.mark.parametrize("to", ["torchrun", "the rank that waits"])
def test_two_processes_end_in_time(to, tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    process = start([*TORCHRUN, tmp_path / "two.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert [process.stdout.readline() for _ in range(2)] == ["working\n"] * 2
    workers = ranks_of(process.pid)
    began = time.monotonic()
    os.kill(process.pid if to == "torchrun" else workers[1], signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert time.monotonic() - began < 2 * GRACE + 5 and process.returncode == 128 + signal.SIGTERM, errors
    assert errors.count("stopped by SIGTERM") == 1 and "Traceback" not in errors, errors
    assert not still_there(workers)


def ranks_of(pid: int) -> list[int]:
    """The processes of a torchrun, by rank."""
    ranks = {int(child.environ().get("RANK", -1)): child.pid for child in psutil.Process(pid).children()}
    return [ranks[rank] for rank in sorted(ranks) if rank >= 0]


# --- Training in a terminal that is closed ---

TOY = "-m toy_trainer --model-tag run --device-type cpu --save-every -1 --eval-every -1 --log-every 1 --steps 2000"


def train_in(output: int, folder: Path, before=(), **options) -> subprocess.Popen:
    """A training that writes to this descriptor, which is closed here."""
    words = [*before, *TOY.split(), "--seconds", "0.01", "--out", folder, "--results", folder / "results.jsonl"]
    process = start(words, **{"stdout": output, "stderr": output, **options})
    os.close(output)
    return process


def read_to_round_5(source: int) -> None:
    output = b""
    while b"round 5" not in output:
        output += os.read(source, 2**16)


def saved(folder: Path) -> list[str]:
    return [path.name for path in (folder / "run/checkpoints").glob("step_*")]


@pytest.mark.parametrize("launcher", [[], TORCHRUN[:-1]], ids=["1 process", "2 processes"])
def test_a_closed_terminal_saves(launcher, tmp_path):
    """Of a session of its own, whose terminal is a pseudo-terminal."""
    terminal, theirs = pty.openpty()
    own_terminal = {"start_new_session": True, "preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)}
    process = train_in(theirs, tmp_path, launcher, stdin=theirs, **own_terminal)
    read_to_round_5(terminal)
    ranks = ranks_of(process.pid) if launcher else []
    os.close(terminal)
    assert process.wait(60) == 0 and not still_there(ranks)
    (name,) = saved(tmp_path)
    lines = (tmp_path / "run/log.jsonl").read_text().splitlines()
    assert f'"step": {int(name[5:])}' in lines[-1] and 5 <= int(name[5:]) < 2000


@pytest.mark.parametrize("output", [os.pipe, pty.openpty], ids=["pipe", "terminal"])
def test_training_outlives_the_reader_of_its_output(output, tmp_path):
    """A pipe's, or a terminal that is gone without a signal: every line that it prints fails."""
    ours, theirs = output()
    process = train_in(theirs, tmp_path)
    read_to_round_5(ours)
    os.close(ours)
    time.sleep(0.5)
    assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 0 and len(saved(tmp_path)) == 1
