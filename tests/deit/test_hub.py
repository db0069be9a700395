"""Hugging Face datasets, stored and streamed, and training from a stream; mistakes are one line."""

import json
import pickle
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest

import tiny
from deit_gka import train as training
from deit_gka.data.batch import Images
from deit_gka.data.order import Order
from deit_gka.data.sources import DataParts, ImageSource, ImageStream, check_classes, open_source
from deit_gka.data.transforms import eval_transform, train_transform
from deit_gka.data.workers import evaluation_batches
from deit_gka.training.config import TrainConfig
from tiny import one_line_error
from tiny_images import drawn, error, png, runtime, small_recipe, union, value_of, write
from tiny_vision import SIZE
from trainkit_gka.cli import PassingFault, UserError
from vision_runs import evaluated, flags, train

forms = pytest.mark.parametrize("form", ["hf", "hf-stream"])
IMAGE, NUMBER = datasets.Image(), datasets.Value("int64")
FEATURES = {"id": NUMBER, "image": IMAGE, "label": datasets.ClassLabel(names=["cat", "dog"])}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        patch.setenv("HF_DATASETS_CACHE", cache)
        # It waits 5 seconds at the end of every shuffled pass.
        patch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.05)
        datasets.disable_progress_bars()  # on stderr, where a mistake is one line
        yield
    datasets.enable_progress_bars()


def write_parquet(folder: Path, split: str, counts: list[int], features=FEATURES, **columns) -> None:
    """Files of that many images: image v is a red of v, its label v % 2. columns: of another name or content."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(counts):
        values = range(sum(counts[:number]), sum(counts[:number]) + count)
        images = [{"bytes": png(v), "path": f"{split}{v}.png"} for v in values]
        rows = {"id": values, "image": images, "label": [v % 2 for v in values], **columns}
        dataset = datasets.Dataset.from_dict({name: rows[name] for name in features}, datasets.Features(features))
        dataset.to_parquet(folder / "data" / f"{split}-{number:05d}-of-{len(counts):05d}.parquet")


def write_card(folder: Path, **card) -> None:
    (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")


def sizes(**splits: int) -> dict:
    """How many images each split has, which a stream cannot know otherwise."""
    return {"splits": [{"name": name, "num_bytes": 1, "num_examples": size} for name, size in splits.items()]}


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> Path:
    """Three uneven training files of 23 images, one of 5 for validation."""
    folder = tmp_path_factory.mktemp("parquet")
    write_parquet(folder, "train", [9, 3, 11])
    write_parquet(folder, "validation", [5])
    write_card(folder, dataset_info=sizes(train=23, validation=5))
    return folder


def records_of(source) -> list:
    stream = isinstance(source, ImageStream)
    return list(source.records(0, 0, 1)) if stream else [source.read(index) for index in range(len(source))]


def values_and_labels(source) -> list[tuple[int, int]]:
    return sorted((value_of(record), record[1]) for record in records_of(source))


@forms
def test_datasets_of_parquet_and_of_image_files(form, parquet, tmp_path):
    train, val = (open_source(f"{form}:{parquet}", split) for split in ("train", "val"))
    for source, size in ((train, 23), (val, 5)):
        assert isinstance(source, ImageStream if form == "hf-stream" else ImageSource)
        again = pickle.loads(pickle.dumps(source))
        assert len(source) == len(again) == size and again.split == source.split
    assert records_of(val) == [(png(v), v % 2, f"validation{v}.png") for v in range(5)]
    assert values_and_labels(train) == [(v, v % 2) for v in range(23)] and check_classes(train, val) == []
    for value, name in enumerate(("cat", "dog")):
        write(tmp_path / f"train/{name}/a.png", png(value))
    files = open_source(f"{form}:{tmp_path}", "train")
    assert files.classes == train.classes == ["cat", "dog"] and values_and_labels(files) == [(0, 0), (1, 1)]
    if form == "hf":
        thirds = DataParts(train_split="train[:4]", val_split="train[4:6]")
        parts = [open_source(f"hf:{parquet}", split, thirds) for split in ("train", "val")]
        assert [[value for value, _ in values_and_labels(part)] for part in parts] == [[0, 1, 2, 3], [4, 5]]


def test_cifar10_is_a_folder_here_or_the_hubs(tmp_path, monkeypatch):
    """Its test images may be its validation images, as those of no other data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "get_dataset_config_names", Mock(side_effect=ConnectionError("Couldn't reach it")))
    with one_line_error("hf download uoft-cs/cifar10 .* --local-dir cifar10") as caught:
        open_source("cifar10", "train")
    assert caught.type is PassingFault
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    for split, count in (("train", 4), ("test", 2)):
        write_parquet(tmp_path / "cifar10", split, [count])
    assert [len(open_source("cifar10", split)) for split in ("train", "val")] == [4, 2]
    assert len(open_source("./cifar10", "train")) == 4 and "--val-split" in error("./cifar10", "val")


def test_datasets_that_cannot_serve_are_one_line(tmp_path, monkeypatch):
    """What is wrong with a dataset is a mistake; a network that fails is worth another try."""
    write_parquet(tmp_path / "a", "train", [2], features={"image": IMAGE, "id": NUMBER})
    for name in "bc":
        write_parquet(tmp_path / name, "train", [2], label=[1, -1])
    for data, word in (("someone/nothing", "someone/nothing"), (tmp_path / "a", "image (Image), id (int64)"),
                       (tmp_path / "b", "without labels")):  # fmt: skip
        assert word in error(f"hf:{data}")
    stream = open_source(f"hf-stream:{tmp_path / 'c'}", "train")
    for action, word in ((records_of, "has no label"), (len, "dataset_info")):
        with pytest.raises(UserError, match=word):
            action(stream)
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
    return [value_of(record) for record in stream.records(*args, **options)]


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
    write_card(tmp_path, dataset_info=sizes(train=40))
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


# Parts that are chosen by flags: what a run was trained on is what continuing and evaluating it read


@forms
def test_numbers_are_classes_up_to_the_largest_of_training(form, tmp_path):
    for split, labels in (("train", list(range(9))), ("validation", [0, 1, 9, 2])):
        write_parquet(tmp_path, split, [len(labels)], features={"image": IMAGE, "label": NUMBER}, label=labels)
    source = open_source(f"{form}:{tmp_path}", "train")
    assert source.classes == [str(number) for number in range(9)]
    assert values_and_labels(source) == [(number, number) for number in range(9)]
    with pytest.raises(UserError, match="label 9"):
        records_of(open_source(f"{form}:{tmp_path}", "val"))


@forms
@pytest.mark.parametrize("columns, parts", [
    (("image", "label"), {}), (("scan", "animal"), dict(input_key="scan", target_key="animal")),
], ids=["usual", "named"])  # fmt: skip
def test_labels_may_be_names_and_images_paths(form, columns, parts, tmp_path):
    """Classes are the names in the training images, sorted; paths begin in the folder of the data."""
    text, names = datasets.Value("string"), ["zebra", "ant", "cat"]
    for split, count in (("train", 9), ("validation", 4)):
        for value in range(count):
            write(tmp_path / f"scans/{split}{value}.png", png(value))
        paths = [f"scans/{split}{value}.png" for value in range(count)]
        paths[0] = str(tmp_path / paths[0])
        values = dict(zip(columns, (paths, [names[value % 3] for value in range(count)])))
        write_parquet(tmp_path, split, [count], features=dict.fromkeys(columns, text), **values)
    for split, count in (("train", 9), ("val", 4)):
        source = open_source(f"{form}:{tmp_path}", split, DataParts(**parts))
        assert source.classes == ["ant", "cat", "zebra"]
        assert values_and_labels(source) == [(value, (2, 0, 1)[value % 3]) for value in range(count)]
    write_parquet(
        tmp_path, "validation", [1], features=dict.fromkeys(columns, text), **dict(zip(columns, (["a"], ["dog"])))
    )
    with one_line_error("the label dog"):
        records_of(open_source(f"{form}:{tmp_path}", "val", DataParts(**parts)))


@pytest.fixture(scope="module")
def configurations(tmp_path_factory):
    """Two, of 12 and 24 training images with two columns of labels; 9 images of test."""
    folder = tmp_path_factory.mktemp("configurations")
    features = {"image": IMAGE, "coarse": FEATURES["label"], "fine": datasets.ClassLabel(names=["a", "b", "c"])}
    configs, infos = [], []
    for config, count in (("small", 12), ("full", 24)):
        for split, size in (("train", count), ("test", 9)):
            columns = {"coarse": [n % 2 for n in range(size)], "fine": [n % 3 for n in range(size)]}
            write_parquet(folder / config, split, [size], features=features, **columns)
        files = [{"split": split, "path": f"{config}/data/{split}-*.parquet"} for split in ("train", "test")]
        configs.append({"config_name": config, "data_files": files})
        infos.append({"config_name": config, **sizes(train=count, test=9)})
    write_card(folder, configs=configs, dataset_info=infos)
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
        assert values_and_labels(source) == [(value, value % len(classes)) for value in range(9)]
    assert len(records_of(open_source(data, "train", DataParts(**full)))) == 24


def test_a_run_keeps_the_parts_of_its_data(configurations, tmp_path):
    data = f"hf-stream:{configurations}"
    more = ["--data-config", "full", "--val-split", "test", "--target-key", "fine", "--num-workers", 0]
    more += ["--epochs", 1, "--warmup-epochs", 0, "--repeated-aug", 1]
    train(data, tmp_path, *more, "--stop-after", 1)
    named = {"data_config": "full", "val_split": "test", "target_key": "fine"}
    state = json.loads((tmp_path / "run/checkpoints/step_00000001/state.json").read_text())
    assert (state["trained_on"], state["parts"], state["classes"]) == (data, named, ["a", "b", "c"])
    argv = [*flags(data, tmp_path, *more), "--target-key", "coarse"]
    assert "--target-key" in tiny.refused(training.main, TrainConfig, *argv)
    train(data, tmp_path, *more)
    trained = json.loads((tmp_path / "results.jsonl").read_text())
    again = evaluated(tmp_path, "--run", tmp_path / "run")
    assert again["config"]["data"] == data and named.items() <= trained["config"].items()
    assert named.items() <= again["config"].items()
    assert all(again["metrics"]["model"][key] == trained["metrics"][key] for key in ("top1", "images"))
    other = evaluated(tmp_path, "--run", tmp_path / "run", "--data", data, "--val-split", "train")
    assert other["metrics"]["model"]["images"] == 24  # the rest is still the run's
