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
from runs.study.families import ALL, FAMILIES, LEARNED, NARROW, OWN_RATES, WITHOUT, fits_depth
from runs.study.forms.config import StudyShape
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
HANG_AFTER = processes.HANG_AFTER
RESULTS = Path(__file__).parents[2] / "runs/results/study"


@pytest.fixture(autouse=True)
def tiny_grid(monkeypatch):
    monkeypatch.setattr("runs.study.trials.SAVE_EVERY", 64 * 5)
    monkeypatch.setitem(GROUPS, "tiny", lambda done: [TINY])
    monkeypatch.setitem(GROUPS, "refused", lambda done: [REFUSED])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runs.study.trials.SAVE_EVERY", 64 * 5)
        patch.setitem(GROUPS, "tiny", lambda done: [TINY])
        patch.setitem(GROUPS, "refused", lambda done: [REFUSED])
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
    assert not one.is_busy(TINY)


def test_another_configuration_or_text_is_another_trial(packed, trained):
    one = study(packed, trained)
    changed = dict(
        depth=2, attention="softmax", head_offsets="PS", value_embeds="all", gka_values="raw", sigma_squared=3.0
    )
    changed |= dict(window_pattern="S", rate=2.0, seed=1, tokens=6400, batch=32, dtype="float32", offset_layers="all")
    changed |= dict(mixing="canon", rotary="half", kernel="mean", learn_sigma=False, gka_window=5)
    changed |= dict(channel_bandwidths=True, head_gates=True, head_dim=128)
    own_rates = dict(channel_rate=4.0, gate_rate=4.0)  # of what the model must have
    assert changed.keys() | own_rates.keys() == TINY.__dataclass_fields__.keys()
    learned = replace(TINY, channel_bandwidths=True, head_gates=True)
    trials = [TINY, learned, *(replace(TINY, **{name: value}) for name, value in changed.items())]
    trials += [replace(learned, **{name: value}) for name, value in own_rates.items()]
    keys = {one.key(trial) for trial in trials}
    assert len(keys) == len(trials)
    other = replace(one.text, identity={**one.text.identity, "tokenizer_sha256": "another"})
    one.text = other
    assert one.key(TINY) not in keys and one.done() == {} and one._work_out_left() == [TINY]


def test_keys_stay_what_they_were():
    """Rows of earlier versions would be trained again, and look like others."""
    assert Trial(depth=2, attention="gka").key({"text": 1}) == "a164469405d16640"
    rows = [json.loads(line) for line in Path("runs/results/study/text_large.jsonl").read_text().splitlines()]
    finished = [row for row in rows if row["kind"] == "study"]  # a line of failure has no data
    assert len(finished) >= 10 and all(Trial.from_row(row["trial"]).key(row["data"]) == row["key"] for row in finished)


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


def test_a_hybrid_takes_the_rate_of_its_form_without_softmax_and_needs_its_depth():
    family, done = FAMILIES["GKA + offsets"], Done()
    for rate, loss in zip(RATES, (2.0, 1.9, 1.95)):
        done[Trial(**SMALLEST, **family, rate=rate)] = loss
    hybrids = [trial for trial in grid.sizes(done) + grid.depth_4(done) if trial.attention in ("GGGA", "GGGGGA")]
    assert {trial.depth for trial in hybrids if trial.attention == "GGGA"} == {4, 6, 8}
    assert {trial.depth for trial in hybrids if trial.attention == "GGGGGA"} == {6, 8}
    assert {trial.rate for trial in hybrids} == {2.0}
    assert {(trial.attention, trial.depth) for trial in hybrids if trial.seed} == {("GGGA", 4)}  # with three seeds
    assert {trial.attention for trial in grid.largest_rates(done) if trial.rate == 1.0} == {"gka", "GGGA", "GGGGGA"}


def test_a_rate_beyond_the_end_is_tried_at_the_largest_size_too():
    family, done = FAMILIES["GKA + offsets"], Done()
    for rate, loss in zip(RATES, (2.0, 1.9, 1.95)):
        done[Trial(**SMALLEST, **family, rate=rate)] = loss
    for tried, loss in (((1.0, 2.0, 4.0), 1.8), ((0.5, 1.0, 2.0, 4.0), 1.85), ((0.5, 1.0, 2.0, 4.0), None)):
        trials = {trial.rate: trial for trial in grid.largest_rates(done) if trial.attention == "gka"}
        assert tuple(trials) == tried
        done.update({trials[rate]: 1.8 + 0.01 * rate for rate in tried if trials[rate] not in done})
        if loss:
            done[trials[min(tried)]] = loss


def test_the_largest_size_has_seeds_at_its_own_best_rate_once_all_are_tried():
    family, done = FAMILIES["GKA + offsets"], Done()
    for rate, loss in zip(RATES, (2.0, 1.9, 1.95)):
        done[Trial(**SMALLEST, **family, rate=rate)] = loss
    tried = [trial for trial in grid.largest_rates(done) if trial.attention == "gka"]
    done.update(dict.fromkeys(tried[:-1], 1.8))
    assert grid.largest_seeds(done) == []
    done.update({trial: 1.8 + abs(trial.rate - 2.0) for trial in tried})
    assert grid.largest_seeds(done) == [replace(tried[1], seed=seed) for seed in (1, 2)]


def test_other_budgets_of_the_deepest_model_take_its_own_best_rate():
    family, done = FAMILIES["GKA + offsets"], Done()
    for rate, loss in zip(RATES, (2.0, 1.9, 1.95)):
        done[Trial(**SMALLEST, **family, rate=rate)] = loss

    def rates():
        trials = [trial for trial in grid.sizes(done) + grid.sizes_seeds(done) if trial.attention == "gka"]
        return {(trial.depth, trial.tokens): trial.rate for trial in trials if trial.depth >= 6}

    before = {(6, 2**19): 2.0, (6, 2**20): 2.0, (6, 2**21): 2.0, (8, 2**20): 2.0}
    assert rates() == before
    done.update({trial: 1.8 + trial.rate for trial in grid.largest_rates(done) if trial.attention == "gka"})
    done.update({trial: 2.9 for trial in grid.largest_rates(done) if trial not in done})  # half of the end
    assert rates() == {**before, (8, 2**19): 1.0, (8, 2**21): 1.0}
    repeated = {(trial.depth, trial.tokens) for trial in grid.sizes_seeds(done) if trial.depth == 8}
    assert repeated == {(8, 2**19), (8, 2**21)}  # `largest-seeds` repeats the best one of (8, 2^20)


def test_half_of_the_value_embeddings_have_three_seeds_where_softmax_has_them():
    family, done = ALL[grid.HALF], Done()
    for rate, loss in zip(RATES, (2.0, 1.9, 1.95)):
        done[Trial(**SMALLEST, **family, rate=rate)] = loss
    trials = grid.value_embeds_longer(done)
    assert {trial.value_embeds for trial in trials} == {"all"}  # of GKA: half of the layers, see GPTConfig
    with_seeds = {(trial.depth, trial.tokens) for trial in trials if trial.seed == 2}
    few_layers = {(depth, tokens) for depth in (2, 4) for tokens in (2**20, 2**21, 2**22)}
    assert with_seeds == few_layers | {(6, 2**20)}
    assert {(trial.depth, trial.tokens) for trial in trials} == with_seeds | {(6, 2**19), (6, 2**21)}


def test_other_offsets_have_three_seeds_at_the_rate_of_offsets_of_one_token():
    done = Done()
    for family, rates in (("GKA + offsets", (2.0, 1.9, 1.95)), ("softmax + offsets", (2.0, 1.95, 1.9, 1.99))):
        done |= {Trial(**SMALLEST, **ALL[family], rate=2.0**power): loss for power, loss in enumerate(rates)}
    trials = grid.further_offsets(done)
    assert {(trial.attention, trial.rate) for trial in trials} == {("gka", 2.0), ("softmax", 4.0)}
    assert {trial.offset_layers for trial in trials if trial.attention == "softmax"} == {"all"}
    seeds = {(trial.attention, trial.head_offsets, trial.seed) for trial in trials}
    assert len(seeds) == len(trials) == 36 and {seed for *_, seed in seeds} == {0, 1, 2}


def test_patterns_need_their_layers_and_heads():
    wanted = {"GKA + offsets": 2, "GKA + offsets PS,N": 2, "softmax + offsets PSP2S2": 4, "GGGGGA + offsets": 6}
    wanted["GKA + offsets PS,PS,N,N"] = 4
    assert {name: min(d for d in range(2, 9) if fits_depth(ALL[name], d)) for name in wanted} == wanted


def test_narrow_kernels_see_as_many_tokens_as_they_say():
    for name, family in NARROW.items():
        config = StudyShape.from_depth(2, **family)
        assert {config.window(layer) + 1 for layer in range(2)} == {int(name.split()[-2])}
        assert config.kernel == ("mean" if "mean" in name else "gaussian") and config.head_offsets == "PS"


def test_every_group_has_cells_that_can_be_built():
    done = Done()
    done.assumed_rate = 2.0
    trials = [trial for name, group in GROUPS.items() if name not in ("tiny", "refused") for trial in group(done)]
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


def test_channel_bandwidths_and_gates_have_rates_of_their_own():
    done = Done({Trial(**SMALLEST, **FAMILIES["GKA + offsets"], rate=rate): abs(rate - 2) for rate in RATES})
    trials = grid.channel_rates(done)
    assert {(trial.channel_bandwidths, trial.channel_rate, trial.head_gates, trial.gate_rate) for trial in trials} == {
        *((True, rate, False, 1.0) for rate in (0.25, 1.0, 4.0)),
        *((False, 1.0, True, rate) for rate in (0.25, 1.0, 4.0)),
    }
    fastest = replace(trials[0], channel_rate=4.0)
    words = [str(word) for word in fastest.flags()]
    assert words[words.index("--channel-lr") + 1] == "2.56" and "--channel-bandwidths" in words
    assert "--head-gates" not in words and "--gate-lr" not in words
    done |= {replace(fastest, channel_rate=rate): -rate for rate in (0.25, 1.0, 4.0)}
    assert {trial.channel_rate for trial in grid.channel_rates(done) if trial.channel_bandwidths} == {
        0.25,
        1.0,
        4.0,
        16.0,
    }


def test_own_rates_of_channels_and_gates_are_what_the_rows_say():
    rows = [json.loads(line) for line in (RESULTS / "text_large.jsonl").read_text().splitlines()]
    done = Done({Trial.from_row(row["trial"]): row["metrics"]["val_bpb"] for row in rows if row["kind"] == "study"})
    for learned, field, place in (("channels", "channel_rate", 0), ("gates", "gate_rate", 1)):
        for name, family in WITHOUT.items():
            first = Trial(**{**family, **LEARNED[learned], **SMALLEST}, rate=best_rate(family, done))
            scores = {getattr(trial, field): done.get(trial) for trial in around_one(first, field, done)}
            if family["attention"] == "GGGA":
                assert OWN_RATES[name] == OWN_RATES["GKA + offsets"]
            else:
                best = min(scores.values())
                assert OWN_RATES[name][place] == min(rate for rate, score in scores.items() if score < best + 0.0005)
