"""Question 7 of the study: images and their small copies, real trainings that become rows, the grid, and the table."""

import json
import statistics
from collections import Counter
from dataclasses import replace

import datasets
import pytest
import tyro
from PIL import Image

import tiny_vision
from deit_gka.training.config import TrainConfig
from runs.demo import vision as demo
from runs.jobs import START_SECONDS
from runs.study import pictures as study_pictures
from runs.study.trainings import Trainings
from runs.study.vision import images as settings
from runs.study.vision.families import (
    FAMILIES,
    TUNED_APART,
    TunedApartDone,
    done_of,
    families_of,
    groups,
    planned,
)
from runs.study.vision.images import CIFAR10, DIGITS, PHOTOS, load
from runs.study.vision.study import VisionPace, VisionStudy
from runs.study.vision.trials import Setting, VisionTrial, score
from runs.tables import sentences, study_vision
from runs.tables.study import ROWS
from shown import cells, numbers

TINY = Setting(
    model=("patch_size=8", "embed_dim=16", "depth=2", "num_heads=2"),
    flags=("--input-size", 16, *settings.PLAIN[:-2], "--warmup-epochs", 0, "--scale", 1, 1),
    lr=0.2,
    epochs=1,
    batch=12,
    images_per_second=100,
)
HYBRID = VisionTrial("GA", "LU", seed=1)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return tiny_vision.write_pictures(tmp_path_factory.mktemp("pictures") / "shapes", train=8, val=4)


@pytest.fixture(scope="module")
def study(pictures, tmp_path_factory):
    """A study of the pictures whose one trial is finished."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "PHOTOS", TINY)
        patch.setattr(settings, "SHORT_SIDE", 16)
        patch.setenv("OMP_NUM_THREADS", "1")
        one = VisionStudy(load(str(pictures), folder / "images"), folder / "rows.jsonl", folder / "runs", ["some"])
        one.GROUPS = {"some": lambda done: [HYBRID]}
        assert Trainings(one, at_once=1, threads=1, device_type="cpu").run()
        yield one


def test_a_finished_cell_is_a_row_without_places_of_this_machine(study, pictures):
    [[key, row]] = study.rows().items()
    assert VisionTrial.from_row(row["trial"]) == HYBRID and row["kind"] == "study-vision" and not study.left()
    assert row["command"] == f"python -m runs.study.vision --data shapes --only {key}" and key == study.key(HYBRID)
    assert row["data"]["images"] == "shapes" and row["data"]["train images"] == 24
    assert 0 <= row["metrics"]["ema_top1"] <= 100 and row["metrics"]["parameters"] > 0
    assert row["config"]["attention"] == "GA" and row["config"]["seed"] == 1
    assert "spatial_offsets=LU" in row["config"]["model_kwargs"] and str(pictures) not in json.dumps(row)


def test_finished_cells_are_scored_by_errors(study):
    metrics = study.rows()[study.key(HYBRID)]["metrics"]
    assert study.done()[HYBRID] == (100 - metrics["ema_top1"], metrics["ema_loss"])
    assert study.said(HYBRID) == f"EMA top-1 {metrics['ema_top1']:.2f} %"
    assert not study.pace().measured  # two updates are not timed
    timed = [{"metrics": {"images_per_second": speed}} for speed in (0.0, 4.0, 2.0, 9.0)]
    assert VisionPace(study.images, timed).seconds(HYBRID) == START_SECONDS + 24 / 4


def test_small_copies_are_made_once_and_known_by_content(pictures, tmp_path, capsys):
    one = load(str(pictures), tmp_path / "a")
    copies = sorted((tmp_path / "a").glob("*/*/*/*.png"))
    assert len(copies) == 24 + 12 and "making copies" in capsys.readouterr().out
    times = [path.stat().st_mtime_ns for path in copies]
    assert load(str(pictures), tmp_path / "a") == one and [path.stat().st_mtime_ns for path in copies] == times
    tiny_vision.write_pictures(tmp_path / "shapes", train=8, val=4)
    assert load(str(tmp_path / "shapes"), tmp_path / "b").identity == one.identity
    (tmp_path / "shapes/val/class_1/001.jpg").write_bytes((tmp_path / "shapes/val/class_1/002.jpg").read_bytes())
    assert load(str(tmp_path / "shapes"), tmp_path / "b").identity["sha256"] != one.identity["sha256"]


def test_digits_are_trained_as_in_the_demo_and_every_flag_is_the_trainers():
    ours = tyro.cli(TrainConfig, args=[str(word) for word in [*VisionTrial("gka").flags(DIGITS), "--data", "digits"]])
    theirs = [*demo.MODEL_FLAGS, *demo.DATA_FLAGS, *demo.RECIPE_FLAGS, "--epochs", 50, "--attention", "gka"]
    theirs += ["--warmup-epochs", demo.WARMUP_EPOCHS]
    assert ours.identity() == tyro.cli(TrainConfig, args=[str(word) for word in theirs]).identity()
    for family in families_of(PHOTOS).values():
        config = tyro.cli(TrainConfig, args=[str(w) for w in [*VisionTrial(**family).flags(PHOTOS), "--data", "x"]])
        assert config.lr == 0.032 and config.attention == family["attention"]


@pytest.mark.parametrize("name, setting", [("digits", DIGITS), ("images", PHOTOS), ("cifar10", CIFAR10)])
def test_finished_rows_keep_their_keys_and_are_what_the_groups_ask_for(name, setting):
    """Which rates and seeds a group wants follows from the rows; a change would ask for others in their place."""
    rows = [json.loads(line) for line in (ROWS / f"vision_{name}.jsonl").read_text().splitlines()]
    trials = [VisionTrial.from_row(row["trial"]) for row in rows]
    assert [trial.key(row["data"], setting) for trial, row in zip(trials, rows)] == [row["key"] for row in rows]
    done = done_of(setting)({trial: score(row["metrics"]) for trial, row in zip(trials, rows)})
    asked = {trial for group in groups(setting).values() for trial in group(done)}
    assert len(rows) > 15 and not done.keys() - asked
    assert name == "cifar10" or done.keys() >= {*groups(setting)["seeds"](done)}


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """40 training and 8 validation images of two classes, 32 pixels, as Hugging Face parquet in a folder `cifar10`."""
    folder = tmp_path_factory.mktemp("hub") / "cifar10"
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
    for split, count in (("train", 40), ("validation", 8)):
        seeds = [number + 100 * (split == "train") for number in range(count)]
        pictures = [tiny_vision.photo(seed, seed % 2, (32, 32)) for seed in seeds]
        content = [{"bytes": tiny_vision.encoded(picture), "path": None} for picture in pictures]
        rows = {"image": content, "label": [number % 2 for number in range(count)]}
        folder.mkdir(exist_ok=True)
        made = datasets.Dataset.from_dict(rows, features=features)
        made.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def test_cifar10_chooses_rates_on_images_that_training_holds_out(parquet, tmp_path):
    one = load(f"hf:{parquet}", tmp_path / "a")
    assert one.setting is CIFAR10 and one.identity | {"sha256": ""} == {
        "images": "cifar10", "train images": 40, "val images": 8, "held out": 4, "sha256": ""
    }  # fmt: skip

    def images(folder):
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.glob("*/*.png")}

    tuning, compared = tmp_path / one.tuning_data, tmp_path / one.data
    kept, held_out = images(tuning / "train"), images(tuning / "val")
    assert not kept.keys() & held_out.keys() and kept | held_out == images(compared / "train")
    assert Counter(name.split("/")[0] for name in held_out) == {"cat": 2, "dog": 2}
    assert len(images(compared / "val")) == 8 and not set(images(compared / "val").values()) & set(held_out.values())
    with Image.open(compared / "train/cat/000000.png") as copy:
        assert copy.size == (32, 32)
    again = load(f"hf:{parquet}", tmp_path / "b")
    assert again.identity == one.identity and images(tmp_path / again.tuning_data / "val") == held_out
    tuned, trial = VisionTrial("gka", tuning=True), VisionTrial("gka")
    assert (one.folder_of(tuned), one.trained_on(tuned)) == (one.tuning_data, 36)
    assert (one.folder_of(trial), one.trained_on(trial)) == (one.data, 40)


def test_cifar10_compares_each_kind_at_the_rate_that_held_out_images_chose():
    done, own = TunedApartDone(), groups(CIFAR10)
    rates = own["rates"](done)
    assert all(trial.tuning for trial in rates) and own["seeds"](done) == []
    done.update({trial: (30.0 + abs(trial.rate - 1), 1.0) for trial in rates})
    trials = own["seeds"](done)
    assert [trial.seed for trial in trials] == [seed for seed in range(5) for _ in TUNED_APART]
    later = own["later-seeds"](done)
    assert len(later) == 9 and not set(later) & set(trials)
    assert planned(CIFAR10) == len({*rates, *trials, *later})
    assert not any(trial.tuning for trial in trials) and {trial.rate for trial in trials} == {1.0}
    done[VisionTrial("gka", rate=2.0, tuning=True)] = (10.0, 1.0)
    assert {trial.attention for trial in own["seeds"](done)} == {"softmax", "vlt"}  # the rest waits for GKA's rate


def test_softmax_and_vlt_build_their_weights_on_cifar10_alone(parquet, tmp_path):
    for name, built in (("cifar10", {"softmax", "vlt"}), ("digits", set())):
        images = replace(load(f"hf:{parquet}", tmp_path / "x"), name=name)
        study = VisionStudy(images, tmp_path / "rows.jsonl", tmp_path / "runs", ["rates"])
        jobs = {kind: study.job(VisionTrial(kind), "cpu") for kind in ("softmax", "vlt", "gka", "GGGA")}
        assert {kind for kind, job in jobs.items() if job.environment == {"TIMM_FUSED_ATTN": "0"}} == built
        tuned = study.job(VisionTrial("gka", tuning=True), "cpu")
        assert images.tuning_data in tuned.flags and images.data in jobs["gka"].flags


def test_rows_are_drawn_and_compared_as_they_are_and_those_of_other_versions_left_out(tmp_path):
    top1 = {"softmax": (97.0, 98.0, 97.5), "GKA + NLUD": (98.0, 98.5, 99.0)}
    data = {"images": "digits", "train images": 1198, "val images": 599}
    about = dict(kind="study-vision", date="2026-01-01", commit="abc", hardware="CPU, 1 thread", torch="2", data=data)

    def write(top1):
        for name, values in top1.items():
            for seed, value in enumerate(values):
                trial = VisionTrial(**FAMILIES[name], seed=seed)
                metrics = dict(ema_top1=value, ema_loss=0.1, parameters=1000, flops=2.5e6)
                row = {**about, "key": trial.key(data, DIGITS), "trial": vars(trial), "metrics": metrics}
                other = {**row, "key": f"of another version, {name} {seed}", "metrics": {**metrics, "ema_top1": 50.0}}
                with (tmp_path / "vision_digits.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n" + json.dumps(other) + "\n")

    write(top1)
    row = cells(study_vision.images(tmp_path), "GKA + NLUD")
    gains = [ours - softmax for ours, softmax in zip(top1["GKA + NLUD"], top1["softmax"])]
    half, middle = 4.303 * statistics.stdev(gains) / 3**0.5, statistics.mean(gains)
    assert row["top-1 %"] == "98.50 ± 0.50"
    assert numbers(row["over softmax"]) == pytest.approx([middle, middle - half, middle + half], abs=0.006)
    assert cells(study_vision.images(tmp_path), "VLT")["top-1 %"] == "not run"
    assert sentences.image_sentences(tmp_path).endswith("trainings are finished: no answer yet.")
    figure = study_pictures.images(tmp_path, tmp_path)
    drawn = [row["top-1 %"] for row in figure.rows if row["family"] == "GKA + NLUD"]
    assert figure.path.exists() and drawn == list(top1["GKA + NLUD"]) and len(figure.rows) == 6
    write({"GKA": (95.0, 96.0, 95.5), "softmax + NLUD": top1["softmax"]})  # each side with the same offsets
    assert sentences.image_sentences(tmp_path) == ""
    plain, offsets = (cells(study_vision.summary(tmp_path), "digits", name) for name in ("GKA", "GKA + NLUD"))
    assert (plain["top-1 %"], plain["softmax's"], plain["seeds"]) == ("95.50", "97.50", "3")
    assert numbers(plain["difference, points"]) == [-2.0, -2.0, -2.0]
    assert offsets["over"] == "softmax + NLUD"
    assert numbers(offsets["difference, points"]) == pytest.approx([middle, middle - half, middle + half], abs=0.006)
