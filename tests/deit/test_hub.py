"""Hugging Face datasets, stored and streamed, and training from a stream; mistakes are one line."""

import json
import pickle
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest

from deit_gka import train as training
from deit_gka.data.batch import Images
from deit_gka.data.order import Order
from deit_gka.data.sources import DataParts, ImageSource, ImageStream, check_classes, open_source
from deit_gka.data.transforms import eval_transform, train_transform
from deit_gka.data.workers import evaluation_batches
from deit_gka.training.config import TrainConfig
from image_files import error, png, value_of, write
from tiny import one_line_error
from tiny_images import drawn, runtime, small_recipe, union
from tiny_vision import SIZE
from trainkit_gka.cli import PassingFault, UserError
from vision_runs import evaluated, flags, in_process, train

forms = pytest.mark.parametrize("form", ["hf", "hf-stream"])


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    bars = datasets.is_progress_bar_enabled()
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        patch.setenv("HF_DATASETS_CACHE", cache)
        # It waits 5 seconds at the end of every shuffled pass.
        patch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.05)
        datasets.disable_progress_bars()  # on stderr, where a mistake is one line
        yield
    if bars:
        datasets.enable_progress_bars()


IMAGE, NUMBER = datasets.Image(), datasets.Value("int64")
FEATURES = {"id": NUMBER, "image": IMAGE, "label": datasets.ClassLabel(names=["cat", "dog"])}


def write_parquet(folder: Path, split: str, sizes: list[int], features=FEATURES, **columns) -> None:
    """Files of that many images: image v is a red of v, its label v % 2. columns: of another name or content."""
    start = 0
    for number, size in enumerate(sizes):
        values = range(start, start + size)
        images = [{"bytes": png(v), "path": f"{split}{v}.png"} for v in values]
        rows = {"id": values, "image": images, "label": [v % 2 for v in values], **columns}
        path = folder / "data" / f"{split}-{number:05d}-of-{len(sizes):05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {name: rows[name] for name in features}
        datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(path)
        start += size


def write_card(folder: Path, **sizes: int) -> None:
    """How many images each split has, which a stream cannot know otherwise."""
    splits = [f"  - {{name: {split}, num_bytes: 1, num_examples: {size}}}" for split, size in sizes.items()]
    (folder / "README.md").write_text("\n".join(["---", "dataset_info:", "  splits:", *splits, "---", ""]))


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> Path:
    """Three uneven training files of 23 images, one of 5 for validation."""
    folder = tmp_path_factory.mktemp("parquet")
    write_parquet(folder, "train", [9, 3, 11])
    write_parquet(folder, "validation", [5])
    write_card(folder, train=23, validation=5)
    return folder


def records_of(source) -> list:
    if isinstance(source, ImageStream):
        return list(source.records(0, 0, 1))
    return [source.read(index) for index in range(len(source))]


@forms
def test_dataset_of_parquet_files(form, parquet):
    train, val = (open_source(f"{form}:{parquet}", split) for split in ("train", "val"))
    for source, size in ((train, 23), (val, 5)):
        assert isinstance(source, ImageStream if form == "hf-stream" else ImageSource)
        assert source.classes == ["cat", "dog"]
        again = pickle.loads(pickle.dumps(source))
        assert len(source) == len(again) == size and again.split == source.split
    assert records_of(val) == [(png(v), v % 2, f"validation{v}.png") for v in range(5)]
    assert sorted(map(value_of, records_of(train))) == list(range(23))
    assert check_classes(train, val) == []


@forms
def test_dataset_of_image_files(form, tmp_path):
    for value, name in enumerate(("cat", "dog")):
        write(tmp_path / f"train/{name}/a.png", png(value))
    source = open_source(f"{form}:{tmp_path}", "train")
    assert source.classes == ["cat", "dog"]
    assert sorted((value_of(record), record[1]) for record in records_of(source)) == [(0, 0), (1, 1)]


def test_datasets_that_cannot_serve_are_one_line(tmp_path, monkeypatch):
    """What is wrong with a dataset is a mistake; a network that fails is worth another try."""
    assert "someone/nothing" in error("hf:someone/nothing")
    write_parquet(tmp_path / "a", "train", [2], features={"image": IMAGE, "id": NUMBER})
    assert "image (Image), id (int64)" in error(f"hf:{tmp_path / 'a'}")
    write_parquet(tmp_path / "b", "train", [2], label=[1, -1])
    assert "without labels" in error(f"hf:{tmp_path / 'b'}")
    write_parquet(tmp_path / "c", "train", [2], label=[1, -1])
    stream = open_source(f"hf-stream:{tmp_path / 'c'}", "train")
    with pytest.raises(UserError, match="has no label"):
        records_of(stream)
    with pytest.raises(UserError, match="dataset_info"):
        len(stream)
    write(tmp_path / "c/data/train-00000-of-00001.parquet", b"gone")
    with one_line_error("hf-stream:") as caught:
        records_of(stream)
    assert caught.type is PassingFault
    monkeypatch.setattr(datasets, "get_dataset_config_names", Mock(side_effect=ConnectionError("Couldn't reach it")))
    with one_line_error("hf:ILSVRC/imagenet-1k") as caught:
        open_source("hf:ILSVRC/imagenet-1k", "train")
    assert caught.type is PassingFault


# Streams


def drain(stream, *args, **options) -> list[int]:
    records = list(stream.records(*args, **options))
    assert all(label == value_of((data,)) % 2 for data, label, _ in records)
    return [value_of(record) for record in records]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_a_stream(ranks, parquet, tmp_path):
    """Also where there are so many files that a rank reads its own alone."""
    write_parquet(tmp_path, "train", [1, 4, 2, 3, 1, 1, 2, 5, 1, 1, 1, 1, 1, 1, 1, 1, 2])
    for folder, split, size in ((parquet, "train", 23), (parquet, "val", 5), (tmp_path, "train", 29)):
        stream = open_source(f"hf-stream:{folder}", split)
        parts = [drain(stream, 4, rank, ranks, seed=7) for rank in range(ranks)]
        assert sorted(v for part in parts for v in part) == list(range(size)) and all(parts)
    val, transform = open_source(f"hf-stream:{parquet}", "val"), eval_transform(SIZE, 1.0)
    parts = [evaluation_batches(val, transform, runtime(rank, ranks), 4, 0) for rank in range(ranks)]
    assert sorted(label for part in parts for batch in part for label in batch.labels.tolist()) == [0, 0, 0, 1, 1]


def test_stream_order_depends_on_epoch_and_seed(parquet):
    train, again, val = (open_source(f"hf-stream:{parquet}", split) for split in ("train", "train", "val"))
    orders = [drain(train, epoch, 0, 1, seed=seed) for epoch, seed in ((0, 0), (1, 0), (0, 1))]
    assert all(orders[i] != orders[j] for i in range(3) for j in range(i)) and list(range(23)) not in orders
    assert drain(again, 1, 0, 1) == orders[1]
    assert drain(val, 0, 0, 1) == drain(val, 3, 0, 1) == list(range(5))


def test_training_on_a_stream_resumes_with_the_same_records(tmp_path, monkeypatch):
    write_parquet(tmp_path, "train", [11, 3, 9, 8, 9])
    write_card(tmp_path, train=40)
    stream, recipe = open_source(f"hf-stream:{tmp_path}", "train"), small_recipe(batch_size=10, repeated_aug=1)
    for ranks in (1, 2):
        orders = [Order(stream, recipe, runtime(rank, ranks), 4) for rank in range(ranks)]
        parts = [drawn(order, 0, 8) for order in orders]
        # From mid-epoch, over an epoch's end.
        assert [drawn(order, 2, 7) for order in orders] == [part[2:7] for part in parts]
        seeds = [key.seed for update in union(parts) for key in update.values()]
        assert len(set(seeds)) == len(seeds) == 80
    keys = list(parts[0][0].values())
    batch = Images(stream, train_transform(recipe), training=True).__getitems__(keys)
    assert not batch.broken and batch.labels.tolist() == [key.item[1] for key in keys]
    monkeypatch.setattr(stream, "length", 80)  # a part that is shorter than that begins again
    updates = drawn(Order(stream, recipe, runtime(), 10), 0, 8)
    counts = Counter(value_of(key.item) for update in updates for key in update.values())
    assert counts == dict.fromkeys(range(40), 2)
    with pytest.raises(UserError, match="--repeated-aug 1"):
        Order(stream, small_recipe(batch_size=10), runtime(), 10)


# Parts that are chosen by flags


def test_parts_of_a_split(tmp_path):
    write_parquet(tmp_path, "train", [6])
    thirds = DataParts(train_split="train[:4]", val_split="train[4:]")
    parts = [open_source(f"hf:{tmp_path}", split, thirds) for split in ("train", "val")]
    assert [list(map(value_of, records_of(part))) for part in parts] == [[0, 1, 2, 3], [4, 5]]


@forms
def test_numbers_are_classes_up_to_the_largest_of_training(form, tmp_path):
    features = {"image": IMAGE, "label": NUMBER}
    for split, labels in (("train", list(range(9))), ("validation", [0, 1, 9, 2])):
        write_parquet(tmp_path, split, [len(labels)], features=features, label=labels)
    source = open_source(f"{form}:{tmp_path}", "train")
    assert source.classes == [str(number) for number in range(9)]
    assert sorted(record[1] for record in records_of(source)) == list(range(9))
    with pytest.raises(UserError, match="label 9"):
        records_of(open_source(f"{form}:{tmp_path}", "val"))


# What a run was trained on is what continuing and evaluating it read

PARTS = ["--data-config", "full", "--val-split", "test", "--target-key", "fine"]


@pytest.fixture(scope="module")
def configurations(tmp_path_factory):
    """Two, of 12 and 24 training images with two columns of labels; 9 images of test."""
    folder = tmp_path_factory.mktemp("configurations")
    lines, sizes = ["---", "configs:"], ["dataset_info:"]
    features = {"image": IMAGE, "coarse": FEATURES["label"], "fine": datasets.ClassLabel(names=["a", "b", "c"])}
    for config, count in (("small", 12), ("full", 24)):
        lines += [f"- config_name: {config}", "  data_files:"]
        sizes += [f"- config_name: {config}", "  splits:"]
        for split, size in (("train", count), ("test", 9)):
            columns = {"coarse": [n % 2 for n in range(size)], "fine": [n % 3 for n in range(size)]}
            write_parquet(folder / config, split, [size], features=features, **columns)
            lines += [f"  - split: {split}", f"    path: {config}/data/{split}-*.parquet"]
            sizes += [f"  - {{name: {split}, num_bytes: 1, num_examples: {size}}}"]  # a stream's length
    (folder / "README.md").write_text("\n".join([*lines, *sizes, "---", ""]))
    return folder


@forms
def test_configurations_splits_and_columns_are_chosen_by_name(form, configurations):
    data, full = f"{form}:{configurations}", dict(data_config="full", target_key="fine")
    assert "--data-config: small, full" in error(data)
    assert "--val-split" in error(data, "val", **full)  # test is never taken for val
    assert "--target-key" in error(data, data_config="full")
    for key, classes in (("coarse", ["cat", "dog"]), ("fine", ["a", "b", "c"])):
        parts = DataParts(data_config="full", val_split="test", target_key=key, input_key="image")
        source = open_source(data, "val", parts)
        assert source.classes == classes
        assert sorted((value_of(record), record[1]) for record in records_of(source)) == [
            (value, value % len(classes)) for value in range(9)
        ]
    assert len(records_of(open_source(data, "train", DataParts(**full)))) == 24


def test_a_run_keeps_the_parts_of_its_data(configurations, tmp_path, capsys):
    data = f"hf-stream:{configurations}"
    more = [*PARTS, "--epochs", 1, "--warmup-epochs", 0, "--num-workers", 0, "--repeated-aug", 1]
    train(data, tmp_path, *more, "--stop-after", 1)
    named = dict(zip((flag[2:].replace("-", "_") for flag in PARTS[::2]), PARTS[1::2]))
    state = json.loads((tmp_path / "run/checkpoints/step_00000001/state.json").read_text())
    assert (state["trained_on"], state["parts"], state["classes"]) == (data, named, ["a", "b", "c"])
    argv = [*flags(data, tmp_path, *more), "--target-key", "coarse"]
    assert "--target-key" in in_process(training.main, TrainConfig, *argv, capsys=capsys)
    train(data, tmp_path, *more)
    trained = json.loads((tmp_path / "results.jsonl").read_text())
    again = evaluated(tmp_path, "--run", tmp_path / "run")
    assert again["config"]["data"] == data and named.items() <= trained["config"].items()
    assert named.items() <= again["config"].items()
    assert all(again["metrics"]["model"][key] == trained["metrics"][key] for key in ("top1", "images"))
    other = evaluated(tmp_path, "--run", tmp_path / "run", "--data", data, "--val-split", "train")
    assert other["metrics"]["model"]["images"] == 24  # the rest is still the run's
