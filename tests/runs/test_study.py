"""The study: trials with real trainings that are recorded, skipped, killed, stopped and refused; the grid; the list."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

import processes
from nanochat_gka.model.forms import with_flags
from nanochat_gka.train import TrainConfig
from runs.study import forms, grid
from runs.study.__main__ import StudyConfig, main
from runs.study.families import ALL, FAMILIES, LEARNED, OWN_RATES, WITHOUT
from runs.study.grid import GROUPS
from runs.study.rates import RATES, SMALLEST, Done, around_one, best_rate, tried_rates
from runs.study.runner import find, show_left
from runs.study.text import Study, load
from runs.study.trainings import Trainings
from runs.study.trials import Trial
from trainkit_gka.cli import UserError
from trainkit_gka.progress import read_events

TINY = Trial(depth=1, attention="gka", gka_values="normalised", tokens=64 * 60, batch=64, dtype="bfloat16")
REFUSED = replace(TINY, rate=1e6)  # its weight decay would take whole matrices away
OWN = ("tiny", "refused")  # groups of these tests
HANG_AFTER = processes.HANG_AFTER
RESULTS = Path(__file__).parents[2] / "runs/results/study"


@pytest.fixture(autouse=True, scope="module")
def tiny_grid():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runs.study.trials.SAVE_EVERY", 64 * 5)
        patch.setitem(GROUPS, "tiny", lambda done: [TINY])
        patch.setitem(GROUPS, "refused", lambda done: [REFUSED])
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def study(packed, folder, *groups, **settings):
    return Study(load(packed / "packed"), folder / "rows.jsonl", folder / "runs", list(groups or ["tiny"]), **settings)


def steps_of(one, trial=TINY):
    events = read_events(one.folder(trial) / "log.jsonl", "train")
    return events[-1]["step"] if events else 0


def disturb(one, trainings, act, at_step):
    """From another thread, `act` on the running trainer's process when it has done `at_step` steps."""

    def wait_and_act():
        end = time.monotonic() + HANG_AFTER
        while time.monotonic() < end and not (trainings.running and steps_of(one) >= at_step):
            time.sleep(0.005)
        act(next(iter(trainings.running.values())).process.pid)

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def trained(packed, tmp_path_factory):
    """A study whose one trial is finished and whose other trial is refused by the trainer."""
    folder = tmp_path_factory.mktemp("study")
    one = study(packed, folder, "tiny", "refused", retry_failed=True)
    assert Trainings(one, at_once=2, threads=1, device_type="cpu").run()  # it ends: a failed trial is tried once
    return folder


def test_a_finished_cell_is_one_row_with_all_that_was_measured(packed, trained):
    one = study(packed, trained)
    [row] = one.rows().values()
    assert Trial.from_row(row["trial"]) == TINY and row["key"] == one.key(TINY)
    assert {"commit", "hardware", "date", "torch", "data"} <= row.keys() and row["config"]["dtype"] == "bfloat16"
    metrics = row["metrics"]
    assert metrics["train_tokens"] == TINY.tokens and metrics["train_flops"] == TINY.flops(32, 300)
    assert len(metrics["curve"]) == TINY.steps and metrics["curve"][-1][0] == TINY.tokens
    assert metrics["evaluations"][-1][2] == metrics["val_bpb"] < metrics["evaluations"][0][2] - 0.5
    assert len(metrics["sigma"]["layer_0"]) == 1 and metrics["tokens_per_second"] > 0
    assert str(trained) not in json.dumps(row)  # no paths of this machine


def test_finished_and_failed_cells_are_skipped(packed, trained):
    one = study(packed, trained, "tiny", "refused")
    assert study(packed, trained.parent / "empty", "tiny", "refused", "tiny").left() == [TINY, REFUSED]  # once each
    before = one.results.read_text()
    [failed] = one.failed().values()
    assert failed["exit_code"] == 2 and failed["reason"].startswith("--weight-decay with --matrix-lr would take")
    assert one.left() == []
    assert Trainings(one, 1, 1, "cpu").run() and one.results.read_text() == before
    assert study(packed, trained, "tiny", "refused", retry_failed=True).left() == [REFUSED]


def test_a_stopped_and_killed_cell_continues_to_the_same_result(packed, trained, tmp_path, capsys):
    one = study(packed, tmp_path)
    trainings = Trainings(one, 1, 1, "cpu")
    thread = disturb(one, trainings, lambda pid: os.kill(os.getpid(), signal.SIGTERM), at_step=10)
    assert not trainings.run()
    thread.join()
    assert 10 <= steps_of(one) < TINY.steps and not one.results.exists() and not trainings.running
    trainings = Trainings(one, 1, 1, "cpu")
    thread = disturb(one, trainings, lambda pid: os.kill(pid, signal.SIGKILL), at_step=steps_of(one) + 10)
    assert trainings.run()
    thread.join()
    assert trainings.starts[TINY] == 2
    assert (one.folder(TINY) / "output.txt").read_text().count("resuming at step") == 2
    assert one.done() == study(packed, trained).done()


def test_a_cell_that_another_process_trains_is_left_to_it(packed, tmp_path):
    from trainkit_gka.files import locked

    one = study(packed, tmp_path)
    with locked(one.folder(TINY), "training in"):
        trainings = Trainings(one, 1, 1, "cpu")
        assert trainings._look(None) == 1 and not trainings.running
        trainings._start(TINY)  # both began at once, and the other one got the folder
        assert trainings.running[TINY].process.wait(HANG_AFTER) == 2
        assert trainings._look(None) == 1 and not trainings.running and not one.failed()
    assert not one.is_busy(TINY)


def test_another_text_has_other_trials(packed, trained):
    one = study(packed, trained)
    one.text = replace(one.text, identity={**one.text.identity, "tokenizer_sha256": "another"})
    assert one.done() == {} and one._work_out_left() == [TINY]


@pytest.fixture(scope="module")
def finished():
    """The rows of the trials that the repository has, by trial; a line of failure has no data."""
    rows = [json.loads(line) for line in (RESULTS / "text_large.jsonl").read_text().splitlines()]
    return {Trial.from_row(row["trial"]): row for row in rows if row["kind"] == "study"}


def test_keys_stay_what_they_were(finished):
    """Rows of earlier versions would be trained again, and look like others."""
    assert Trial(depth=2, attention="gka").key({"text": 1}) == "a164469405d16640"
    assert len(finished) > 600 and all(trial.key(row["data"]) == row["key"] for trial, row in finished.items())


def test_the_grid_asks_for_the_trials_that_are_finished(finished):
    """Which rates and seeds a group wants follows from the rows; a change would ask for others in their place."""
    done = Done({trial: row["metrics"]["val_bpb"] for trial, row in finished.items()})
    left = {name: {*group(done)} - done.keys() for name, group in GROUPS.items() if name not in OWN}
    assert {name for name in left if left[name]} <= {"sizes-seeds", "channels", "channels-longer", "ideas"}
    asked = {trial for name, group in GROUPS.items() if name not in OWN for trial in group(done)}
    assert len(done.keys() - asked) <= 1  # of a form that is no contender any more


def test_own_rates_of_channels_and_gates_are_what_the_rows_say(finished):
    done = Done({trial: row["metrics"]["val_bpb"] for trial, row in finished.items()})
    for learned, field, place in (("channels", "channel_rate", 0), ("gates", "gate_rate", 1)):
        for name, family in WITHOUT.items():
            first = Trial(**{**family, **LEARNED[learned], **SMALLEST}, rate=best_rate(family, done))
            scores = {getattr(trial, field): done.get(trial) for trial in around_one(first, field, done)}
            if family["attention"] == "GGGA":
                assert OWN_RATES[name] == OWN_RATES["GKA + offsets"]
            else:
                best = min(scores.values())
                assert OWN_RATES[name][place] == min(rate for rate, score in scores.items() if score < best + 0.0005)


def test_the_trainer_reads_a_cells_flags_as_it_means_them():
    for family in ALL.values():
        trial = Trial(depth=6, rate=4.0, seed=3, **family)
        config = tyro.cli(with_flags(TrainConfig, forms.NAME), args=[str(word) for word in trial.flags()])
        assert {**config.identity(), **trial.computed()} | {"gka_values": ""} == config.identity() | {"gka_values": ""}
        assert config.compile == "on" and "off" in replace(trial, depth=2).flags()
        assert config.matrix_lr * (2048 / 2**19) ** 0.5 == pytest.approx(0.02 * 4)  # the trainer's rule


def test_seeds_wait_for_rates_and_an_end_that_is_best_is_passed():
    family = FAMILIES["GKA"]
    done = Done({Trial(**SMALLEST, **family, rate=rate): loss for rate, loss in zip(RATES, (2.0, 1.9, 1.8))})
    assert best_rate(family, done) is None and tried_rates(family, done) == [1.0, 2.0, 4.0, 8.0]
    assert grid.seeds(done) == []
    done[Trial(**SMALLEST, **family, rate=8.0)] = 1.85
    assert best_rate(family, done) == 4.0
    assert {(trial.seed, trial.rate) for trial in grid.seeds(done)} == {(seed, 4.0) for seed in grid.SEEDS}


def test_every_group_has_cells_that_can_be_built():
    done = Done()
    done.assumed_rate = 2.0
    trials = [trial for name, group in GROUPS.items() if name not in OWN for trial in group(done)]
    assert all(trial.flops(512, 4096) > 0 for trial in trials)
    assert len({trial.key({}) for trial in trials}) == len(set(trials)) > 200


def test_the_list_shows_what_is_left_and_the_time_it_needs(packed, trained, capsys):
    one = study(packed, trained, "tiny", "refused", "rates", "seeds")
    show_left(one)
    printed = capsys.readouterr().out
    assert "tiny: 0 of 1 left" in printed and "refused: 0 of 1 left, 1 failed" in printed
    assert f"rates: {len(grid.rates(Done()))} of" in printed and "(rate unknown)" in printed
    assert "from the speed of finished trials" in printed
    assert f"{one.key(Trial(**SMALLEST, **FAMILIES['softmax'], rate=1.0))}  " in printed
    assert find(one, one.key(TINY)) == TINY
    with pytest.raises(UserError, match="--only nothing is not the key of a trial"):
        find(one, "nothing")


def test_wrong_groups_and_missing_rows_are_one_line(packed, tmp_path):
    with pytest.raises(UserError, match="--groups nothing: the groups are rates, seeds"):
        main(StudyConfig(groups=["nothing"]))
    with pytest.raises(UserError, match=r"no packed rows in .*make study packs them"):
        main(StudyConfig(data=tmp_path))
