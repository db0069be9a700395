"""What both trainers inherit: a run that is killed, stopped or interrupted ends with the same bits; charts; bounds."""

import json
import os
import re
import shutil
import signal
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gpt_runs
import processes
import tiny
import vision_runs
from deit_gka import train as train_vision
from nanochat_gka import train
from processes import descendants, signals_kept, still_there
from sources import flags_of
from tiny import steps_of
from trainkit_gka.cli import Bounds, check_bounds
from trainkit_gka.distributed import Runtime
from trainkit_gka.progress import read_events
from vision_runs import wait_for_step


@dataclass(frozen=True)
class Kind:
    """A trainer and a short run of its."""

    module: ModuleType
    runs: ModuleType  # its `flags`
    data: Path
    more: tuple
    steps: int

    def flags(self, out, *more):
        return self.runs.flags(self.data, out, *self.more, *more)

    def train(self, out, *more, **options):
        flags = self.flags(out, *more)
        return processes.call(self.module.__name__, *flags, folder=out / "output", **options)

    def train_here(self, out, *more):
        """In this process. Returns the exit code."""
        with signals_kept():
            return tiny.exit_code(self.module.main, self.module.TrainConfig, *self.flags(out, *more))

    def final(self, out):
        return tiny.final(out, self.steps)


def records(out, event):
    """The log's records of `event`, without times."""
    log = read_events(out / "run/log.jsonl", event)
    times = {key for record in log for key in record if key in ("time", "waiting") or "per_second" in key}
    return [{key: value for key, value in record.items() if key not in times} for record in log]


@pytest.fixture(scope="module", params=["language", "vision"])
def kind(request):
    if request.param == "language":
        more = ("--num-iterations", 40, "--eval-every", 10)
        return Kind(train, gpt_runs, request.getfixturevalue("packed"), more, 40)
    return Kind(train_vision, vision_runs, request.getfixturevalue("pictures"), ("--epochs", 4), 24)


@pytest.fixture(scope="module")
def uninterrupted(kind, tmp_path_factory):
    """The run, by one process."""
    out = tmp_path_factory.mktemp("uninterrupted")
    kind.train(out)
    return out


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_stopped_and_killed_ends_with_the_same_bits(kind, ranks, uninterrupted, tmp_path):
    """One of two processes may continue it too, which adds in another order."""
    parts = tmp_path / "parts"
    for number, step in ((signal.SIGTERM, 4), (signal.SIGKILL, kind.steps // 2)):
        process = processes.start(kind.module.__name__, *kind.flags(parts), ranks=ranks, folder=parts / "output")
        wait_for_step(process, parts, step)
        workers = [pid for rank in process.processes for pid in descendants(rank.pid)]
        if number == signal.SIGTERM:
            os.kill(process.processes[-1].pid, number)  # to one rank
            done = process.wait()
            assert done.returncode == 0 and ", saved; continue with: " in done.stdout, done.stderr
            assert (parts / f"run/checkpoints/step_{steps_of(parts)[-1]:08d}/manifest.json").exists()
        else:
            process.kill()
        assert not still_there(workers)
    if ranks > 1:
        uninterrupted, alone = tmp_path / "uninterrupted", shutil.copytree(parts, tmp_path / "alone")
        kind.train(uninterrupted, ranks=2)
        kind.train(alone)
        assert steps_of(alone) == list(range(1, kind.steps + 1))
    assert "resuming at" in kind.train(parts, ranks=ranks).stdout
    assert kind.final(parts) == kind.final(uninterrupted)
    assert records(parts, "eval") == records(uninterrupted, "eval") != []
    assert steps_of(parts) == list(range(1, kind.steps + 1))


def test_charts_and_traces_of_a_continued_run_are_of_one_run_and_change_no_weight(kind, uninterrupted, tmp_path):
    """Also of one that goes back two steps. wandb has two files with one id, which `wandb sync` sends as one run."""
    flags = ["--wandb", "offline", "--tensorboard", "--profile", "5-8", "--stop-after"]
    for stop in (6, -1):
        done = kind.train(tmp_path, *flags, stop, env=processes.without_account(tmp_path))
        assert "arning: resume" not in done.stderr + done.stdout, done.stderr
        shutil.rmtree(tmp_path / "run/checkpoints/step_00000006", ignore_errors=True)
    run, losses = tmp_path / "run", {record["step"]: record["loss"] for record in records(tmp_path, "train")}
    assert kind.final(tmp_path) == kind.final(uninterrupted)
    first, second = run.glob("wandb/offline-run-*/*.wandb")
    assert first.stem == second.stem == f"run-{(run / 'wandb_id').read_text().strip()}"
    written = first.read_bytes() + second.read_bytes()
    in_file = [loss for loss in losses.values() if repr(loss).encode() in written]  # a block's end may split some
    assert b"train/loss" in written and len(in_file) > len(losses) / 2
    charts = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    points = [(one.step, one.value) for one in charts.Scalars("train/loss")]
    assert len(points) == len(losses) and dict(points) == pytest.approx(losses)
    sigma = records(tmp_path, "eval")[-1]["sigma"]["layer_0"]
    for name, value in (("mean", sum(sigma) / len(sigma)), ("min", min(sigma)), ("max", max(sigma))):
        assert charts.Scalars(f"eval/sigma/layer_0/{name}")[-1].value == pytest.approx(value)
    traces = [json.loads(path.read_text())["traceEvents"] for path in sorted(run.glob("profile_*.json"))]
    names = [event.get("name", "") for trace in traces for event in trace]
    steps = [name for name in names if re.fullmatch(rf"{kind.module.Trainer.STEP} \d+", name)]
    assert [int(name.split()[1]) for name in steps] == [5, 6, 5, 6, 7, 8]
    assert any(name.startswith("aten::") for name in names)


EVALUATIONS = [  # the event, the flags, and which call of `rounds` is interrupted; step 0 of language is evaluated too
    ("language", "eval", ["--num-iterations", 4, "--eval-every", 2, "--eval-tokens", 320, "--device-batch-size", 1], 3),
    ("language", "sample", ["--num-iterations", 4, "--eval-every", -1, "--sample-every", 2], 3),
    ("vision", "eval", ["--epochs", 2, "--num-workers", 0, "--device-batch-size", 2], 1),
]


@pytest.mark.parametrize("kind, event, more, call", EVALUATIONS, indirect=["kind"])
def test_an_evaluation_that_a_signal_interrupts_is_run_again(
    kind, event, more, call, tmp_path, monkeypatch, capsys, one_thread
):
    uninterrupted, parts, rounds, calls = tmp_path / "uninterrupted", tmp_path / "parts", Runtime.rounds, []
    assert kind.train_here(uninterrupted, *more) == 0

    def interrupted(runtime, items, stop):
        calls.append(items)
        for number, item in enumerate(rounds(runtime, items, stop)):
            if len(calls) == call and number == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            assert len(calls) < call or number < 5
            yield item

    with monkeypatch.context() as patched:
        patched.setattr(Runtime, "rounds", interrupted)
        assert kind.train_here(parts, *more) == 0
    step = steps_of(parts)[-1]
    assert f"stopped at {kind.module.Trainer.STEP} {step} of " in capsys.readouterr().out
    assert step not in [record["step"] for record in records(parts, event)]
    assert kind.train_here(parts, *more) == 0
    assert records(parts, event) == records(uninterrupted, event) and step in [r["step"] for r in records(parts, event)]
    last = steps_of(uninterrupted)[-1]
    assert tiny.final(parts, last) == tiny.final(uninterrupted, last)


# Flags

COMMANDS = flags_of("nanochat_gka") | flags_of("deit_gka")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_of_a_command_has_bounds(command):
    """--step is checked where the checkpoints are known."""
    required = [one.name for one in fields(COMMANDS[command]) if one.default is MISSING is one.default_factory]
    config = COMMANDS[command](**dict.fromkeys(required, "digits"))
    check_bounds(config)
    for name, hint in get_type_hints(COMMANDS[command], include_extras=True).items():
        value = getattr(config, name)
        first = value[0] if isinstance(value, tuple) and value else value
        if type(first) in (int, float) and name != "step":
            assert any(isinstance(part, Bounds) for part in hint.__metadata__), name
