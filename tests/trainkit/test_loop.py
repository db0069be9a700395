"""The loop, with a trainer that adds up numbers: resuming, stopping, killing, and recording the end once."""

import json
import os
import random
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

import processes
import tiny
from processes import descendants, signals_kept, still_there
from toy_trainer import ToyConfig, ToyTrainer
from trainkit_gka import checkpoint, loop
from trainkit_gka.cli import flag_of
from trainkit_gka.distributed import Stop
from trainkit_gka.files import locked
from trainkit_gka.loop import finish_record
from trainkit_gka.progress import read_events
from trainkit_gka.results import read_results

STEPS = 12


@pytest.fixture(autouse=True)
def handlers():
    with signals_kept():
        yield


@pytest.fixture
def config(tmp_path):
    every = dict(save_every=3, eval_every=4, log_every=1)
    where = dict(out=tmp_path, results=tmp_path / "results.jsonl", device_type="cpu")
    return ToyConfig(model_tag="run", steps=STEPS, **every, **where)


def launch(config, **changes) -> int:
    """Train, in this process. Returns the exit code."""
    try:
        loop.launch(replace(config, **changes), ToyTrainer)
    except SystemExit as end:
        return end.code
    return 0


def events(config, event):
    return [record["step"] for record in read_events(config.folder / "log.jsonl", event)]


def weights(config):
    return checkpoint.load_newest(config.folder / "checkpoints", warn=pytest.fail).tensors("model")["weight"].tolist()


def children(process):
    """The processes that those of a command have started, by name."""
    pids = [pid for rank in process.processes for pid in descendants(rank.pid)]
    return {psutil.Process(pid).name(): pid for pid in pids if psutil.pid_exists(pid)}


def as_flags(config):
    """For a process."""
    names = ("out", "results", "steps", "model_tag", "device_type", "save_every", "eval_every", "log_every")
    return [word for name in names for word in (flag_of(name), getattr(config, name))]


@pytest.fixture
def uninterrupted(config, tmp_path):
    """The weights of a run that nothing interrupted."""
    launch(config, out=tmp_path / "uninterrupted", results=tmp_path / "uninterrupted.jsonl")
    return weights(replace(config, out=tmp_path / "uninterrupted"))


def test_saves_before_evaluating_and_finishes_once(config, capsys):
    config.folder.mkdir(parents=True)
    (config.folder / "log.jsonl").write_text('{"event": "train", "step": 1}\n')  # by a process killed before it saved
    launch(config)
    assert events(config, "train") == list(range(1, STEPS + 1)) and events(config, "eval") == [0, 4, 8, 12]
    saved = [record["saved"] for record in read_events(config.folder / "log.jsonl", "eval")]
    assert saved == [[], [3, 4], [6, 8], [9, 12]]
    (result,) = read_results(config.results)
    assert result["kind"] == "toy" and result["config"] == {"seed": 42, "steps": STEPS, "rate": 1.0, "model_tag": "run"}
    assert finish_record(config.folder, ("total",))["total"] == result["metrics"]["total"]
    printed = capsys.readouterr().out
    assert f"{config.folder}: finished, total" in printed and "resuming" not in printed
    launch(config)
    assert f"{config.folder}: already trained for its {STEPS} rounds" in capsys.readouterr().out
    assert len(read_results(config.results)) == 1 and events(config, "start") == [0]


@pytest.mark.parametrize(
    "stop, resumed, code", [(1, 1, 0), (4, 4, 0), (9, 9, 0), (4, 3, 0), (10, 9, 0), (4, 4, 85), (7, 6, 85)]
)
def test_stopped_run_ends_with_the_same_weights(config, uninterrupted, stop, resumed, code, monkeypatch, capsys):
    """By --stop-after or, with --stopped-code, by a signal; also where the newest checkpoint is damaged."""

    def status(trainer, numbers):
        if trainer.state["step"] == stop - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return ""

    with monkeypatch.context() as patched:
        if code:
            patched.setattr(ToyTrainer, "status", status)
        assert launch(config, stop_after=-1 if code else stop, stopped_code=85) == code
    assert f"stopped at round {stop} of {STEPS}, saved; continue with: " in capsys.readouterr().out
    assert checkpoint.load_newest(config.folder / "checkpoints").step == stop and not read_results(config.results)
    if resumed < stop:
        file = config.folder / f"checkpoints/step_{stop:08d}/model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    launch(config)
    assert f"resuming at round {resumed} of {STEPS}" in capsys.readouterr().out
    assert weights(config) == uninterrupted and events(config, "train") == list(range(1, STEPS + 1))
    assert events(config, "eval") == [0, 4, 8, 12] and len(read_results(config.results)) == 1


def test_kills_while_saving_keep_finished_checkpoints(config, tmp_path):
    """Six processes save 20 MB after each step, which takes no time, and are killed at random moments."""
    rng, newest = random.Random(1), 0
    flags = [*as_flags(config), "--steps", 10**6, "--save-every", 1, "--keep", 1, "--ballast", 2_500_000]
    for _ in range(6):
        process = processes.start("toy_trainer", *flags, "--eval-every", -1, folder=tmp_path / "output")
        while process.alive() and max([0, *events(config, "train")]) < newest + 3:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.15))
        process.kill()
        logged, saved = events(config, "train")[-1], checkpoint.load_newest(config.folder / "checkpoints", pytest.fail)
        newest = saved.step
        assert newest in (logged - 1, logged) and saved.state["progress"] == {"step": newest}
        assert (saved.tensors("ballast")["step"] == newest).all()


def test_a_signal_to_one_of_two_ranks_ends_their_evaluation(config, uninterrupted, tmp_path):
    flags, place = as_flags(config), dict(ranks=2, folder=tmp_path / "output")
    process = processes.start("toy_trainer", *flags, "--judged", 10_000, "--seconds", 0.01, **place)
    while process.alive() and "evaluating" not in process.out.read_text():
        time.sleep(0.01)
    os.kill(process.processes[-1].pid, signal.SIGTERM)
    done = process.wait(60)
    assert done.returncode == 0 and not events(config, "eval"), done
    processes.call("toy_trainer", *flags, **place)
    assert events(config, "eval") == [0, 4, 8, 12] and weights(config) == uninterrupted


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_goes_on_after_a_signal_ends_all_processes(config, uninterrupted, ranks, tmp_path):
    """And those that they have started, as for compiling. The signal is to a rank that waits for the other's step."""
    flags, place = as_flags(config), dict(ranks=ranks, folder=tmp_path / "output")
    process = processes.start("toy_trainer", *flags, "--slow", 8, "--limit", 1.5, **place)
    while process.alive() and "sleep" not in (names := children(process)):
        time.sleep(0.01)
    os.kill(process.processes[-1].pid, signal.SIGTERM)
    done = process.wait(60)
    assert done.returncode == 128 + signal.SIGTERM and not still_there(names.values(), 5), done
    assert re.fullmatch(r"stopped by SIGTERM at round 7 of .*step_00000006; rounds lost: 1; .*\n", done.stderr), done
    processes.call("toy_trainer", *flags, **place)
    assert weights(config) == uninterrupted and events(config, "train") == list(range(1, STEPS + 1))


FULL = [  # the limit of a file's size, the last checkpoint, and what is too large: its tensors, or the log
    (4000, 6, ["--ballast", 2000]),
    (1000, 7, ["--save-every", -1, "--eval-every", -1]),
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("most, last, more", FULL)
def test_a_full_disk_is_one_line_and_keeps_what_was_saved(config, uninterrupted, ranks, most, last, more, tmp_path):
    flags, place = as_flags(config), dict(ranks=ranks, folder=tmp_path / "output")
    processes.call("toy_trainer", *flags, "--stop-after", 6, **place)
    done = processes.call("toy_trainer", *flags, *more, "--most-bytes", most, check=False, **place)
    tiny.assert_one_line_error(done, "ulimit -f")
    assert checkpoint.load_newest(config.folder / "checkpoints", warn=pytest.fail).step == last
    assert not list(config.folder.glob("checkpoints/.tmp*"))
    processes.call("toy_trainer", *flags, **place)
    assert weights(config) == uninterrupted and len(read_results(config.results)) == 1


@pytest.mark.parametrize("lost", [["finish"], ["eval", "finish"], ["finish", "total"], ["finish", "results"]])
def test_a_kill_before_the_finish_record_loses_nothing_and_records_the_run_once(config, lost):
    """An earlier run of the same settings has another line. A finish record of another version may lack a number."""
    launch(config, out=config.out / "earlier")
    launch(config)
    log, lines = config.folder / "log.jsonl", config.results.read_text().splitlines()
    assert len(lines) == 2
    if "results" in lost:
        config.results.write_text("".join(f"{json.dumps({**json.loads(line), 'date': '2020'})}\n" for line in lines))
    if "total" in lost:
        *earlier, finished = map(json.loads, log.read_text().splitlines())
        del finished["total"]
        lines = [*tiny.NOT_OF_THIS_RUN, *map(json.dumps, [*earlier, finished]), *tiny.NOT_OF_THIS_RUN]
        log.write_text("".join(f"{line}\n" for line in lines))
    else:
        records = [record for record in read_events(log) if record["event"] not in lost or record["step"] < STEPS]
        log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert finish_record(config.folder, ToyTrainer.FINISH_KEYS) is None
    launch(config)
    assert finish_record(config.folder, ToyTrainer.FINISH_KEYS) is not None
    assert [step for step in events(config, "eval") if step != 1] == [0, 4, 8, 12]  # step 1: of another program
    assert len(read_results(config.results)) == 2 + ("results" in lost)


def test_what_cannot_run_is_refused_before_training(config, monkeypatch):
    """A second trainer of the run; results that cannot be written; charts without a package or a home; wrong traces."""
    with monkeypatch.context() as patched, tiny.one_line_error("--wandb offline: .*HOME"):
        patched.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
        patched.delenv("HOME", raising=False)
        launch(config, wandb="offline")
    refused = [("--profile", dict(profile=steps)) for steps in ("ten", "6-5", "5-99")]
    refused += [("Is a directory", dict(results=config.out)), ("Not a directory", dict(results=Path(__file__) / "a"))]
    for package, settings in (("tensorboard", dict(tensorboard=True)), ("wandb", dict(wandb="offline"))):
        monkeypatch.setitem(sys.modules, package, None)
        refused += [(rf"gka\[{package}\]", settings)]
    for message, settings in refused:
        with tiny.one_line_error(message):
            launch(config, **settings)
    with locked(config.folder, "training in"), tiny.one_line_error("another process is training in "):
        launch(config)
    assert not events(config, "train")


def test_a_warning_is_printed_once_and_recorded_at_the_end(config, monkeypatch, capsys):
    monkeypatch.setattr(ToyTrainer, "warnings", lambda trainer: {"weights": "they are odd"})
    launch(config, stop_after=5)
    launch(config)
    assert events(config, "warning") == [1] and capsys.readouterr().out.count("warning: round 1: they are odd") == 2
    assert read_results(config.results)[0]["metrics"]["warnings"] == ["round 1: they are odd"]


def test_another_interrupt_ends_at_once_unless_it_is_the_same_one(monkeypatch):
    """torchrun passes on a Ctrl-C that its processes had from the terminal already."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
        assert stop.requested
    now[0] += Stop.SAME_SIGNAL_WITHIN + 1
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_nonfinite_numbers_end_the_run(config):
    with tiny.one_line_error("weights are not finite at round .*Last checkpoint: .*step_0000000.* a lower --rate$"):
        launch(config, rate=1e10)


@pytest.mark.parametrize("key", [{}, {"WANDB_API_KEY": "no key"}])
def test_wandb_without_a_good_key_is_one_line(config, key, tmp_path):
    place = dict(check=False, folder=tmp_path / "output", env={**processes.without_account(tmp_path), **key})
    done = processes.call("toy_trainer", *as_flags(config), "--wandb", "online", **place)
    tiny.assert_one_line_error(done, "--wandb online")
    assert not events(config, "train")
