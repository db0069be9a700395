"""Hugging Face datasets, stored and streamed; mistakes are one line."""

import pickle
from pathlib import Path

import pytest

from deit_gka.data.sources import DataParts, Source, Stream, check_classes, open_source
from image_files import error, png, value_of, write
from trainkit_gka.cli import PassingFault, UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setattr(
        datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.05
    )  # 5 seconds at the end of every shuffled pass
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    yield
    patch.undo()
    if bars:
        datasets.enable_progress_bars()


FEATURES = {
    "id": datasets.Value("int64"),
    "image": datasets.Image(),
    "label": datasets.ClassLabel(names=["cat", "dog"]),
}


CARD = """---
dataset_info:
  features:
  - {{name: id, dtype: int64}}
  - {{name: image, dtype: image}}
  - name: label
    dtype:
      class_label:
        names: {{'0': cat, '1': dog}}
  splits:
  - {{name: train, num_bytes: 1, num_examples: {train}}}
  - {{name: validation, num_bytes: 1, num_examples: 5}}
  - {{name: test, num_bytes: 1, num_examples: 2}}
---
"""


def write_parquet(folder: Path, split: str, sizes: list[int], features=FEATURES, **columns) -> None:
    start = 0
    for number, size in enumerate(sizes):
        values = range(start, start + size)
        rows = {
            "id": values,
            "image": [{"bytes": png(v), "path": f"{split}{v}.png"} for v in values],
            "label": [v % 2 for v in values],
        }
        rows = {name: columns[name] if name in columns else rows[name] for name in features}
        path = folder / "data" / f"{split}-{number:05d}-of-{len(sizes):05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(path)
        start += size


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> Path:
    """Three uneven training files of 23 images, one of 5 for validation, and a test split without labels."""
    folder = tmp_path_factory.mktemp("parquet")
    write_parquet(folder, "train", [9, 3, 11])
    write_parquet(folder, "validation", [5])
    write_parquet(folder, "test", [2], label=[-1, -1])
    (folder / "README.md").write_text(CARD.format(train=23))
    return folder


def test_dataset_of_parquet_files(parquet):
    train, val = open_source(f"hf:{parquet}", "train"), open_source(f"hf:{parquet}", "val")
    for source, size in ((train, 23), (val, 5)):
        assert isinstance(source, Source) and len(source) == size and source.classes == ["cat", "dog"]
        assert [(value_of(source.read(i)), source.read(i)[1]) for i in range(size)] == [(v, v % 2) for v in range(size)]
    assert train.read(3)[0] == png(3) and train.read(3)[2] == "train3.png"
    again = pickle.loads(pickle.dumps(train))
    assert [value_of(again.read(i)) for i in range(23)] == list(range(23))
    assert check_classes(train, val) == []


def test_dataset_of_image_files(tmp_path):
    for split in ("train", "val"):
        write(tmp_path / split / "cat" / "a.png", png(1))
        write(tmp_path / split / "dog" / "b.png", png(2))
    source = open_source(f"hf:{tmp_path}", "val")
    assert source.classes == ["cat", "dog"]
    assert sorted((value_of(source.read(i)), source.read(i)[1]) for i in range(2)) == [(1, 0), (2, 1)]
    stream = open_source(f"hf-stream:{tmp_path}", "val")
    (tmp_path / "val/dog/b.png").unlink()
    records = sorted(stream.records(0, 0, 1), key=lambda record: record[1])
    assert (
        value_of(records[0]) == 1 and records[1][0] == b"" and "b.png" in records[1][2]
    )  # a lost file does not end the pass
    name = next(source.read(i)[2] for i in range(2) if source.classes[i] == "cat")
    assert name.endswith("a.png")


def test_hub_mistakes(parquet, tmp_path, monkeypatch):
    message = error("hf:someone/nothing")
    assert all(
        words in message
        for words in ("someone/nothing", "hf auth login", "local copy", "https://huggingface.co/datasets/")
    )
    write_parquet(tmp_path / "a", "train", [2])
    write_parquet(tmp_path / "a", "test", [2])
    message = error(f"hf:{tmp_path / 'a'}", "val")
    assert "train" in message and "test" in message and "validation" in message  # test is never taken for val
    write_parquet(tmp_path / "b", "train", [2], features={"image": FEATURES["image"], "id": FEATURES["id"]})
    assert "ClassLabel" in error(f"hf:{tmp_path / 'b'}") and "image (Image), id (int64)" in error(
        f"hf-stream:{tmp_path / 'b'}"
    )
    write_parquet(tmp_path / "c", "train", [2], label=[1, -1])
    assert "without labels" in error(f"hf:{tmp_path / 'c'}")
    with pytest.raises(UserError, match="has no label"):
        list(open_source(f"hf-stream:{tmp_path / 'c'}", "train").records(0, 0, 1))
    write(tmp_path / "d/data/train-0.parquet", b"PAR1 not really")
    assert "cannot be loaded" in error(f"hf:{tmp_path / 'd'}") and "hf auth" not in error(f"hf:{tmp_path / 'd'}")

    def gated(name):
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' is a gated dataset on the Hub.\nMore lines.")

    monkeypatch.setattr(datasets, "get_dataset_config_names", gated)
    message = error("hf-stream:ILSVRC/imagenet-1k")
    assert (
        "gated dataset on the Hub. A gated" in message
        and "https://huggingface.co/datasets/ILSVRC/imagenet-1k" in message
    )


@pytest.mark.parametrize(
    "error, kind", [(ConnectionError("Couldn't reach it"), PassingFault), (PermissionError("gated"), UserError)]
)
def test_only_a_hub_that_cannot_be_reached_is_worth_another_try(error, kind, monkeypatch):
    def fail(name):
        raise error

    monkeypatch.setattr(datasets, "get_dataset_config_names", fail)
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        open_source("hf-stream:someone/images", "train")
    assert caught.type is kind


def drain(stream, *args, **options) -> list[int]:
    records = list(stream.records(*args, **options))
    assert all(label == value_of((data,)) % 2 for data, label, _ in records)
    return [value_of(record) for record in records]


def test_stream_has_length_and_classes(parquet):
    train, val = open_source(f"hf-stream:{parquet}", "train"), open_source(f"hf-stream:{parquet}", "val")
    assert isinstance(train, Stream) and (len(train), len(val)) == (23, 5) and train.classes == ["cat", "dog"]
    assert next(val.records(0, 0, 1)) == (png(0), 0, "validation0.png")
    assert check_classes(train, val) == []
    assert pickle.loads(pickle.dumps(val)).split == "val" and len(pickle.loads(pickle.dumps(val))) == 5


@pytest.mark.parametrize("split, size", [("train", 23), ("val", 5)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_a_stream(parquet, split, size, ranks):
    stream = open_source(f"hf-stream:{parquet}", split)
    parts = [drain(stream, 4, rank, ranks, seed=7) for rank in range(ranks)]
    assert sorted(v for part in parts for v in part) == list(range(size))
    assert all(parts)
    assert parts == [drain(stream, 4, rank, ranks, seed=7) for rank in range(ranks)]


def test_ranks_get_whole_shards_if_there_are_enough(tmp_path):
    write_parquet(tmp_path, "train", [1, 4, 2, 3, 1, 1, 2, 5, 1, 1, 1, 1, 1, 1, 1, 1, 2])  # 17 files for 2 ranks
    stream = open_source(f"hf-stream:{tmp_path}", "train")
    for epoch in range(3):
        parts = [drain(stream, epoch, rank, 2) for rank in range(2)]
        assert sorted(v for part in parts for v in part) == list(range(29))
        assert all(
            {4, 3, 2, 1} & set(part) == {4, 3, 2, 1} or not {4, 3, 2, 1} & set(part) for part in parts
        )  # a file is in one part
    with pytest.raises(UserError, match="dataset_info"):
        len(stream)
    with pytest.raises(UserError, match="hf: instead"):
        len(stream)
    assert check_classes(stream, stream) == []  # needs no length


def test_stream_order_depends_on_epoch_and_seed(parquet):
    train, val = open_source(f"hf-stream:{parquet}", "train"), open_source(f"hf-stream:{parquet}", "val")
    orders = [drain(train, epoch, 0, 1, seed=seed) for epoch, seed in ((0, 0), (1, 0), (0, 1), (2**31 - 1, 0))]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i)) and list(range(23)) not in orders
    assert drain(open_source(f"hf-stream:{parquet}", "train"), 1, 0, 1) == orders[1]
    passes = train.records(1, 0, 1), train.records(0, 0, 1)  # two passes at once do not disturb each other
    assert [value_of(record) for pair in zip(*passes) for record in pair] == [
        v for pair in zip(orders[1], orders[0]) for v in pair
    ]
    assert drain(val, 0, 0, 1) == drain(val, 3, 0, 1) == list(range(5))


def test_broken_stream_is_one_line(tmp_path):
    write_parquet(tmp_path, "train", [3, 3])
    stream = open_source(f"hf-stream:{tmp_path}", "train")
    write(tmp_path / "data/train-00001-of-00002.parquet", b"gone")
    with pytest.raises(PassingFault, match=r"broke off .*run the same command again"):
        list(stream.records(0, 0, 1))


def records_of(source) -> list:
    if isinstance(source, Stream):
        return list(source.records(0, 0, 1))
    return [source.read(index) for index in range(len(source))]


TEN = datasets.ClassLabel(names=[f"kind {number}" for number in range(10)])
TWO_LABELS = {"image": datasets.Image(), "coarse": FEATURES["label"], "fine": TEN}
UNNAMED = {"image": datasets.Image(), "label": datasets.Value("int64")}


@pytest.mark.parametrize("form", ["hf", "hf-stream"])
def test_a_test_split_serves_by_name(form, tmp_path):
    for split, size in (("train", 6), ("test", 4)):
        write_parquet(tmp_path, split, [size])
    message = error(f"{form}:{tmp_path}", "val")
    assert "has no validation or val or valid split; choose by --val-split" in message
    assert message.endswith(": train, test")
    source = open_source(f"{form}:{tmp_path}", "val", DataParts(val_split="test"))
    assert sorted(map(value_of, records_of(source))) == [0, 1, 2, 3]
    if form == "hf":
        thirds = DataParts(train_split="train[:4]", val_split="train[4:]")
        parts = [open_source(f"hf:{tmp_path}", split, thirds) for split in ("train", "val")]
        assert [list(map(value_of, records_of(part))) for part in parts] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("form", ["hf", "hf-stream"])
def test_one_of_several_columns_is_chosen_by_name(form, tmp_path):
    columns = {"coarse": [v % 2 for v in range(20)], "fine": [v % 10 for v in range(20)]}
    write_parquet(tmp_path, "train", [20], features=TWO_LABELS, **columns)
    message = error(f"{form}:{tmp_path}")
    assert "several columns of classes" in message and "choose by --target-key" in message
    assert message.endswith("image (Image), coarse (ClassLabel), fine (ClassLabel)")
    assert "has no column 'image' of classes" in error(f"{form}:{tmp_path}", target_key="image")
    assert "has no column 'nope' of images" in error(f"{form}:{tmp_path}", target_key="fine", input_key="nope")
    for key, classes in (("coarse", ["cat", "dog"]), ("fine", TEN.names)):
        source = open_source(f"{form}:{tmp_path}", "train", DataParts(target_key=key, input_key="image"))
        assert source.classes == classes
        assert all(label == value_of((data,)) % len(classes) for data, label, _ in records_of(source))


@pytest.mark.parametrize("form", ["hf", "hf-stream"])
def test_one_of_several_configurations_is_chosen_by_name(form, tmp_path):
    lines = ["---", "configs:"]
    for config, size in (("small", 2), ("full", 5)):
        write_parquet(tmp_path / config, "train", [size])
        lines += [f"- config_name: {config}", "  data_files:", "  - split: train", f"    path: {config}/data/*.parquet"]
    (tmp_path / "README.md").write_text("\n".join([*lines, "---", ""]))
    assert "has several configurations; choose by --data-config: small, full" in error(f"{form}:{tmp_path}")
    wrong = error(f"{form}:{tmp_path}", data_config="huge")
    assert "has no configuration 'huge'; choose by --data-config: small, full" in wrong
    source = open_source(f"{form}:{tmp_path}", "train", DataParts(data_config="full"))
    assert sorted(map(value_of, records_of(source))) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("form", ["hf", "hf-stream"])
def test_numbers_are_classes_up_to_the_largest_of_training(form, tmp_path):
    for split, size in (("train", 9), ("validation", 4)):
        write_parquet(tmp_path, split, [size], features=UNNAMED, label=[v % 9 for v in range(size)])
    for split, size in (("train", 9), ("val", 4)):
        source = open_source(f"{form}:{tmp_path}", split)
        assert source.classes == [str(number) for number in range(9)]
        assert sorted(label for _, label, _ in records_of(source)) == list(range(size))
    write_parquet(tmp_path, "validation", [4], features=UNNAMED, label=[0, 1, 9, 2])
    with pytest.raises(UserError, match="has the label 9, above the last of the training images, 8"):
        records_of(open_source(f"{form}:{tmp_path}", "val"))
    write_parquet(tmp_path / "ids", "train", [2], features=UNNAMED, label=[7, 12_345_678])
    assert "the largest label is 12345678" in error(f"{form}:{tmp_path / 'ids'}")
