"""Several machines and restarts: what make and Slurm's file pass to torchrun."""

import os
import re
import subprocess

import pytest
import tyro
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from runs.paper import common
from runs.settings import Problem
from sources import ROOT
from trainkit_gka.cli import SHUTDOWN_TIMEOUT
from trainkit_gka.torchrun import SETTINGS

JOB = ROOT / "runs/several_machines.sbatch"
MEET = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "first:29500"}


def taken(words: list[str]) -> dict:
    """What torchrun understands of a command: `python -m trainkit_gka.torchrun` and its flags."""
    assert words[1:3] == ["-m", "trainkit_gka.torchrun"]
    return vars(torchrun.parse_args(words[3:]))


@pytest.mark.parametrize(
    "settings, expected",
    [
        (dict(NNODES="2", RDZV="first:29500", NGPU="4"), {**MEET, "nproc_per_node": "4", "max_restarts": 0}),
        (dict(NNODES="2", RDZV="first:29500", RESTARTS="3"), {**MEET, "nproc_per_node": "1", "max_restarts": 3}),
        (dict(RESTARTS="3"), {"standalone": True, "nnodes": "1:1", "nproc_per_node": "1", "max_restarts": 3}),
    ],
    ids=["machines", "machines and restarts", "restarts of one process"],
)
def test_settings_reach_torchrun(commands, settings, expected):
    for target, module in (("pretrain-d20", "nanochat_gka.train"), ("eval-bpb", "nanochat_gka.evaluate")):
        found = taken(commands(target, **{"NGPU": "1", **settings})[-1])
        assert {name: found[name] for name in expected} == expected and found["training_script"] == module


@pytest.mark.parametrize(
    "place", ["host:x", "host:", "host:0", "host:65536", ":29500", "-host:1", "::1", "a b:1", "tcp://a:1"]
)
def test_a_place_to_meet_that_is_none_is_refused(lines, place):
    with pytest.raises(Problem, match=f"RDZV={place} must be host:port, the name or address"):
        lines("pretrain-d20", NNODES="2", RDZV=place)


def test_machines_and_a_place_to_meet_need_each_other(lines):
    with pytest.raises(Problem, match="NNODES=2 needs RDZV=host:port"):
        lines("pretrain-d20", NNODES="2")
    with pytest.raises(Problem, match="RDZV=first:29500 is where several machines meet: give their number too"):
        lines("pretrain-d20", RDZV="first:29500")


@pytest.mark.parametrize(
    "place, meant",
    [
        ("node-1.cluster:29500", ("node-1.cluster", 29500)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
        ("first", ("first", 29400)),
    ],
)
def test_a_place_to_meet_is_what_torchrun_takes(commands, place, meant):
    assert taken(commands("eval-bpb", NNODES="2", RDZV=place)[-1])["rdzv_endpoint"] == place
    assert parse_rendezvous_endpoint(place, 29400) == meant


def test_the_job_of_slurm_starts_one_torchrun_on_each_machine(tmp_path):
    scripts = {"scontrol": 'echo "$@" > asked\nprintf "first\\nsecond\\n"\n'}
    scripts["srun"] = 'for word; do echo "$word"; done > started\n'
    for name, script in scripts.items():
        (tmp_path / name).write_text("#!/bin/sh\n" + script)
        (tmp_path / name).chmod(0o755)
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
    experiment, _ = tyro.cli(common.Training, args=common.split(flags)[0], return_unknown_args=True)
    found = taken([python, *experiment.command("nanochat_gka.train", ["--run", "x"])])
    expected = {**MEET, "rdzv_id": "77", "nproc_per_node": "8", "max_restarts": 3}
    assert {name: found[name] for name in expected} == expected
    (warning,) = re.findall(r"^#SBATCH --signal=TERM@(\d+) ", JOB.read_text(), re.MULTILINE)
    assert 30 < int(SETTINGS[SHUTDOWN_TIMEOUT]) < int(warning)  # torchrun must not outlive the job
