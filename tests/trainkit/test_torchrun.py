"""A real torchrun with one process: what it tries again, and the command that continues a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import environment
from sources import ROOT
from trainkit.cli import SHUTDOWN_TIMEOUT, STORE_SWITCH

SCRIPT = """
import sys
from dataclasses import dataclass

from trainkit import cli

@dataclass
class Command:
    fails: str
    log: str

def main(config):
    with open(config.log, "a") as log:
        print(cli.command_line(), file=log)
    raise getattr(cli, config.fails)("it failed")

cli.run(main, Command)
"""


def fail(launcher, kind, folder) -> tuple[list[str], subprocess.CompletedProcess]:
    """Start a command that fails so, with two restarts: what it was started with each time, and how it ended."""
    script, log = folder / "failing.py", folder / "log"
    script.write_text(SCRIPT)
    words = [*launcher, "--standalone", "--max-restarts", "2", "--", str(script), "--fails", kind, "--log", str(log)]
    settings = {"PYTHONPATH": str(ROOT), STORE_SWITCH: "1", SHUTDOWN_TIMEOUT: "300"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**environment(), **settings})
    return log.read_text().splitlines(), done


@pytest.mark.parametrize(
    "launcher, kind, tries",
    [
        ([sys.executable, "-m", "torch.distributed.run"], "UserError", 1),
        ([str(Path(sys.executable).with_name("torchrun"))], "PassingFault", 3),
    ],
)
def test_a_mistake_is_not_tried_again_and_a_passing_fault_is(launcher, kind, tries, tmp_path):
    lines, done = fail(launcher, kind, tmp_path)
    assert len(lines) == done.stderr.count("error: it failed\n") == tries and done.returncode, done.stderr
    path = os.path.relpath(launcher[0], ROOT)
    typed = " ".join([Path(path).name if path.startswith(os.pardir) else path, *launcher[1:]])
    given = f"{STORE_SWITCH}=1 {SHUTDOWN_TIMEOUT}=300 {typed} --standalone --max-restarts 2 -- {tmp_path}/failing.py"
    assert lines == [f"{given} --fails {kind} --log {tmp_path}/log"] * tries
