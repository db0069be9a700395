"""Images of digits, in folders and in webdataset tars; what both splits must agree on; mistakes are one line."""

import tarfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import ImageFolder

from deit_gka.data.sources import DataParts, check_classes, decode, located, open_source
from tiny_images import contents, error, pair, png, write, write_tar
from tiny_vision import encoded
from trainkit_gka import workers
from trainkit_gka.cli import UserError


def test_digits_are_split_by_class_and_scaled_to_255():
    digits, names, counts = load_digits(), set(), {}
    for split, size in (("train", 1198), ("val", 599)):
        source = open_source("digits", split)
        records = [source.read(index) for index in range(len(source))]
        assert len(source) == size and source.classes == [str(digit) for digit in range(10)]
        names |= {name for *_, name in records}
        counts[split] = Counter(label for _, label, _ in records)
        image, label, name = records[5]
        place = int(name.removeprefix("digits/"))
        assert label == digits.target[place]
        np.testing.assert_allclose(np.asarray(decode(image))[..., 1], digits.images[place] * 255 / 16, atol=0.5)
    assert len(names) == 1797 and all(abs(counts["train"][k] - 2 * counts["val"][k]) <= 2 for k in range(10))


OF_SYSTEMS = ["a_cat/.cache/9.png", ".trash/9.png", "@eaDir/2.JPEG@SynoEAStream/9.png", "a_cat/@eaDir/7.tiff.png",
              "#recycle/9.png", "lost+found/9.png", "__MACOSX/b_dog/9.png", "b_dog/deep/__MACOSX/9.png"]  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    def red(value, form, **options):
        return encoded(Image.new("RGB", (4, 4), (value, 0, 0)), form, **options)

    files = {
        "train/b_dog/2.JPEG": png(2),  # the content decides, not the name
        "train/b_dog/1.png": png(1),
        "train/b_dog/deep/er/0.WebP": red(0, "WEBP", lossless=True),
        "train/a_cat/7.tiff": red(7, "TIFF"),
        "train/a_cat/8.jp2": red(8, "JPEG2000"),
        "validation/a_cat/3.bmp": red(3, "BMP"),
        "validation/b_dog/4.ppm": red(4, "PPM"),
        **{f"train/{name}": png(99) for name in ("a_cat/.hidden.png", *OF_SYSTEMS)},
        **{f"train/a_cat/{name}": b"not an image" for name in ("notes.txt", "1.heic", "2.HEIC", "README")},
    }
    for name, content in files.items():
        write(tmp_path / name, content)
    return tmp_path


def test_folder(folder):
    train, val = open_source(str(folder), "train"), open_source(str(folder), "val")
    assert train.classes == val.classes == ["a_cat", "b_dog"]
    assert contents(train) == [(7, 0), (8, 0), (1, 1), (2, 1), (0, 1)] and contents(val) == [(3, 0), (4, 1)]
    assert train.read(2)[2] == str(folder / "train/b_dog/1.png")
    folders = {".cache/": 1, ".trash/": 1, "@eaDir/": 2, "#recycle/": 1, "lost+found/": 1, "__MACOSX/": 2}
    assert (train.ignored, val.ignored) == ({".txt": 1, ".heic": 2, "without an extension": 1, **folders}, {})
    assert len(check_classes(train, val)) == 1  # one line
    reference = ImageFolder(str(folder / "validation"))
    assert val.classes == reference.classes
    assert [(val.read(i)[2], val.read(i)[1]) for i in range(len(val))] == reference.samples


def test_names_of_data_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for form in ("", "wds:", "hf:", "hf-stream:"):
        assert located(f"{form}here") == located(f"{form}./here") == f"{form}{tmp_path}/here"
    for name in ("digits", "hf:ILSVRC/imagenet-1k", "hf-stream:ILSVRC/imagenet-1k", "hf:", "nowhere", "~nobody-here"):
        assert located(name) == name


def test_mistakes_about_folders(folder, tmp_path_factory):
    for place in ("/no/such/place", "~nobody-here/place"):
        assert all(form in error(place) for form in ("train/", "hf:", "hf-stream:", "wds:", "digits"))
    (folder / "validation").rename(folder / "test")
    assert "--val-split" in error(folder, "val") and "test/" in error(folder, "val")
    assert len(open_source(str(folder), "val", DataParts(val_split="test"))) == 2
    write(folder / "val/ILSVRC2012_val_00000001.JPEG", png(1))
    assert "val/<class>/" in error(folder, "val")
    assert "--target-key" in error(folder, target_key="label")
    empty = tmp_path_factory.mktemp("empty")
    write(empty / "train/n01/1.heic")
    assert "no images" in error(empty)
    write(empty / "train/n02/x.png", png(1))
    assert "train/n01" in error(empty) and "1.heic" in error(empty)


LINKS = {  # a link, its target, and how many images of each class there are with it
    "a class to all classes": ("train/all", "train", [2, 1, 1]),
    "a class into another": ("train/zdeep", "train/a/deep", [2, 1, 1]),
    "a class to the other split": ("train/zval", "val", [2, 1, 1]),
    "the other split": ("train/b/leak", "val", [2, 1, 1]),
    "the class itself": ("train/b/leak", "train/b", [2, 1, 1]),
    "above another's real folder": ("train/b/leak", "other", [2, 1, 1]),
    "the data": ("train/b/leak", ".", [2, 1, 1]),
    "a new class": ("train/z", "extra", [2, 1, 1, 1]),
    "a file": ("train/b/9.png", "extra/7.png", [2, 2, 1]),
    "more of a class": ("train/b/more", "extra", [2, 2, 1]),
}


@pytest.mark.parametrize("case", LINKS)
def test_no_link_gives_an_image_another_class_or_split(case, tmp_path):
    """The class c is itself a link to a folder elsewhere."""
    names = ("train/a/1.png", "train/a/deep/2.png", "train/b/3.png", "val/a/4.png", "val/b/5.png", "other/c/6.png")
    for name in (*names, "extra/7.png"):
        write(tmp_path / name, png(1))
    (tmp_path / "train/c").symlink_to(tmp_path / "other/c")
    link, target, counts = LINKS[case]
    (tmp_path / link).symlink_to(tmp_path / target)
    source = open_source(str(tmp_path), "train")
    labels = Counter(label for _, label in contents(source))
    assert [labels[label] for label in range(len(source.classes))] == counts
    assert source.ignored.total() == (counts == [2, 1, 1])  # the link, where it is not followed


def test_a_split_may_be_a_link_to_the_other_one(tmp_path):
    """To try things out, the training images serve as those of validation."""
    write(tmp_path / "train/a/1.png", png(1))
    (tmp_path / "val").symlink_to(tmp_path / "train")
    assert all(contents(open_source(str(tmp_path), split)) == [(1, 0)] for split in ("train", "val"))


@pytest.mark.parametrize("train, val, message", [
    (["a", "b"], ["b"], "'a' is in train but not in val"), (["a"], ["a", "x"], "'x' is in val but not in train"),
    (["a", "b"], ["b", "a"], "same order"),
])  # fmt: skip
def test_splits_need_the_same_classes(train, val, message):
    with pytest.raises(UserError, match=message):
        check_classes(SimpleNamespace(split="train", classes=train), SimpleNamespace(split="val", classes=val))


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


def test_tars_need_labels(tmp_path):
    json = [("a.json", text) for text in (b"{}", b"[1]", b'{"label": 1e999}', b'{"label": 1.5}', b"[" * 100_000)]
    for label in (("a.txt", b"1"), ("a.cls", b"dog"), ("a.cls", b"-1"), *json):
        write_tar(tmp_path / "train-0.tar", [("a.jpg", png(1)), label])
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
    "systems": (["a/0.jpg", "a/0.cls", "a/._0.jpg", "a/._0.cls", "__MACOSX/a/0.jpg", "a/@eaDir/0.jpg"], [(0, 0, "a/0")],
                {"hidden": 2, "__MACOSX/": 1, "@eaDir/": 1}),
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
