"""What both trainers inherit: a run that is killed, stopped or interrupted ends with the same bits; bounds of flags."""

import math
import os
import random
import shutil
import signal
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType

import pytest

import gpt_runs
import processes
import tiny
import vision_runs
from deit_gka import evaluate as evaluate_vision
from deit_gka import train as train_vision
from nanochat_gka import accounting, corpus, eval_core, evaluate, generate, pack, tokenizer, train
from processes import descendants, signals_kept, still_there
from trainkit_gka.cli import check_bounds, flag_of
from trainkit_gka.distributed import Runtime
from trainkit_gka.progress import read_events
from vision_runs import steps_of, wait_for_step


@dataclass(frozen=True)
class Kind:
    """A trainer and a short run of its."""

    module: ModuleType
    runs: ModuleType  # its `flags` and `final`
    data: Path
    more: tuple
    steps: int

    def flags(self, out, *more):
        return self.runs.flags(self.data, out, *self.more, *more)

    def start(self, out, *more, ranks=1):
        return processes.start(self.module.__name__, *self.flags(out, *more), ranks=ranks, folder=out / "output")

    def train(self, out, *more, ranks=1):
        return processes.call(self.module.__name__, *self.flags(out, *more), ranks=ranks, folder=out / "output")

    def train_here(self, out, *more):
        """In this process. Returns the exit code."""
        with signals_kept():
            return tiny.exit_code(self.module.main, self.module.TrainConfig, *self.flags(out, *more))

    def train_until(self, out, step, *more, ranks=1):
        """Start it, and return it when that step is in the log."""
        process = self.start(out, *more, ranks=ranks)
        wait_for_step(process, out, step)
        return process


def records(out, event):
    """The log's records of `event`, without times."""
    log = read_events(out / "run/log.jsonl", event)
    times = {key for record in log for key in record if key in ("time", "waiting") or "per_second" in key}
    return [{key: value for key, value in record.items() if key not in times} for record in log]


@pytest.fixture(params=["language", "vision"])
def kind(request):
    data = request.getfixturevalue("packed" if request.param == "language" else "pictures")
    if request.param == "language":
        return Kind(train, gpt_runs, data, ("--num-iterations", 40, "--eval-every", 10), 40)
    return Kind(train_vision, vision_runs, data, ("--epochs", 4), 24)


def test_a_run_killed_at_random_ends_with_the_same_bits(kind, tmp_path):
    uninterrupted, killed, rng = tmp_path / "uninterrupted", tmp_path / "killed", random.Random(7)
    kind.train(uninterrupted)
    for step in sorted(rng.sample(range(3, kind.steps - 5), 2)):
        process = kind.train_until(killed, step)
        process.kill()
        assert process.processes[0].exitcode == -signal.SIGKILL
    assert "resuming at" in kind.train(killed).stdout
    assert kind.runs.final(killed, kind.steps) == kind.runs.final(uninterrupted, kind.steps)
    assert records(killed, "eval") == records(uninterrupted, "eval") != []
    assert steps_of(killed) == list(range(1, kind.steps + 1))


def test_two_ranks_stopped_and_killed_end_with_the_same_bits_and_one_may_continue(kind, tmp_path):
    uninterrupted, parts = tmp_path / "uninterrupted", tmp_path / "parts"
    kind.train(uninterrupted, ranks=2)
    for number, step in ((signal.SIGTERM, 4), (signal.SIGKILL, kind.steps // 2)):
        process = kind.train_until(parts, step, ranks=2)
        workers = [pid for rank in process.processes for pid in descendants(rank.pid)]
        if number == signal.SIGTERM:
            os.kill(process.processes[-1].pid, number)  # to one rank
            done = process.wait()
            assert done.returncode == 0 and ", saved; continue with: " in done.stdout, done.stderr
            assert (parts / f"run/checkpoints/step_{steps_of(parts)[-1]:08d}/manifest.json").exists()
        else:
            process.kill()
        assert not still_there(workers)
    shutil.copytree(parts, tmp_path / "alone")
    assert "resuming at" in kind.train(parts, ranks=2).stdout
    assert kind.runs.final(parts, kind.steps) == kind.runs.final(uninterrupted, kind.steps)
    assert records(parts, "eval") == records(uninterrupted, "eval")
    kind.train(tmp_path / "alone")  # adds in another order
    assert steps_of(tmp_path / "alone") == list(range(1, kind.steps + 1))


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
    assert kind.runs.final(parts, last) == kind.runs.final(uninterrupted, last)


# Flags

COMMANDS = {
    "train": train.TrainConfig(),
    "evaluate": evaluate.EvaluateConfig(),
    "eval_core": eval_core.CoreConfig(),
    "generate": generate.GenerateConfig(),
    "tokenizer": tokenizer.TokenizerConfig(),
    "pack": pack.PackConfig(),
    "corpus": corpus.CorpusConfig(),
    "accounting": accounting.AccountingConfig(),
    "train vision": train_vision.TrainConfig(data="digits"),
    "evaluate vision": evaluate_vision.EvaluateConfig(data="digits"),
}
MORE = {  # values that are wrong, beside those that are far too small or not finite
    "train": dict(adam_beta1=1.0, adam_beta2=1.0, device_batch_size=0, warmup_ratio=1.1,
                  warmdown_ratio=1.1, final_lr_frac=1.0, seed=2**63),
    "evaluate": dict(device_batch_size=0, top_p=1.1, seed=2**63),
    "tokenizer": dict(vocab_size=65537),
    "corpus": dict(num_shards=1824),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_of_a_command_has_bounds(command):
    """Also one that a flag added tomorrow has. --step is checked where the checkpoints are known."""
    config = COMMANDS[command]
    check_bounds(config)
    refused = list(MORE.get(command, {}).items())
    for field in fields(config):
        value = getattr(config, field.name)
        first = value[0] if isinstance(value, tuple) and value else value
        if type(first) in (int, float) and field.name != "step":
            wrong = (-(10**9),) if type(first) is int else (-1e9, math.nan, math.inf)
            refused += [(field.name, (*value[1:], one) if isinstance(value, tuple) else one) for one in wrong]
    for name, wrong in refused:
        with tiny.one_line_error(rf"^{flag_of(name)} must be .*, got \S+$"):
            check_bounds(replace(config, **{name: wrong}))
