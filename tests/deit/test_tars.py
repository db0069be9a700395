"""Images in webdataset tars are read in place; damage and missing labels are one line."""

import tarfile
from pathlib import Path

import pytest

from deit_gka.data.sources import DataParts, check_classes, open_source
from image_files import contents, error, pair, png, write_tar
from trainkit_gka import workers

SHARD = "imagenet1k-train-0001.tar"


@pytest.fixture
def tars(tmp_path) -> Path:
    """Two training shards of 3 and 2 images, labels in .cls and .json, in any order, among other members; one of
    validation."""
    first = [("n1/c.cls", b" 2\n"), *pair("n0/a.b", 10, 0), ("n0/a.b.txt", b"caption"), ("n1/c.jpg", png(11)),
             *pair("./n1/d", 12, 1)]  # fmt: skip
    second = [("e.json", b'{"label": 2, "width": 4}'), ("e.png", png(13)), ("f.png", png(14)), ("f.json", b'{"cls":0}')]
    write_tar(tmp_path / SHARD, second)
    write_tar(tmp_path / "imagenet1k-train-0000.tar", first)
    validation = [*pair("v", 20, 2), ("._v.jpg", b"resource fork")]
    write_tar(tmp_path / "imagenet1k-validation-00.tar", validation, format=tarfile.GNU_FORMAT)
    return tmp_path


def described(data, split="train", **parts):
    """Red value, label, key of every image, and what is not used."""
    source = open_source(str(data), split, DataParts(**parts))
    keys = [source.read(index)[2].split(":")[1] for index in range(len(source))]
    return [(*values, key) for values, key in zip(contents(source), keys)], dict(source.ignored)


TRAIN = [(10, 0, "n0/a.b"), (11, 2, "n1/c"), (12, 1, "./n1/d"), (13, 2, "e"), (14, 0, "f")]


@pytest.mark.parametrize("prefix", ["", "wds:"])
def test_tars(tars, prefix, monkeypatch):
    """Images are in the order of the tar, so that a shard is read from its beginning to its end."""
    monkeypatch.setattr("deit_gka.data.sources.tars.MAX_OPEN", 1)
    assert described(f"{prefix}{tars}") == (TRAIN, {".b.txt": 1})
    assert described(f"{prefix}{tars}", "val") == ([(20, 2, "v")], {"hidden": 1})
    train, val = open_source(f"{prefix}{tars}", "train"), open_source(f"{prefix}{tars}", "val")
    assert train.classes == ["0", "1", "2"] and len(check_classes(train, val)) == 2
    records = [train.read(index) for index in (4, 0, 3, 1, 2)]  # of either shard again
    assert records[1] == (png(10), 0, "imagenet1k-train-0000.tar:n0/a.b")  # the very bytes
    with workers.context().Pool(2, workers.begin) as pool:  # the files are open here already
        assert pool.map(train.read, (4, 0, 3, 1, 2)) == records


def test_split_folders_and_class_names(tars):
    for split in ("train", "val"):
        (tars / split).mkdir()
        for path in tars.glob(f"*-{split}*.tar"):
            path.rename(tars / split / path.name.replace("train", "retrieval"))
    (tars / "classes.txt").write_text("crane\ngoldfish\ncrane machine\n")
    assert open_source(str(tars), "train").classes == ["crane", "goldfish", "crane machine"]
    assert described(tars)[0] == TRAIN and described(f"wds:{tars}", "val")[0] == [(20, 2, "v")]
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
    images = [(1, 0, "../../evil"), (2, 1, str(tmp_path / "absolute"))]
    assert described(f"wds:{inside}") == (images, {"links": 1})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [inside / "train-0.tar"]


def test_damaged_tars_are_named(tars):
    path = tars / SHARD
    content = path.read_bytes()
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    damaged = bytearray(content)
    damaged[members[2].offset + 150] ^= 0xFF  # in a header's checksum
    cuts = [content[:end] for end in (0, members[2].offset, members[-2].offset_data + 5)]
    for bad in (*cuts, bytes(damaged), b"<html>not found</html>" * 100):
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
    assert "train-0.tar: image a has" in error(f"wds:{tmp_path}")


def test_splits_of_tars_are_words_of_their_names(tars):
    for path in tars.glob("*validation*"):
        path.rename(tars / "retrieval.tar")  # "val" is not a word of it
    assert "--val-split" in error(tars, "val")
    write_tar(tars / "train_small-0.tar", pair("x", 1, 0))
    for split, images in (("train", TRAIN), ("val", [(1, 0, "x")])):  # nothing is in both
        assert described(f"wds:{tars}", split, val_split="train_small")[0] == images


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
    """Member k is a red of k, or the label of the last image before it."""
    names, images, unused = KEYS[case]
    labels = [str(sum(image[0] < place for image in images) - 1).encode() for place in range(len(names))]
    contents = [
        label if name.endswith(".cls") else png(place) for place, (name, label) in enumerate(zip(names, labels))
    ]
    write_tar(tmp_path / "train-0.tar", list(zip(names, contents)))
    assert described(f"wds:{tmp_path}") == (images, unused)


def test_one_of_several_images_of_a_key_is_chosen_by_suffix(tmp_path):
    views = [("0.left.jpg", png(1)), ("0.right.jpg", png(2)), ("0.cls", b"0"), ("0.fine.cls", b"3")]
    write_tar(tmp_path / "train-0.tar", views)
    assert "--input-key left.jpg" in error(f"wds:{tmp_path}")
    fine = described(f"wds:{tmp_path}", input_key="png;RIGHT.jpg", target_key="fine.cls")
    assert fine == ([(2, 3, "0")], {".left.jpg": 1, ".cls": 1})
    assert ".left.jpg" in error(f"wds:{tmp_path}", input_key="png;tif")
