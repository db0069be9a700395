"""A real torchrun with one process: what it tries again, how it ends, and the command that continues a run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run

from processes import environment
from sources import ROOT
from trainkit_gka.command import OUR_TORCHRUN as OURS
from trainkit_gka.command import as_typed
from trainkit_gka.torchrun import SETTINGS, on_one_machine

SCRIPT = """
import sys
from dataclasses import dataclass

from trainkit_gka import cli, command

@dataclass
class Command:
    fails: str
    log: str

def main(config):
    with open(config.log, "a") as log:
        print(command.command_line(), file=log)
    raise getattr(cli, config.fails)("it failed")

cli.run(main, Command)
"""


def fail(launcher, kind, folder) -> tuple[list[str], subprocess.CompletedProcess]:
    """Start a command that fails so, with two restarts: what it was started with each time, and how it ended."""
    script, log = folder / "failing.py", folder / "log"
    script.write_text(SCRIPT)
    words = [*launcher, "--standalone", "--max-restarts", "2", "--", str(script), "--fails", kind, "--log", str(log)]
    settings = {"PYTHONPATH": str(ROOT), **({} if OURS in launcher else SETTINGS)}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**environment(), **settings})
    return log.read_text().splitlines(), done


@pytest.mark.parametrize(
    "launcher, kind, tries, code",
    [
        ([sys.executable, "-m", OURS], "UserError", 1, 2),
        ([sys.executable, "-m", OURS], "PassingFault", 3, 75),
        ([str(Path(sys.executable).with_name("torchrun"))], "UserError", 1, 1),
    ],
)
def test_a_mistake_is_not_tried_again_and_a_passing_fault_is(launcher, kind, tries, code, tmp_path, monkeypatch):
    lines, done = fail(launcher, kind, tmp_path)
    ours = OURS in launcher
    repeated = int(ours and kind == "PassingFault")  # it is said at each try, and at the end
    assert len(lines) == done.stderr.count("error: it failed\n") - repeated == tries, done.stderr
    assert done.returncode == code
    if ours:
        assert done.stderr.endswith("\nerror: it failed\n") and "Traceback" not in done.stderr
    monkeypatch.chdir(ROOT)
    settings = [] if ours else [f"{name}={value}" for name, value in SETTINGS.items()]
    words = [*settings, as_typed(launcher[0]), *launcher[1:], "--standalone", "--max-restarts", "2"]
    assert lines == [" ".join([*words, f"-- {tmp_path}/failing.py --fails {kind} --log {tmp_path}/log"])] * tries


MEETING = """
import os, sys, torch
from trainkit_gka import distributed

with distributed.running("cpu") as runtime:
    total = int(runtime.sum(torch.ones(1)).item())
    where = os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"], os.uname().nodename
    sys.stdout.write(" ".join([*where, str(total)]) + "\\n")
"""


def test_one_machine_meets_at_the_loopback_address(tmp_path):
    """Also where its own name does not resolve, which needs the right to give this process a name of its own."""
    script, unshare = tmp_path / "meeting.py", shutil.which("unshare")
    script.write_text(MEETING)
    words = [sys.executable, "-m", OURS, "--standalone", "--nproc-per-node", "2", "--", str(script)]
    name, settings = os.uname().nodename, {**environment(), "PYTHONPATH": str(ROOT)}
    settings.pop("GLOO_SOCKET_IFNAME", None)
    rename = [str(unshare), "-u", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"]
    if unshare and subprocess.run([*rename, "true"], capture_output=True).returncode == 0:
        words, name = [*rename, *words], "no-such-host.invalid"
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=settings, timeout=100)
    assert done.stdout == f"127.0.0.1 lo {name} 2\n" * 2, done.stderr


@pytest.mark.parametrize("words", [["--nnodes", "2"], ["--standalone", "--local-addr", "10.0.0.1"]])
def test_an_address_that_is_given_counts(words, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    taken = run.parse_args([*on_one_machine(words), "script.py"])
    assert taken.local_addr == (words[-1] if "--standalone" in words else None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
