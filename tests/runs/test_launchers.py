"""Several machines and restarts: what make and Slurm's file pass to torchrun."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import tyro
from torch.distributed import run as torchrun

from runs.paper import common
from trainkit.cli import SHUTDOWN_TIMEOUT, STORE_SWITCH

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "runs/several_machines.sbatch"
MEET = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "first:29500"}

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def taken(line: str) -> dict:
    """What torchrun understands of the processes that the flags of an experiment start."""
    own, _ = common.split(shlex.split(line))
    experiment, _ = tyro.cli(common.Training, args=own, return_unknown_args=True)
    words = experiment.command("nanochat_gka.train", ["--run", "x"])
    assert words[:2] == ["-m", "torch.distributed.run"]
    return vars(torchrun.parse_args(words[2:]))


@needs_make
@pytest.mark.parametrize(
    "settings, expected",
    [
        (("NNODES=2", "RDZV=first:29500", "NGPU=4"), {**MEET, "nproc_per_node": "4", "max_restarts": 0}),
        (("NNODES=2", "RDZV=first:29500", "NGPU=4", "RESTARTS=3"), {**MEET, "nproc_per_node": "4", "max_restarts": 3}),
        (("RESTARTS=3", "NGPU=1"), {"standalone": True, "nnodes": "1:1", "nproc_per_node": "1", "max_restarts": 3}),
    ],
    ids=["machines", "machines and restarts", "restarts of one process"],
)
def test_settings_reach_torchrun(make, settings, expected):
    trained = make("-n", "pretrain-d20", *settings).stdout.splitlines()[-1]
    found = taken(trained.partition("gpt_d20_gka ")[2])
    assert {name: found[name] for name in expected} == expected and found["training_script"] == "nanochat_gka.train"
    evaluated = shlex.split(make("-n", "eval-bpb", *settings, "RUN=x").stdout.splitlines()[-1])
    found = vars(torchrun.parse_args(evaluated[1:]))
    assert {name: found[name] for name in expected} == expected and evaluated[0] == ".venv/bin/torchrun"


@needs_make
def test_machines_without_a_place_to_meet_are_one_line(make):
    done = make("-n", "pretrain-d20", "NNODES=2")
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert "NNODES=2 needs RDZV=host:port" in done.stderr


@needs_make
def test_make_sets_what_torchrun_reads(make, ready, tmp_path):
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "${STORE_SWITCH} ${SHUTDOWN_TIMEOUT}"\n')
    python.chmod(0o755)
    assert make("-s", "report").stdout.split() == ["1", "300"]
    assert make("-s", "report", f"{SHUTDOWN_TIMEOUT}=60").stdout.split() == ["1", "60"]


def stub(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text("#!/bin/sh\n" + script)
    (folder / name).chmod(0o755)


def test_the_job_of_slurm_starts_one_torchrun_on_each_machine(tmp_path):
    stub(tmp_path, "scontrol", 'echo "$@" > asked\nprintf "first\\nsecond\\n"\n')
    stub(tmp_path, "srun", f'for word; do echo "$word"; done > started\necho "${STORE_SWITCH} ${SHUTDOWN_TIMEOUT}"\n')
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "77"}
    slurm |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BASE": "/shared/out"}
    words = ["bash", str(JOB), "--save-every", "500"]
    done = subprocess.run(words, cwd=tmp_path, env=slurm, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text() == "show hostnames n[1-2]\n"
    python, m, module, *flags = (tmp_path / "started").read_text().splitlines()
    assert (python, m, module) == (".venv/bin/python", "-m", "runs.paper.gpt_d20_gka")
    assert flags[-3:] == ["--", "--save-every", "500"] and flags[flags.index("--base") + 1] == "/shared/out"
    assert flags[flags.index("--data") + 1].startswith("/shared/out/packed/")
    found = taken(shlex.join(flags))
    expected = {**MEET, "rdzv_id": "77", "nproc_per_node": "8", "max_restarts": 3}
    assert {name: found[name] for name in expected} == expected
    (warning,) = re.findall(r"^#SBATCH --signal=TERM@(\d+) ", JOB.read_text(), re.MULTILINE)
    switch, timeout = done.stdout.split()
    assert switch == "1" and 30 < int(timeout) < int(warning)  # torchrun must not outlive the job
