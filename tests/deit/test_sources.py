"""Every kind of data gives the right images and labels, mistakes are one line that says what to do, and broken images are recognised."""

import io
import json
import os
import pickle
import sys
import tarfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deit_gka.data.sources import BrokenImage, Source, Stream, check_classes, decode, located, open_source
from trainkit import workers
from trainkit.cli import UserError

datasets = pytest.importorskip("datasets")


def encoded(image, format="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png(value: int) -> bytes:
    return encoded(Image.new("RGB", (4, 4), (value, 0, 0)))


def value_of(record) -> int:
    return decode(record[0]).getpixel((0, 0))[0]


def photo(size=64) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8))


def write(path: Path, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def write_tar(path: Path, members: list[tuple[str, bytes]], **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pair(key: str, value: int, label: int) -> list[tuple[str, bytes]]:
    return [(f"{key}.JPEG", png(value)), (f"{key}.cls", str(label).encode())]


def error(data, split="train") -> str:
    """The message of the UserError, one line."""
    with pytest.raises(UserError) as caught:
        open_source(str(data), split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Digits


def test_digits_are_split_by_class_without_overlap():
    train, val = open_source("digits", "train"), open_source("digits", "val")
    assert (len(train), len(val), train.classes) == (1198, 599, [str(digit) for digit in range(10)])
    names = [source.read(index)[2] for source in (train, val) for index in range(len(source))]
    assert len(set(names)) == 1797 and names[0].startswith("digits/")
    counts = [Counter(source.read(index)[1] for index in range(len(source))) for source in (train, val)]
    assert all(abs(counts[0][digit] - 2 * counts[1][digit]) <= 2 for digit in range(10))
    assert names == [
        source.read(index)[2] for source in (open_source("digits", "train"), val) for index in range(len(source))
    ]
    assert check_classes(train, val) == []


def test_digits_are_the_dataset_scaled_to_255():
    from sklearn.datasets import load_digits

    digits, source = load_digits(), open_source("digits", "val")
    image, label, name = source.read(5)
    place = int(name.removeprefix("digits/"))
    assert label == digits.target[place] and image.mode == "L"
    pixels = np.asarray(decode(image))
    assert pixels.shape == (8, 8, 3)
    np.testing.assert_allclose(pixels[..., 1], digits.images[place] * 255 / 16, atol=0.5)


def test_missing_packages_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "pip install scikit-learn" in error("digits")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in error("hf:some/thing") and "pip install datasets" in error("hf-stream:some/thing")


# Folders


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path / "train/b_dog/2.JPEG", png(2))
    write(tmp_path / "train/b_dog/1.png", png(1))
    write(tmp_path / "train/b_dog/deep/er/0.WebP", encoded(Image.new("RGB", (4, 4), (0, 0, 0)), "WEBP", lossless=True))
    write(tmp_path / "train/a_cat/7.tiff", encoded(Image.new("RGB", (4, 4), (7, 0, 0)), "TIFF"))
    write(tmp_path / "train/a_cat/notes.txt", b"not an image")
    write(tmp_path / "train/a_cat/.hidden.png", png(99))
    write(tmp_path / "train/a_cat/.cache/9.png", png(99))
    write(tmp_path / "train/.trash/9.png", png(99))
    write(tmp_path / "validation/a_cat/3.bmp", encoded(Image.new("RGB", (4, 4), (3, 0, 0)), "BMP"))
    write(tmp_path / "validation/b_dog/4.ppm", encoded(Image.new("RGB", (4, 4), (4, 0, 0)), "PPM"))
    return tmp_path


def test_folder(folder):
    train, val = open_source(str(folder), "train"), open_source(str(folder), "val")
    assert train.classes == val.classes == ["a_cat", "b_dog"]
    assert [(value_of(train.read(i)), train.read(i)[1]) for i in range(len(train))] == [(7, 0), (1, 1), (2, 1), (0, 1)]
    assert [(value_of(val.read(i)), val.read(i)[1]) for i in range(len(val))] == [(3, 0), (4, 1)]
    assert train.read(1)[2] == str(folder / "train/b_dog/1.png")
    assert (train.ignored, val.ignored, train.split, train.name) == (1, 0, "train", str(folder))
    assert check_classes(train, val) == ["train: ignored files, without an image's extension: 1"]


def test_folder_has_the_classes_and_order_of_torchvision(folder):
    from torchvision.datasets import ImageFolder

    reference, source = ImageFolder(str(folder / "validation")), open_source(str(folder), "val")
    assert source.classes == reference.classes
    assert [(source.read(i)[2], source.read(i)[1]) for i in range(len(source))] == reference.samples


def test_folder_follows_links_but_not_in_circles(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere")
    write(other / "x.png", png(50))
    (folder / "train/c_linked").symlink_to(other)
    (folder / "train/a_cat/up").symlink_to(folder / "train/a_cat")
    (folder / "train/a_cat/0.png").symlink_to(other / "x.png")
    source = open_source(str(folder), "train")
    assert source.classes == ["a_cat", "b_dog", "c_linked"] and len(source) == 6
    assert [value_of(source.read(i)) for i in range(6) if source.read(i)[1] != 1] == [50, 7, 50]


def test_a_relative_folder_survives_chdir_pickling_and_odd_names(folder, monkeypatch):
    odd = os.fsdecode(b"caf\xe9 \xc3\xa9\n.png")
    write(folder / "train/a_cat" / odd, png(60))
    monkeypatch.chdir(folder.parent)
    source = open_source(folder.name, "train")
    monkeypatch.chdir("/")
    again = pickle.loads(pickle.dumps(source))
    assert sorted(value_of(again.read(i)) for i in range(len(again))) == [0, 1, 2, 7, 60]


def test_empty_and_vanished_files_are_found_when_read(folder):
    empty = write(folder / "train/a_cat/0.jpg")
    source = open_source(str(folder), "train")
    with pytest.raises(BrokenImage, match="empty"):
        decode(source.read(0)[0])
    empty.unlink()
    with pytest.raises(OSError, match=r"0\.jpg"):
        source.read(0)


def test_folder_mistakes(folder, tmp_path_factory):
    assert all(
        form in error("/no/such/place") for form in ("train/", "hf:", "hf-stream:", "wds:", "digits", "/no/such/place")
    )
    assert "not a folder" in error(write(folder / "file.jpg"))
    assert "hf:" in error("hf:") and "wds:" in error("wds:/no/such/place")
    empty = tmp_path_factory.mktemp("empty")
    assert "no train/ folder" in error(empty) and "nothing" in error(empty)
    for number in range(9):
        write(empty / f"n{number}/x.png")
    assert "n0/, n1/" in error(empty) and "and 3 more" in error(empty)
    (empty / "train").mkdir()
    assert "no images" in error(empty)
    write(empty / "train/n01/readme.txt")
    assert "no images" in error(empty)
    write(empty / "train/n02/x.png", png(1))
    assert "train/n01" in error(empty) and "no images" in error(empty)


def test_flat_validation_folder(folder):
    write(folder / "val/ILSVRC2012_val_00000001.JPEG", png(1))
    message = error(folder, "val")
    assert "class folders" in message and "val/<class>/" in message


# Tars


@pytest.fixture
def tars(tmp_path) -> Path:
    """Two training shards of 3 and 2 images, labels in .cls and .json, in any order, among other members; one of validation."""
    first = [
        *pair("n0/a.b", 10, 0),
        ("n0/a.b.txt", b"caption"),
        ("n1/c.cls", b" 2\n"),
        ("n1/c.jpg", png(11)),
        *pair("./n1/d", 12, 1),
    ]
    second = [
        ("e.json", json.dumps({"label": 2, "width": 4}).encode()),
        ("e.png", png(13)),
        ("f.png", png(14)),
        ("f.json", b'{"cls": 0}'),
    ]
    write_tar(tmp_path / "imagenet1k-train-0001.tar", second)
    write_tar(tmp_path / "imagenet1k-train-0000.tar", first)
    write_tar(
        tmp_path / "imagenet1k-validation-00.tar",
        [*pair("v", 20, 2), ("._v.jpg", b"resource fork")],
        format=tarfile.GNU_FORMAT,
    )
    return tmp_path


def contents(source) -> list[tuple[int, int, str]]:
    return [(value_of(source.read(i)), source.read(i)[1], source.read(i)[2].split(":")[1]) for i in range(len(source))]


TRAIN = [(10, 0, "n0/a.b"), (11, 2, "n1/c"), (12, 1, "./n1/d"), (13, 2, "e"), (14, 0, "f")]


@pytest.mark.parametrize("prefix", ["", "wds:"])
def test_tars(tars, prefix):
    train, val = open_source(f"{prefix}{tars}", "train"), open_source(f"{prefix}{tars}", "val")
    assert contents(train) == TRAIN and contents(val) == [(20, 2, "v")]
    assert train.classes == ["0", "1", "2"] and check_classes(train, val) == []
    assert train.read(3)[2] == "imagenet1k-train-0001.tar:e"
    assert train.read(0)[0] == png(10)  # the very bytes


def test_tars_in_split_folders_and_class_names(tars):
    (tars / "train").mkdir()
    (tars / "val").mkdir()
    for path in tars.glob("*.tar"):
        path.rename(tars / ("train" if "train" in path.name else "val") / path.name.replace("train", "retrieval"))
    (tars / "classes.txt").write_text("crane\ngoldfish\ncrane machine\n")
    for prefix in ("", "wds:"):
        train = open_source(f"{prefix}{tars}", "train")
        assert contents(train) == TRAIN and train.classes == ["crane", "goldfish", "crane machine"]
        assert contents(open_source(f"{prefix}{tars}", "val")) == [(20, 2, "v")]
    (tars / "classes.txt").write_text("crane\ngoldfish\n")
    assert "classes.txt" in error(tars) and "2 lines" in error(tars)


def test_data_are_named_so_that_other_folders_find_them(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for form in ("", "wds:", "hf:", "hf-stream:"):
        assert located(f"{form}here") == located(f"{form}./here") == f"{form}{tmp_path}/here"
    for name in ("digits", "hf:ILSVRC/imagenet-1k", "hf-stream:ILSVRC/imagenet-1k", "hf:", "nowhere"):
        assert located(name) == name


def test_tars_are_read_in_other_processes(tars):
    source = open_source(str(tars), "train")
    assert contents(source) == TRAIN  # open here already
    with workers.context().Pool(2, workers.begin) as pool:
        assert pool.map(source.read, range(5)) == [source.read(index) for index in range(5)]
    assert contents(source) == TRAIN


def test_many_shards_do_not_use_up_file_descriptors(tmp_path, monkeypatch):
    monkeypatch.setattr("deit_gka.data.sources.tars.MAX_OPEN", 4)
    for number in range(30):
        write_tar(tmp_path / f"train-{number:02d}.tar", pair("x", number, number))
    source = open_source(f"wds:{tmp_path}", "train")
    before = len(os.listdir("/proc/self/fd"))
    for index in [*range(30), 3, 29, 0]:
        assert value_of(source.read(index)) == source.read(index)[1] == index
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_nothing_is_extracted_whatever_the_names(tmp_path, monkeypatch):
    inside = tmp_path / "deep/inside"
    members = [*pair("../../evil", 1, 0), *pair(str(tmp_path / "absolute"), 2, 1)]
    write_tar(inside / "train-0.tar", members)
    with tarfile.open(inside / "train-0.tar", "a") as tar:
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    monkeypatch.chdir(inside)
    source = open_source(f"wds:{inside}", "train")
    assert contents(source) == [(1, 0, "../../evil"), (2, 1, str(tmp_path / "absolute"))]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [inside / "train-0.tar"]


def test_damaged_tars_are_named(tars):
    path = tars / "imagenet1k-train-0001.tar"
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    after_second, in_the_last = members[2].offset, members[-2].offset_data + 5
    damaged = bytearray(whole)
    damaged[members[2].offset + 150] ^= 0xFF  # in a header's checksum
    for bad in (
        b"",
        whole[:300],
        whole[:in_the_last],
        whole[:after_second],
        bytes(damaged),
        b"<html>not found</html>" * 100,
    ):
        path.write_bytes(bad)
        message = error(tars)
        assert str(path) in message and "fetch it again" in message
    path.write_bytes(whole)
    source = open_source(str(tars), "train")
    path.write_bytes(whole[:600])
    with pytest.raises(OSError, match="0001"):
        source.read(4)


@pytest.mark.parametrize("note", [None, ("a.cls", b"dog"), ("a.cls", b"-1"), ("a.json", b"{}"), ("a.json", b"{"), ("a.json", b'{"label": "dog"}'),
                                  ("a.json", b"[1]"), ("a.txt", b"1")])  # fmt: skip
def test_tars_without_labels(tmp_path, note):
    write_tar(tmp_path / "train-0.tar", [("a.jpg", png(1)), *([note] if note else [])])
    message = error(f"wds:{tmp_path}")
    assert "train-0.tar" in message and "a.cls" in message and "no label" in message


def test_tar_mistakes(tars):
    for path in tars.glob("*validation*"):
        path.rename(tars / "retrieval.tar")  # "val" is not a word of it
    assert "val" in error(f"wds:{tars}", "val") and "retrieval.tar" in error(f"wds:{tars}", "val")
    assert "retrieval.tar" in error(tars, "val") and "wds:" in error(tars, "val")
    write_tar(tars / "val-0.tar", [("a.cls", b"0")])
    assert "no images" in error(tars, "val")


# Hugging Face


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
        rows = {name: columns.get(name, rows[name]) for name in features}
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


def test_hub_dataset_of_parquet_files(parquet):
    train, val = open_source(f"hf:{parquet}", "train"), open_source(f"hf:{parquet}", "val")
    for source, size in ((train, 23), (val, 5)):
        assert isinstance(source, Source) and len(source) == size and source.classes == ["cat", "dog"]
        assert [(value_of(source.read(i)), source.read(i)[1]) for i in range(size)] == [(v, v % 2) for v in range(size)]
    assert train.read(3)[0] == png(3) and train.read(3)[2] == "train3.png"
    again = pickle.loads(pickle.dumps(train))
    assert [value_of(again.read(i)) for i in range(23)] == list(range(23))
    assert check_classes(train, val) == []


def test_hub_dataset_of_image_files(tmp_path):
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
    assert "ClassLabel" in error(f"hf:{tmp_path / 'b'}") and "image (Image), id (Value)" in error(
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

    monkeypatch.setattr(datasets, "get_dataset_split_names", gated)
    message = error("hf-stream:ILSVRC/imagenet-1k")
    assert (
        "gated dataset on the Hub. A gated" in message
        and "https://huggingface.co/datasets/ILSVRC/imagenet-1k" in message
    )


# Streams


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
def test_ranks_share_a_stream_exactly(parquet, split, size, ranks):
    stream = open_source(f"hf-stream:{parquet}", split)
    parts = [drain(stream, 4, rank, ranks, seed=7) for rank in range(ranks)]
    assert sorted(v for part in parts for v in part) == list(range(size))
    assert all(parts)
    assert parts == [drain(stream, 4, rank, ranks, seed=7) for rank in range(ranks)]


def test_whole_shards_go_to_ranks_when_there_are_enough(tmp_path):
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


def test_a_stream_that_breaks_off_says_so(tmp_path):
    write_parquet(tmp_path, "train", [3, 3])
    stream = open_source(f"hf-stream:{tmp_path}", "train")
    write(tmp_path / "data/train-00001-of-00002.parquet", b"gone")
    with pytest.raises(UserError, match=r"broke off .*run the same command again"):
        list(stream.records(0, 0, 1))


# Classes


def fake(split, classes, size=1):
    return type("Fake", (Source,), {"__len__": lambda self: size, "read": None})("fake", split, classes)


def test_classes_must_agree():
    with pytest.raises(UserError, match="class 'n01440764' is in train but not in val"):
        check_classes(fake("train", ["n01440764", "n01443537"]), fake("val", ["n01443537"]))
    with pytest.raises(UserError, match="class 'x' is in val but not in train"):
        check_classes(fake("train", ["a"]), fake("val", ["a", "x"]))
    with pytest.raises(UserError, match="same order"):
        check_classes(fake("train", ["a", "b"]), fake("val", ["b", "a"]))
    thousand = [str(number) for number in range(1000)]
    assert check_classes(fake("train", thousand, 1_281_167), fake("val", thousand, 50_000)) == []
    warned = check_classes(fake("train", thousand, 1_281_167), fake("val", thousand, 49_999))
    assert len(warned) == 1 and "49,999" in warned[0] and "50,000" in warned[0]


# Decoding


def pixel(data) -> tuple[int, int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = decode(data)
    assert image.mode == "RGB"
    return image.getpixel((1, 1))


def close(one, other, tolerance):
    return all(abs(a - b) <= tolerance for a, b in zip(one, other, strict=True))


def test_eight_bit_images():
    assert pixel(encoded(Image.new("L", (4, 4), 77))) == (77, 77, 77)
    assert pixel(encoded(Image.new("1", (4, 4), 1))) == (255, 255, 255)
    assert pixel(encoded(Image.new("LA", (4, 4), (77, 0)))) == (77, 77, 77)
    assert pixel(encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 0)))) == (
        10,
        20,
        30,
    )  # alpha is dropped, not composited
    assert close(pixel(encoded(Image.new("RGB", (16, 16), (10, 200, 30)), "JPEG", quality=95)), (10, 200, 30), 3)
    assert pixel(Image.new("L", (4, 4), 5)) == (5, 5, 5)  # decoded already


@pytest.mark.parametrize("transparency", [None, 1, bytes([255, 0, 128])])
def test_palette(transparency):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([1, 2, 3, 40, 50, 60, 7, 8, 9])
    assert pixel(encoded(image, **({} if transparency is None else {"transparency": transparency}))) == (40, 50, 60)


@pytest.mark.parametrize("value, expected", [(0, 0), (32768, 128), (65535, 255), (257, 1), (300, 1)])
def test_sixteen_bit_gray(value, expected):
    array = np.full((4, 4), value, np.uint16)
    for data in (encoded(Image.fromarray(array)), encoded(Image.fromarray(array), "TIFF"), Image.fromarray(array),
                 Image.frombytes("I;16B", (4, 4), array.astype(">u2").tobytes()), Image.fromarray(array.astype(np.int32)),
                 b"P5 4 4 65535\n" + array.astype(">u2").tobytes()):  # fmt: skip
        assert close(pixel(data), (expected,) * 3, 0)


def test_sixteen_bit_colour():
    import struct
    import zlib

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + struct.pack(">HHH", 65535, 32768, 0) * 4
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(row * 4))
        + chunk(b"IEND", b"")
    )
    assert close(pixel(data), (255, 128, 0), 1)


def test_cmyk_jpeg():
    assert close(pixel(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)), (255, 0, 0), 4)


def test_format_is_told_by_content(folder):
    write(folder / "train/a_cat/n02105855_2933.JPEG", png(42))
    source = open_source(str(folder), "train")
    assert 42 in [value_of(source.read(i)) for i in range(len(source))]


def test_broken_images(monkeypatch):
    jpeg, progressive, whole = encoded(photo(), "JPEG"), encoded(photo(), "JPEG", progressive=True), encoded(photo())
    webp, tiff, bmp = (encoded(photo(), format) for format in ("WEBP", "TIFF", "BMP"))
    for data in (jpeg, progressive, whole, webp, tiff, bmp):
        assert decode(data).size == (64, 64)
        for part in (0.02, 0.3, 0.6, 0.9):
            with pytest.raises(BrokenImage):
                decode(data[: int(len(data) * part)])
    with pytest.raises(BrokenImage, match="truncated"):
        decode(jpeg[: len(jpeg) // 2])
    eps = encoded(photo(8), "EPS")  # Pillow would start Ghostscript on it
    for data in (b"hello", b"<html>404 not found</html>", b"\0" * 5000, eps):
        with pytest.raises(BrokenImage, match="not a JPEG"):
            decode(data)
    with pytest.raises(BrokenImage, match="empty"):
        decode(b"")
    with pytest.raises(BrokenImage, match="floating"):
        decode(encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BrokenImage, match="bomb") as caught:
        decode(whole)
    assert "\n" not in str(caught.value) and str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_running_out_of_memory_is_not_a_broken_image(monkeypatch):
    def exhausted(*args, **options):
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhausted)
    with pytest.raises(MemoryError):
        decode(png(1))
