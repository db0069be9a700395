"""The study: cells with real trainings that are recorded, skipped, stopped and refused; keys of recorded rows."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import tyro

from deit_gka.train import TrainConfig as ImageTrainer
from nanochat_gka.train import TrainConfig as TextTrainer
from processes import HANG_AFTER
from runs.study import analyse, train
from runs.study.train import FORMS, IMAGE_FORMS, Runner, TrainConfig, image_training, text_training, text_trainings
from trainkit_gka.cli import UserError
from trainkit_gka.files import locked
from trainkit_gka.progress import read_events, read_lines
from trainkit_gka.signals import Stopped

RESULTS = Path(__file__).parents[2] / "runs/results/study"
STEPS = 20


@pytest.fixture(autouse=True, scope="module")
def saved_often():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "SAVE_EVERY", 2048)
        yield


def runner(packed, folder, **flags):
    """Of one cell with one layer; flags: of the command."""
    config = dict(data=packed / "packed", results=folder, runs=folder / "runs", forms=["GKA"], depths=[1], seeds=[0])
    config |= dict(tokens=[2048 * STEPS], device_type="cpu", at_once=1, **flags)
    config = TrainConfig(**config)
    return Runner(config, *text_trainings(config))


@pytest.fixture(scope="module")
def trained(packed, tmp_path_factory):
    """The folder of a finished cell."""
    folder = tmp_path_factory.mktemp("study")
    runner(packed, folder).run()
    return folder


def test_a_finished_cell_is_one_row_with_all_that_was_measured(packed, trained):
    one = runner(packed, trained)
    [training], [row] = one.jobs, read_lines(one.results)
    assert row["key"] == training.key and row["form"] == "GKA" and row["chosen"] and row["kind"] == "study"
    assert {"commit", "hardware", "date", "torch", "data"} <= row.keys() and row["trial"]["rate"] == 1.0
    metrics = row["metrics"]
    assert metrics["train_flops"] == training.cost and metrics["curve"][-1][0] == 2048 * STEPS
    assert metrics["evaluations"][-1][2] == metrics["val_bpb"] < metrics["evaluations"][0][2]
    assert len(metrics["sigma"]["layer_0"]) == 1
    assert not one.remaining()
    one.run()
    assert len(read_lines(one.results)) == 1


def test_the_rows_of_a_folder_are_printed_as_tables(trained, capsys):
    analyse.main(analyse.AnalyseConfig(results=trained))
    assert "\ncorpus:\n" in capsys.readouterr().out


def test_a_refused_cell_is_a_row_too_and_is_tried_again_on_request(packed, tmp_path):
    one = runner(packed, tmp_path, flags="--no-such-flag 1")
    one.run()
    assert not one.remaining()
    [row] = read_lines(one.results)
    assert row["kind"] == "study-failed" and row["exit_code"] == 2 and row["form"] == "GKA"
    assert not runner(packed, tmp_path, flags="--no-such-flag 1").remaining()
    assert runner(packed, tmp_path, flags="--no-such-flag 1", retry_failed=True).remaining()
    other = runner(packed, tmp_path)
    assert other.remaining()  # further flags are another cell
    with locked(other.jobs[0].folder, "training in"):  # another process trains it
        assert other._look() and not other.running


def test_a_stopped_cell_continues_to_the_same_result(packed, trained, tmp_path):
    one = runner(packed, tmp_path)
    log = one.jobs[0].folder / "log.jsonl"

    def stop():
        end = time.monotonic() + HANG_AFTER
        while time.monotonic() < end and len(read_events(log, "train")) < 3:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped):
        one.run()
    thread.join()
    assert not one.results.exists()
    again = runner(packed, tmp_path)
    again.run()
    losses = [read_lines(one.results)[0]["metrics"]["val_bpb"] for one in (again, runner(packed, trained))]
    assert losses[0] == losses[1]


def test_recorded_cells_keep_their_keys_and_flops():
    """Else they would be trained again, and tables would miss them."""
    forms = {line["key"]: line["form"] for line in map(json.loads, (RESULTS / "chosen.jsonl").read_text().splitlines())}
    checked = 0
    for row in read_lines(RESULTS / "text_large.jsonl"):
        form, trial = forms.get(row["key"]), row["trial"]
        if row["kind"] == "study" and form in FORMS:
            place = form, trial["depth"], trial["tokens"], trial["seed"]
            again = text_training(TrainConfig(), "x", {**row["data"], "vocab_size": 4096}, *place)
            assert (again.key, again.cost) == (row["key"], row["metrics"]["train_flops"]), place
            checked += 1
    for row in read_lines(RESULTS / "vision_cifar10.jsonl"):
        if form := forms.get(row["key"]):
            again = image_training(TrainConfig(images="x"), Path("x"), row["data"], form, row["trial"]["seed"])
            assert again.key == row["key"] and again.row["trial"] == row["trial"]
            checked += 1
    assert checked > 350


def test_the_trainers_read_the_flags_of_every_cell():
    manifest = {"tokenizer_sha256": "", "sequence_len": 512, "source": [], "vocab_size": 4096}
    texts = [text_training(TrainConfig(), "x", manifest, form, 8, 2**20, 1) for form in FORMS]
    images = [image_training(TrainConfig(images="x"), Path("x"), {"train images": 50_000}, f, 1) for f in IMAGE_FORMS]
    for training in (*texts, *images):
        trainer = TextTrainer if training in texts else ImageTrainer
        config = tyro.cli(trainer, args=[str(word) for word in training.flags])
        if trainer is TextTrainer:
            assert config.compile == "on" and config.num_iterations == training.steps == 2**20 // 4096
            assert config.matrix_lr == pytest.approx(0.02 * 16 * training.row["trial"]["rate"])
        else:
            assert config.epochs * 390 == training.steps and config.seed == 1


def test_rows_of_another_text_of_the_same_name_are_refused_before_training(packed, trained, tmp_path):
    results = runner(packed, tmp_path).results
    shutil.copy(runner(packed, trained).results, results)
    assert not runner(packed, tmp_path).remaining()
    results.write_text(results.read_text().replace('"sequence_len": 32', '"sequence_len": 16'))
    with pytest.raises(UserError, match="--results"):
        runner(packed, tmp_path)


def test_mistakes_are_named(packed):
    with pytest.raises(UserError, match="--forms x"):
        text_trainings(TrainConfig(data=packed / "packed", forms=["x"]))
    with pytest.raises(UserError, match="no packed rows"):
        text_trainings(TrainConfig(data=packed / "nowhere"))
