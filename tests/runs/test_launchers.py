"""Several machines and restarts: what make and Slurm's file pass to torchrun."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import get_type_hints

import pytest
import tyro
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from nanochat_gka.data import fineweb, tokenizer
from nanochat_gka.pack import PackConfig
from runs import settings
from runs.paper import common
from trainkit_gka.cli import SHUTDOWN_TIMEOUT
from trainkit_gka.torchrun import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "runs/several_machines.sbatch"
MEET = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "first:29500"}

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def taken(line: str) -> dict:
    """What torchrun understands of the processes that the flags of an experiment start."""
    own, _ = common.split(shlex.split(line))
    experiment, _ = tyro.cli(common.Training, args=own, return_unknown_args=True)
    words = experiment.command("nanochat_gka.train", ["--run", "x"])
    assert words[:2] == ["-m", "trainkit_gka.torchrun"]
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
    found = vars(torchrun.parse_args(shlex.split(trained)[3:]))
    assert {name: found[name] for name in expected} == expected and found["training_script"] == "nanochat_gka.train"
    evaluated = shlex.split(make("-n", "eval-bpb", *settings, "RUN=x").stdout.splitlines()[-1])
    assert evaluated[:3] == [".venv/bin/python", "-m", "trainkit_gka.torchrun"]
    found = vars(torchrun.parse_args(evaluated[3:]))
    assert {name: found[name] for name in expected} == expected


@needs_make
def test_machines_without_a_place_to_meet_are_one_line(make):
    done = make("-n", "pretrain-d20", "NNODES=2")
    assert done.returncode == 2 and done.stdout.count("\n") == 1 and done.stderr.count("\n") == 2
    assert "error: NNODES=2 needs RDZV=host:port" in done.stderr


@needs_make
@pytest.mark.parametrize(
    "place", ["host:x", "host:", "host:0", "host:65536", ":29500", "-host:1", "::1", "a b:1", "tcp://a:1"]
)
def test_a_place_to_meet_that_is_none_is_one_line(make, place):
    done = make("-n", "pretrain-d20", "NNODES=2", f"RDZV={place}")
    assert done.returncode == 2 and done.stdout.count("\n") == 1 and done.stderr.count("\n") == 2
    assert f"error: RDZV={place} must be host:port, the name or address" in done.stderr


@needs_make
@pytest.mark.parametrize(
    "place, meant",
    [
        ("node-1.cluster:29500", ("node-1.cluster", 29500)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
        ("first", ("first", 29400)),
    ],
)
def test_a_place_to_meet_is_what_torchrun_takes(make, place, meant):
    line = make("-n", "eval-bpb", "NNODES=2", f"RDZV={place}").stdout.splitlines()[-1]
    assert torchrun.parse_args(shlex.split(line)[3:]).rdzv_endpoint == place
    assert parse_rendezvous_endpoint(place, 29400) == meant


@needs_make
@pytest.mark.parametrize(
    "setting, expected",
    [
        ("RDZV=first:29500", "RDZV=first:29500 is where several machines meet: give their number too, NNODES=2"),
        ("NNODES=1:2", "NNODES=1:2 must be a whole number of 1 or more"),
        ("NNODES=0", "NNODES=0 must be a whole number of 1 or more"),
        ("RESTARTS=x", "RESTARTS=x must be a whole number of 0 or more"),
        ("NGPU=-1", "NGPU=-1 must be a whole number of 0 or more"),
        ("DEPTH=1.5", "DEPTH=1.5 must be a whole number of 1 or more"),
        ("SHARDS=1", "SHARDS=1 must be a whole number between 2 and 1823"),
        ("VOCAB=264", "VOCAB=264 must be a whole number between 265 and 65536"),
        ("SEQ=0", "SEQ=0 must be a whole number between 1 and 1048576"),
    ],
)
def test_a_setting_that_no_command_takes_is_one_line_before_anything_starts(make, setting, expected):
    done = make("-n", "pretrain-d20", setting)
    assert done.returncode == 2 and done.stdout.count("\n") == 1
    assert done.stderr.count("\n") == 2 and f"error: {expected}" in done.stderr


def test_settings_have_the_bounds_of_the_flags_that_they_become():
    flags = {"SHARDS": fineweb.SHARDS, "VOCAB": tokenizer.VOCAB}
    flags["SEQ"] = get_type_hints(PackConfig, include_extras=True)["sequence_len"].__metadata__[0]
    assert {name: settings.WHOLE[name] for name in flags} == {name: (b.least, b.most) for name, b in flags.items()}


def stub(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text("#!/bin/sh\n" + script)
    (folder / name).chmod(0o755)


def test_the_job_of_slurm_starts_one_torchrun_on_each_machine(tmp_path):
    stub(tmp_path, "scontrol", 'echo "$@" > asked\nprintf "first\\nsecond\\n"\n')
    stub(tmp_path, "srun", 'for word; do echo "$word"; done > started\n')
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
    assert 30 < int(SETTINGS[SHUTDOWN_TIMEOUT]) < int(warning)  # torchrun must not outlive the job
