"""Images in webdataset tars are read in place; damage and missing labels are one line."""

import json
import tarfile
from pathlib import Path

import pytest

from deit_gka.data.sources import DataParts, check_classes, open_source
from image_files import error, pair, png, value_of, write_tar
from trainkit_gka import workers


@pytest.fixture
def tars(tmp_path) -> Path:
    """Two training shards of 3 and 2 images, labels in .cls and .json, in any order, among other members; one of
    validation."""
    first = [("n1/c.cls", b" 2\n"), *pair("n0/a.b", 10, 0), ("n0/a.b.txt", b"caption"), ("n1/c.jpg", png(11)),
             *pair("./n1/d", 12, 1)]  # fmt: skip
    second = [("e.json", json.dumps({"label": 2, "width": 4}).encode()), ("e.png", png(13)),
              ("f.png", png(14)), ("f.json", b'{"cls": 0}')]  # fmt: skip
    write_tar(tmp_path / "imagenet1k-train-0001.tar", second)
    write_tar(tmp_path / "imagenet1k-train-0000.tar", first)
    validation = [*pair("v", 20, 2), ("._v.jpg", b"resource fork")]
    write_tar(tmp_path / "imagenet1k-validation-00.tar", validation, format=tarfile.GNU_FORMAT)
    return tmp_path


def contents(source) -> list[tuple[int, int, str]]:
    return [(value_of(source.read(i)), source.read(i)[1], source.read(i)[2].split(":")[1]) for i in range(len(source))]


def described(folder, **parts):
    """Red value, label, key of every image, and what is not used."""
    source = open_source(f"wds:{folder}", "train", DataParts(**parts))
    return contents(source), dict(source.ignored)


TRAIN = [(10, 0, "n0/a.b"), (11, 2, "n1/c"), (12, 1, "./n1/d"), (13, 2, "e"), (14, 0, "f")]


@pytest.mark.parametrize("prefix", ["", "wds:"])
def test_tars(tars, prefix, monkeypatch):
    """Images are in the order of the tar, so that a shard is read from its beginning to its end."""
    monkeypatch.setattr("deit_gka.data.sources.tars.MAX_OPEN", 1)
    train, val = open_source(f"{prefix}{tars}", "train"), open_source(f"{prefix}{tars}", "val")
    assert contents(train) == TRAIN and contents(val) == [(20, 2, "v")]
    assert [value_of(train.read(index)) for index in (4, 0, 3)] == [14, 10, 13]  # of either shard again
    assert train.classes == ["0", "1", "2"]
    assert check_classes(train, val) == ["train: not used: 1 .b.txt", "val: not used: 1 hidden"]
    assert train.read(3)[2] == "imagenet1k-train-0001.tar:e"
    assert train.read(0)[0] == png(10)  # the very bytes
    with workers.context().Pool(2, workers.begin) as pool:  # the files are open here already
        assert pool.map(train.read, range(5)) == [train.read(index) for index in range(5)]


def test_split_folders_and_class_names(tars):
    (tars / "train").mkdir()
    (tars / "val").mkdir()
    for path in tars.glob("*.tar"):
        path.rename(tars / ("train" if "train" in path.name else "val") / path.name.replace("train", "retrieval"))
    (tars / "classes.txt").write_text("crane\ngoldfish\ncrane machine\n")
    train = open_source(str(tars), "train")
    assert contents(train) == TRAIN and train.classes == ["crane", "goldfish", "crane machine"]
    assert contents(open_source(f"wds:{tars}", "val")) == [(20, 2, "v")]
    (tars / "classes.txt").write_text("crane\ngoldfish\n")
    assert "classes.txt" in error(tars)


def test_nothing_is_extracted(tmp_path, monkeypatch):
    inside = tmp_path / "deep/inside"
    write_tar(inside / "train-0.tar", [*pair("../../evil", 1, 0), *pair(str(tmp_path / "absolute"), 2, 1)])
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
    content = path.read_bytes()
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    after_second, in_the_last = members[2].offset, members[-2].offset_data + 5
    damaged = bytearray(content)
    damaged[members[2].offset + 150] ^= 0xFF  # in a header's checksum
    for bad in (b"", content[:in_the_last], content[:after_second], bytes(damaged), b"<html>not found</html>" * 100):
        path.write_bytes(bad)
        assert str(path) in error(tars)
    path.write_bytes(content)
    source = open_source(str(tars), "train")
    path.write_bytes(content[:600])
    with pytest.raises(OSError, match="0001"):
        source.read(4)


@pytest.mark.parametrize("note", [None, ("a.cls", b"dog"), ("a.cls", b"-1"), ("a.json", b"{}"), ("a.json", b"[1]")])
def test_tars_need_labels(tmp_path, note):
    write_tar(tmp_path / "train-0.tar", [("a.jpg", png(1)), *([note] if note else [])])
    message = error(f"wds:{tmp_path}")
    assert "train-0.tar" in message and "a.cls" in message


def test_splits_of_tars_are_words_of_their_names(tars):
    for path in tars.glob("*validation*"):
        path.rename(tars / "retrieval.tar")  # "val" is not a word of it
    assert "--val-split" in error(tars, "val")
    write_tar(tars / "train_small-0.tar", pair("x", 1, 0))
    small = DataParts(val_split="train_small")  # nothing is in both
    assert contents(open_source(f"wds:{tars}", "train", small)) == TRAIN
    assert contents(open_source(f"wds:{tars}", "val", small)) == [(1, 0, "x")]


# Keys

KEYS = {  # the members of a tar, the images, what is not used
    "first dot": (["0.left.jpg", "0.cls", "1.left.jpg", "1.cls"], [(0, 0, "0"), (2, 1, "1")], {}),
    "mask": (["0.mask.png", "0.jpg", "0.cls", "0.txt"], [(1, 0, "0")], {".mask.png": 1, ".txt": 1}),
    "dots in keys": (["i_0.5.jpg", "i_0.5.cls", "i_0.7.jpg", "i_0.7.cls", "i_0.7.mask.png"],
                     [(0, 0, "i_0.5"), (2, 1, "i_0.7")], {".7.mask.png": 1}),
    "folders": (["a.b/0.jpg", "a.b/0.cls", "./c/0.jpg", "./c/0.cls"], [(0, 0, "a.b/0"), (2, 1, "./c/0")], {}),
    "twice": (["0.jpg", "0.JPG", "0.cls", "README", ".x.jpg", "0.heic", "1.jpg", "1.cls"], [(0, 0, "0"), (6, 1, "1")],
              {".jpg once more": 1, "without an extension": 1, "hidden": 1, ".heic": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_keys_end_at_the_first_dot_and_every_member_is_used_or_counted(case, tmp_path):
    names, images, unused = KEYS[case]
    members = []
    for place, name in enumerate(names):
        label = str(sum(image[0] < place for image in images) - 1)
        note = {"cls": label, "json": f'{{"label": {label}}}'}.get(name.rpartition(".")[2].lower())
        members.append((name, note.encode() if note else png(place)))
    write_tar(tmp_path / "train-0.tar", members)
    assert described(tmp_path) == (images, unused)


def test_one_of_several_images_of_a_key_is_chosen_by_suffix(tmp_path):
    views = [("0.left.jpg", png(1)), ("0.right.jpg", png(2)), ("0.cls", b"0"), ("0.fine.cls", b"3")]
    write_tar(tmp_path / "train-0.tar", views)
    assert "--input-key left.jpg" in error(f"wds:{tmp_path}")
    fine = described(tmp_path, input_key="png;RIGHT.jpg", target_key="fine.cls")
    assert fine == ([(2, 3, "0")], {".left.jpg": 1, ".cls": 1})
    assert ".left.jpg" in error(f"wds:{tmp_path}", input_key="png;tif")
