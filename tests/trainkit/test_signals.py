"""Commands that a signal, a closed terminal or a mistake ends, alone and under torchrun: in time and in one line."""

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from pty import openpty

import psutil
import pytest
from torch.distributed import run

import tiny
from processes import environment, still_there
from sources import ROOT
from trainkit_gka.command import OUR_TORCHRUN, as_typed
from trainkit_gka.signals import GRACE
from trainkit_gka.torchrun import on_one_machine

PYTHON, TORCHRUN = [sys.executable], [sys.executable, "-m", OUR_TORCHRUN, "--standalone"]
TWO = [*TORCHRUN, "--nproc-per-node", "2", "--"]


def start(words, env=None, **options) -> subprocess.Popen:
    options = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | options
    env = {**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support'}", **(env or {})}
    return subprocess.Popen([*map(str, words)], text=True, cwd=ROOT, env=env, **options)


def ranks_of(pid: int) -> list[int]:
    """The processes of a torchrun, by rank."""
    ranks = {int(child.environ().get("RANK", -1)): child.pid for child in psutil.Process(pid).children()}
    return [ranks[rank] for rank in sorted(ranks) if rank >= 0]


COMMAND = """
import ctypes, os, sys, time
from dataclasses import dataclass
from pathlib import Path
from pty import openpty
from trainkit_gka import cli, command, distributed
from trainkit_gka.files import atomic

@dataclass
class Command:
    work: str
    folder: Path

def main(config):
    if config.work in ("UserError", "PassingFault"):
        with open(config.folder / "log", "a") as log:
            print(command.command_line(), file=log)
        raise getattr(cli, config.work)("it failed")
    if config.work == "two ranks":
        with distributed.running("cpu") as runtime:
            sys.stdout.write("working\\n")  # print would write the line's end apart
            if os.environ["RANK"] == "0":
                time.sleep(600)
            runtime.barrier()  # for a rank that does not come
    with atomic(config.folder / "result") as temporary:
        temporary.write_text("half")
        try:
            if config.work == "a native call":  # which looks at no signal, as a collective does whose peers are gone
                ctypes.CDLL(None).system(b"echo working; cat")
            print("working", flush=True)
            while True:
                time.sleep(0.01)
        except BaseException as error:
            if config.work == "a library":  # that takes an error for one of its
                time.sleep(60)
            # From a library that makes another error of any.
            raise SystemError("the callback returned a result with an exception set") from error

cli.run(main, Command)
"""


def command(launcher, work: str, folder: Path, **options) -> subprocess.Popen:
    (folder / "command.py").write_text(COMMAND)
    return start([*launcher, folder / "command.py", "--work", work, "--folder", folder], **options)


# Signals


@pytest.mark.parametrize(
    "work, number, nohup",
    [
        ("steps", signal.SIGTERM, True),
        ("steps", signal.SIGHUP, False),
        ("a native call", signal.SIGTERM, False),
        ("a library", signal.SIGTERM, False),
    ],
)
def test_a_command_ends_in_time_with_one_line(work, number, nohup, tmp_path):
    """Not by SIGHUP under nohup. Nothing that it leaves looks complete."""
    ignored = signal.SIG_IGN if nohup else signal.SIG_DFL
    process = command(PYTHON, work, tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, ignored))
    assert process.stdout.readline() == "working\n", process.stderr.read()
    if nohup:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
    began = time.monotonic()
    process.send_signal(number)
    process.wait(60)
    assert time.monotonic() - began < 2 * GRACE
    assert process.returncode == 128 + number and process.communicate()[1] == f"stopped by {number.name}\n"
    remains = {path.name for path in tmp_path.iterdir()} - {"command.py"}
    assert not remains if work == "steps" else all(name.startswith(".tmp-") for name in remains)


@pytest.mark.parametrize("to", ["torchrun", "the rank that waits"])
def test_two_processes_end_in_time(to, tmp_path):
    process = command(TWO, "two ranks", tmp_path)
    assert [process.stdout.readline() for _ in range(2)] == ["working\n"] * 2
    workers, began = ranks_of(process.pid), time.monotonic()
    os.kill(process.pid if to == "torchrun" else workers[1], signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert time.monotonic() - began < 2 * GRACE + 5 and process.returncode == 128 + signal.SIGTERM, errors
    assert errors.count("stopped by SIGTERM") == 1 and "Traceback" not in errors, errors
    assert not still_there(workers)


SLOW = """
import time
print("importing", flush=True)
try:
    time.sleep(60)
except BaseException as error:
    raise ImportError("it is broken") from error
"""


@pytest.mark.parametrize(
    "module", ["nanochat_gka.train", "deit_gka.train", "trainkit_gka.torchrun", "runs.tables", "runs.bench.gpt"]
)
def test_ctrl_c_while_modules_are_imported_is_one_word(module, tmp_path):
    """Of a library that takes it for an error of its own."""
    for name in ("torch", "timm", "pandas"):
        (tmp_path / f"{name}.py").write_text(SLOW)
    process = start([*PYTHON, "-m", module], env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert process.stdout.readline() == "importing\n", process.communicate()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "interrupted\n") and process.returncode == 130


TOY = "-m toy_trainer --model-tag run --device-type cpu --save-every -1 --eval-every -1 --log-every 1 --steps 2000"


@pytest.mark.parametrize(
    "launcher, open_output, in_session",
    [(PYTHON, openpty, True), (TWO[:-1], openpty, True), (PYTHON, openpty, False), (PYTHON, os.pipe, False)],
)
def test_a_training_whose_output_is_closed_saves(launcher, open_output, in_session, tmp_path):
    """A terminal that closes its session sends SIGHUP. Without a signal training goes on: every line that it prints
    fails, whether to a terminal or to a pipe.
    """
    source, output = open_output()
    options = {"stdout": output, "stderr": output}
    if in_session:
        options |= {"stdin": output, "start_new_session": True}
        options["preexec_fn"] = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    words = [*TOY.split(), "--seconds", "0.01", "--out", tmp_path, "--results", tmp_path / "results.jsonl"]
    process, printed = start([*launcher, *words], **options), b""
    os.close(output)
    while b"round 5" not in printed:
        printed += os.read(source, 2**16)
    ranks = ranks_of(process.pid) if launcher != PYTHON else []
    os.close(source)
    if not in_session:
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
    assert process.wait(60) == 0 and not still_there(ranks)
    (folder,) = (tmp_path / "run/checkpoints").iterdir()
    last = (tmp_path / "run/log.jsonl").read_text().splitlines()[-1]
    assert f'"step": {int(folder.name[5:])}' in last and 5 <= int(folder.name[5:]) < 2000


JOB = [sys.executable, "-c", "import sys; from runs import jobs; jobs.start(sys.argv[1], sys.argv[2:]).wait()"]


@pytest.mark.parametrize("launcher, victim", [(TWO[:-1], "launcher"), (TWO[:-1], "rank"), (JOB, "launcher")])
def test_nothing_goes_on_without_the_launcher_or_a_rank(launcher, victim, tmp_path):
    """A second launch meanwhile is refused in one line."""
    places = ["--out", tmp_path, "--results", tmp_path / "results.jsonl", "--seconds", "0.01"]
    words = [*launcher, *TOY.split()[launcher is JOB :], *places, "--steps", 10**6]
    process = start(words)
    while "round 5" not in (printed := process.stdout.readline()):
        assert printed, process.stderr.read()
    ranks = [child.pid for child in psutil.Process(process.pid).children()]
    if victim == "rank":
        tiny.assert_one_line_error(tiny.finish(start(words)), "another process is training in")
    os.kill(process.pid if victim == "launcher" else ranks_of(process.pid)[1], signal.SIGKILL)
    assert not still_there(ranks, 30)
    done = tiny.finish(process)
    if victim == "launcher":
        last = (tmp_path / "run/log.jsonl").read_text().splitlines()[-1]
        (folder,) = (tmp_path / "run/checkpoints").iterdir()
        assert f'"step": {int(folder.name[5:])}' in last
    else:
        tiny.assert_one_line_error(done, "signal 9.* same command again", 75)


# Mistakes, and torchrun


@pytest.mark.parametrize("error, tries, code", [("UserError", 1, 2), ("PassingFault", 3, 75)])
def test_a_mistake_is_not_tried_again_and_a_passing_fault_is(error, tries, code, tmp_path, monkeypatch):
    process = command([*TORCHRUN, "--max-restarts", "2", "--"], error, tmp_path)
    errors, lines = process.communicate()[1], (tmp_path / "log").read_text().splitlines()
    repeated = int(error == "PassingFault")  # it is printed at each try, and at the end
    assert len(lines) == errors.count("error: it failed\n") - repeated == tries, errors
    assert process.returncode == code and errors.endswith("\nerror: it failed\n") and "Traceback" not in errors
    monkeypatch.chdir(ROOT)
    typed = [as_typed(TORCHRUN[0]), *TORCHRUN[1:], "--max-restarts", "2", "--", f"{tmp_path}/command.py"]
    assert lines == [shlex.join([*typed, "--work", error, "--folder", str(tmp_path)])] * tries


MEETING = """
import os, sys, torch
from trainkit_gka import distributed

with distributed.running("cpu") as runtime:
    total = int(runtime.sum(torch.ones(1)).item())
    where = os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"], os.uname().nodename
    sys.stdout.write(" ".join([*where, str(total)]) + "\\n")
"""


def test_one_machine_meets_at_the_loopback_address(tmp_path, monkeypatch):
    """Also where its name does not resolve; renaming it for this process takes a right."""
    (tmp_path / "meeting.py").write_text(MEETING)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    words, name = [*TWO, tmp_path / "meeting.py"], os.uname().nodename
    rename = [shutil.which("unshare") or "false", "-u", "sh", "-c", 'hostname no-such.invalid && exec "$@"', "sh"]
    if subprocess.run([*rename, "true"], capture_output=True).returncode == 0:
        words, name = [*rename, *words], "no-such.invalid"
    output, errors = start(words).communicate(timeout=100)
    assert output == f"127.0.0.1 lo {name} 2\n" * 2, errors


@pytest.mark.parametrize("words", [["--nnodes", "2"], ["--standalone", "--local-addr", "10.0.0.1"]])
def test_an_address_of_the_user_counts(words, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    taken = run.parse_args([*on_one_machine(words), "script.py"])
    assert taken.local_addr == (words[-1] if "--standalone" in words else None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
