"""The loop, with a trainer that adds up numbers: resuming, stopping, killing, and recording the end once."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace

import pytest

import processes
import tiny
from processes import signals_kept
from toy_trainer import ToyConfig, ToyTrainer
from trainkit_gka import checkpoint, loop
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime, Stop
from trainkit_gka.files import locked
from trainkit_gka.loop import finish_record, launch
from trainkit_gka.progress import read_events
from trainkit_gka.results import append_result, read_results

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


def events(config, event):
    return [record["step"] for record in read_events(config.folder / "log.jsonl", event)]


def weights(config):
    return checkpoint.load_newest(config.folder / "checkpoints", warn=pytest.fail).tensors("model")["weight"].tolist()


def as_flags(config):
    """For a process of its own."""
    flags = {"out": config.out, "results": config.results, "steps": STEPS, "model-tag": "run", "device-type": "cpu"}
    flags |= {"save-every": 3, "eval-every": 4, "log-every": 1}
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


@pytest.fixture
def uninterrupted(config, tmp_path):
    """The weights of a run that nothing interrupted."""
    launch(replace(config, out=tmp_path / "uninterrupted", results=tmp_path / "uninterrupted.jsonl"), ToyTrainer)
    return weights(replace(config, out=tmp_path / "uninterrupted"))


def test_saves_before_evaluating_and_finishes_once(config, capsys):
    launch(config, ToyTrainer)
    assert events(config, "train") == list(range(1, STEPS + 1)) and events(config, "eval") == [0, 4, 8, 12]
    saved = [record["saved"] for record in read_events(config.folder / "log.jsonl", "eval")]
    assert saved == [[], [3, 4], [6, 8], [9, 12]]
    names = sorted(path.name for path in (config.folder / "checkpoints").iterdir())
    assert names == ["step_00000009", "step_00000012"]
    (result,) = read_results(config.results)
    assert result["kind"] == "toy" and result["config"] == {"seed": 42, "steps": STEPS, "rate": 1.0, "model_tag": "run"}
    assert finish_record(config.folder, ("total",))["total"] == result["metrics"]["total"]
    printed = capsys.readouterr().out
    assert f"{config.folder}: finished, total" in printed and "resuming" not in printed
    launch(config, ToyTrainer)
    assert f"{config.folder}: already trained for its {STEPS} rounds" in capsys.readouterr().out
    assert len(read_results(config.results)) == 1 and events(config, "start") == [0]


@pytest.mark.parametrize("stop, resumed", [(1, 1), (4, 4), (9, 9), (11, 11), (4, 3), (10, 9)])
def test_stopped_run_ends_with_the_same_weights(config, uninterrupted, stop, resumed, capsys):
    """Also where the newest checkpoint is damaged, and the one before it is resumed."""
    launch(replace(config, stop_after=stop), ToyTrainer)
    assert f"stopped at round {stop} of {STEPS}, saved; continue with: " in capsys.readouterr().out
    assert checkpoint.load_newest(config.folder / "checkpoints").step == stop and not read_results(config.results)
    if resumed < stop:
        file = config.folder / f"checkpoints/step_{stop:08d}/model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    launch(config, ToyTrainer)
    assert f"resuming at round {resumed} of {STEPS}" in capsys.readouterr().out
    assert weights(config) == uninterrupted and events(config, "train") == list(range(1, STEPS + 1))
    assert events(config, "eval") == [0, 4, 8, 12] and len(read_results(config.results)) == 1


def test_a_signal_finishes_the_step_saves_and_exits_with_the_stopped_code(config, uninterrupted, monkeypatch):
    """--stop-after is no signal."""
    config, step = replace(config, stopped_code=85), ToyTrainer.step
    launch(replace(config, stop_after=2), ToyTrainer)

    def interrupted(self, asked_to_stop):
        if not asked_to_stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, asked_to_stop)

    monkeypatch.setattr(ToyTrainer, "step", interrupted)
    with pytest.raises(SystemExit) as end:
        launch(config, ToyTrainer)
    assert end.value.code == 85 and checkpoint.load_newest(config.folder / "checkpoints").step == 4
    monkeypatch.undo()
    launch(config, ToyTrainer)
    assert weights(config) == uninterrupted


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


def test_kill_before_the_finish_record_loses_nothing(config, uninterrupted):
    launch(config, ToyTrainer)
    log = config.folder / "log.jsonl"
    for missing in (("finish",), ("eval", "finish")):
        lines = [record for record in read_events(log) if record["event"] not in missing or record["step"] < STEPS]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        launch(config, ToyTrainer)
        assert events(config, "eval") == [0, 4, 8, 12] and events(config, "finish") == [STEPS]
    assert len(read_results(config.results)) == 1


@pytest.mark.parametrize("appended", [True, False])
def test_an_end_before_the_finish_record_records_the_run_once(config, monkeypatch, appended):
    """An earlier run of the same settings has a line of its own."""
    launch(replace(config, out=config.out / "earlier"), ToyTrainer)
    line = json.loads(config.results.read_text())
    config.results.write_text(json.dumps({**line, "date": "2020-01-01 00:00"}) + "\n")

    def append_and_end(*record):
        if appended:
            append_result(*record)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "append_result", append_and_end)
    with pytest.raises(KeyboardInterrupt):
        launch(config, ToyTrainer)
    monkeypatch.undo()
    assert len(read_results(config.results)) == 1 + appended and not events(config, "finish")
    launch(config, ToyTrainer)
    assert len(read_results(config.results)) == 2 and events(config, "finish") == [STEPS]


def test_incomplete_finish_record_does_not_count(config):
    launch(config, ToyTrainer)
    tiny.damage_log(config.folder / "log.jsonl", finish="total")
    assert finish_record(config.folder, ToyTrainer.FINISH_KEYS) is None
    launch(config, ToyTrainer)
    assert finish_record(config.folder, ToyTrainer.FINISH_KEYS) is not None and len(read_results(config.results)) == 1


def test_a_second_trainer_of_the_run_is_refused(config):
    with locked(config.folder, "training in"), pytest.raises(UserError, match="another process is training in "):
        launch(config, ToyTrainer)


def test_results_that_cannot_be_written_are_an_error_before_training(config):
    config.results.mkdir()
    with pytest.raises(IsADirectoryError):
        launch(config, ToyTrainer)
    assert not (config.folder / "log.jsonl").exists()


def test_a_warning_is_said_once_and_recorded_at_the_end(config, monkeypatch, capsys):
    monkeypatch.setattr(ToyTrainer, "warnings", lambda trainer: {"weights": "they are odd"})
    launch(replace(config, stop_after=5), ToyTrainer)
    launch(config, ToyTrainer)
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
        launch(replace(config, rate=1e10), ToyTrainer)
    trainer = ToyTrainer(replace(config, model_tag="new"), Runtime(0, 1, ToyTrainer.CPU))
    assert "the weights were not touched" in str(trainer.diverged("the sum is nan"))
    trainer.model.weight.data.fill_(float("inf"))
    assert "has ruined the weights" in str(trainer.diverged("the sum is nan"))


def test_trainer_is_closed_however_training_ends(config, monkeypatch):
    closed = []
    monkeypatch.setattr(ToyTrainer, "close", lambda trainer: closed.append(trainer.state["step"]))
    launch(config, ToyTrainer)
    monkeypatch.setattr(ToyTrainer, "evaluate", lambda trainer, stop: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launch(replace(config, model_tag="failing"), ToyTrainer)
    assert closed == [STEPS, 0]


def test_other_settings_are_refused_by_flag(config, capsys):
    launch(replace(config, stop_after=4), ToyTrainer)
    with pytest.raises(UserError, match=r"^--rate is 2.0 but the run in .*/run has 1.0"):
        launch(replace(config, rate=2.0), ToyTrainer)
    launch(replace(config, save_every=1, keep=9, log_every=5, eval_every=-1), ToyTrainer)
    assert "resuming at round 4" in capsys.readouterr().out and events(config, "eval") == [0, 12]


def test_machines_may_have_the_shared_folder_in_different_places(config, monkeypatch, tmp_path):
    """What processes compare at the start does not have the folder's path in it."""
    compared = []
    monkeypatch.setattr(Runtime, "check_same", lambda self, describe: compared.append(describe()))
    for mounted in ("a", "b"):
        launch(replace(config, out=tmp_path / mounted), ToyTrainer)
    assert compared[0] == compared[1] == {"a run that has done this many rounds": "0"}


# Traces and charts


def test_profile_is_a_trace_of_the_named_steps_and_changes_no_weight(config, uninterrupted):
    """A run that is stopped in between leaves a file of each part."""
    for stop in (4, -1):
        launch(replace(config, profile="2-6", stop_after=stop), ToyTrainer)
    assert weights(config) == uninterrupted
    traces = [json.loads(path.read_text())["traceEvents"] for path in sorted(config.folder.glob("profile_*.json"))]
    names = [event.get("name", "") for trace in traces for event in trace]
    assert [name for name in names if re.fullmatch(r"round \d+", name)] == [f"round {n}" for n in range(2, 7)]
    assert "aten::mul_" in names


@pytest.mark.parametrize("steps", ["ten", "6-5", "5-99"])
def test_steps_that_cannot_be_profiled_are_refused(config, steps):
    with tiny.one_line_error("--profile"):
        launch(replace(config, profile=steps), ToyTrainer)
    assert not events(config, "train")


@pytest.fixture
def without_account(tmp_path):
    """The environment of someone who has never heard of Weights & Biases."""
    variables = {name: value for name, value in processes.environment().items() if not name.startswith("WANDB_")}
    return {**variables, "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}


def test_wandb_has_the_numbers_and_a_continued_run_continues_its_own(config, without_account, tmp_path):
    """Two processes, one id, which `wandb sync` sends as one run."""
    flags, place = [*as_flags(config), "--wandb", "offline"], dict(folder=tmp_path / "output", env=without_account)
    processes.call("toy_trainer", *flags, "--stop-after", 3, **place)
    (path,) = config.folder.glob("wandb/offline-run-*/*.wandb")
    losses = [record["loss"] for record in read_events(config.folder / "log.jsonl", "train")]
    assert b"train/loss" in path.read_bytes() and repr(losses[-1]).encode() in path.read_bytes()
    done = processes.call("toy_trainer", *flags, **place)
    assert "arning: resume" not in done.stderr + done.stdout, done.stderr
    folders = [*config.folder.glob("wandb/offline-run-*")]
    assert {path.name.rpartition("-")[2] for path in folders} == {(config.folder / "wandb_id").read_text().strip()}
    assert len(folders) == 2


@pytest.mark.parametrize("key", [{}, {"WANDB_API_KEY": "no key"}])
def test_wandb_without_a_good_key_is_one_line(config, without_account, key, tmp_path):
    place = dict(check=False, folder=tmp_path / "output", env={**without_account, **key})
    done = processes.call("toy_trainer", *as_flags(config), "--wandb", "online", **place)
    tiny.assert_one_line_error(done, "--wandb online")
    assert not events(config, "train")


@pytest.mark.parametrize("package, settings", [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb": "offline"})])
def test_charts_without_their_package_name_the_extra(config, monkeypatch, package, settings):
    monkeypatch.setitem(sys.modules, package, None)
    with tiny.one_line_error(rf"gka\[{package}\]"):
        launch(replace(config, **settings), ToyTrainer)
