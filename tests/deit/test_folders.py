"""Images of digits and of folders, and what both splits must agree on; mistakes are one line."""

import os
import pickle
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deit_gka.data.sources import BrokenImage, DataParts, Source, check_classes, decode, located, open_source
from deit_gka.data.sources.base import ignored_text
from deit_gka.data.sources.decode import FORMATS
from deit_gka.figures.subjects import photographs
from image_files import error, png, value_of, write
from tiny_vision import encoded
from trainkit_gka.cli import UserError


def contents(source) -> list[tuple[int, int]]:
    """Red value and label of every image."""
    return [(value_of(source.read(index)), source.read(index)[1]) for index in range(len(source))]


# Digits


def test_digits_are_split_by_class_and_scaled_to_255():
    from sklearn.datasets import load_digits

    train, val = open_source("digits", "train"), open_source("digits", "val")
    assert (len(train), len(val), train.classes) == (1198, 599, [str(digit) for digit in range(10)])
    names = [source.read(index)[2] for source in (train, val) for index in range(len(source))]
    assert len(set(names)) == 1797 and names[0].startswith("digits/")
    counts = [Counter(source.read(index)[1] for index in range(len(source))) for source in (train, val)]
    assert all(abs(counts[0][digit] - 2 * counts[1][digit]) <= 2 for digit in range(10))
    again = open_source("digits", "train")
    assert names[:1198] == [again.read(index)[2] for index in range(1198)]
    assert check_classes(train, val) == []

    digits, (image, label, name) = load_digits(), val.read(5)
    place = int(name.removeprefix("digits/"))
    assert label == digits.target[place] and image.mode == "L"
    pixels = np.asarray(decode(image))
    assert pixels.shape == (8, 8, 3)
    np.testing.assert_allclose(pixels[..., 1], digits.images[place] * 255 / 16, atol=0.5)


def test_missing_packages_are_named(monkeypatch):
    for package in ("sklearn", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    for data, package in (("digits", "sklearn"), ("hf:some/thing", "datasets"), ("hf-stream:some/thing", "datasets")):
        assert f'{data}: {package} is not installed: run pip install "gka[vision]"' in error(data)
    with pytest.raises(UserError, match=r'without --image: sklearn is not installed: run pip install "gka\[vision\]"'):
        photographs()


# Folders


@pytest.fixture
def folder(tmp_path) -> Path:
    def red(value, form, **options):
        return encoded(Image.new("RGB", (4, 4), (value, 0, 0)), form, **options)

    write(tmp_path / "train/b_dog/2.JPEG", png(2))  # the content decides, not the name
    write(tmp_path / "train/b_dog/1.png", png(1))
    write(tmp_path / "train/b_dog/deep/er/0.WebP", red(0, "WEBP", lossless=True))
    write(tmp_path / "train/a_cat/7.tiff", red(7, "TIFF"))
    write(tmp_path / "train/a_cat/notes.txt", b"not an image")
    for hidden in ("a_cat/.hidden.png", "a_cat/.cache/9.png", ".trash/9.png"):
        write(tmp_path / "train" / hidden, png(99))
    write(tmp_path / "validation/a_cat/3.bmp", red(3, "BMP"))
    write(tmp_path / "validation/b_dog/4.ppm", red(4, "PPM"))
    return tmp_path


def test_folder(folder):
    from torchvision.datasets import ImageFolder

    train, val = open_source(str(folder), "train"), open_source(str(folder), "val")
    assert train.classes == val.classes == ["a_cat", "b_dog"]
    assert contents(train) == [(7, 0), (1, 1), (2, 1), (0, 1)] and contents(val) == [(3, 0), (4, 1)]
    assert train.read(1)[2] == str(folder / "train/b_dog/1.png")
    assert (train.ignored, val.ignored, train.split, train.name) == ({".txt": 1}, {}, "train", str(folder))
    assert check_classes(train, val) == ["train: not used: 1 .txt"]
    reference = ImageFolder(str(folder / "validation"))
    assert val.classes == reference.classes
    assert [(val.read(i)[2], val.read(i)[1]) for i in range(len(val))] == reference.samples


def test_folder_survives_chdir_and_pickling_and_names_what_vanished(folder, monkeypatch):
    odd = os.fsdecode(b"caf\xe9 \xc3\xa9\n.png")
    write(folder / "train/a_cat" / odd, png(60))
    empty = write(folder / "train/a_cat/0.jpg")
    monkeypatch.chdir(folder.parent)
    source = pickle.loads(pickle.dumps(open_source(folder.name, "train")))
    monkeypatch.chdir("/")
    assert sorted(value_of(source.read(i)) for i in range(1, len(source))) == [0, 1, 2, 7, 60]
    with pytest.raises(BrokenImage, match="empty"):
        decode(source.read(0)[0])
    empty.unlink()
    with pytest.raises(OSError, match=r"0\.jpg"):
        source.read(0)


def test_names_of_data_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for form in ("", "wds:", "hf:", "hf-stream:"):
        assert located(f"{form}here") == located(f"{form}./here") == f"{form}{tmp_path}/here"
    for name in ("digits", "hf:ILSVRC/imagenet-1k", "hf-stream:ILSVRC/imagenet-1k", "hf:", "nowhere"):
        assert located(name) == name


def test_every_kind_of_image_is_read_and_others_are_counted(tmp_path):
    rgb = Image.new("RGB", (4, 4), (200, 0, 0))
    ends = {"jfif": "JPEG", "jpe": "JPEG", "JPG": "JPEG", "avif": "AVIF", "WebP": "WEBP", "pnm": "PPM", "apng": "PNG"}
    ends = {end: form for end, form in ends.items() if form in FORMATS}  # an older Pillow has no AVIF
    for end, form in ends.items():
        write(tmp_path / f"train/a/x.{end}", encoded(rgb, form))
    for name in ("1.heic", "2.HEIC", "Thumbs.db", "README", "depth.pfm", ".DS_Store", "._x.jpg"):
        write(tmp_path / "train/a" / name, b"?")
    write(tmp_path / "train/notes.txt")
    source = open_source(str(tmp_path), "train")
    assert sorted(source.read(index)[2].rpartition(".")[2] for index in range(len(source))) == sorted(ends)
    assert all(abs(value - 200) < 5 for value, _ in contents(source))
    assert source.ignored == {".heic": 2, ".db": 1, ".pfm": 1, "without an extension": 1, ".txt": 1}
    assert ignored_text(source).startswith("train: not used: 2 .heic, ") and "convert .heic" in ignored_text(source)


def test_mistakes_about_folders(folder, tmp_path_factory):
    assert all(form in error("/no/such/place") for form in ("train/", "hf:", "hf-stream:", "wds:", "digits"))
    assert "not a folder" in error(write(folder / "file.jpg"))
    assert "hf:" in error("hf:") and "wds:" in error("wds:/no/such/place")
    (folder / "validation").rename(folder / "test")
    assert "no val/ folder (or name another by --val-split); it has: file.jpg, test/, train/" in error(folder, "val")
    assert len(open_source(str(folder), "val", DataParts(val_split="test"))) == 2
    write(folder / "val/ILSVRC2012_val_00000001.JPEG", png(1))
    assert "val/<class>/" in error(folder, "val")
    assert "nothing that --target-key could choose" in error(folder, target_key="label")
    assert "nothing that --val-split could choose" in error("digits", val_split="test")

    empty = tmp_path_factory.mktemp("empty")
    assert "no train/ folder" in error(empty) and "nothing" in error(empty)
    for number in range(9):
        write(empty / f"n{number}/x.png")
    assert "n0/, n1/" in error(empty) and "and 3 more" in error(empty)
    (empty / "train").mkdir()
    assert "no images" in error(empty)
    write(empty / "train/n01/1.heic")
    assert "no images" in error(empty)
    write(empty / "train/n02/x.png", png(1))
    assert "train/n01 has no images" in error(empty) and "It has: 1.heic" in error(empty)


# Links

LINKED = {  # link: its target, and how many images of each class there are with it
    "a class to all classes": ("train/all", "train", None),
    "a class to another": ("train/zcopy", "train/a", None),
    "a class into another": ("train/zdeep", "train/a/deep", None),
    "a class above another's real folder": ("train/zmore", "other", None),
    "a class to the other split": ("train/zval", "val", None),
    "the other split": ("train/b/leak", "val", None),
    "a class of the other split": ("train/b/leak", "val/b", None),
    "the class itself": ("train/b/leak", "train/b", None),
    "another class": ("train/b/leak", "train/a", None),
    "all classes": ("train/b/leak", "train", None),
    "above another's real folder": ("train/b/leak", "other", None),
    "the data": ("train/b/leak", ".", None),
    "everything": ("train/b/leak", "/", None),
    "a new class": ("train/z", "extra", [2, 1, 1, 1]),
    "a file": ("train/b/9.png", "extra/8.png", [2, 2, 1]),
    "more of a class": ("train/b/more", "extra", [2, 2, 1]),
    "hidden beside the classes": ("train/z", "train/.kept", [2, 1, 1, 1]),
}


@pytest.mark.parametrize("case", LINKED)
def test_no_link_gives_an_image_another_class_or_split(case, tmp_path):
    names = ("train/a/1.png", "train/a/deep/2.png", "train/b/3.png", "train/.kept/4.png", "val/a/5.png", "val/b/6.png",
             "other/c/7.png", "extra/8.png")  # fmt: skip
    for name in names:
        write(tmp_path / name, png(1))
    (tmp_path / "train/c").symlink_to(tmp_path / "other/c")
    link, target, counts = LINKED[case]
    (tmp_path / link).symlink_to(tmp_path / target)
    source = open_source(str(tmp_path), "train")
    found = Counter(label for _, label in contents(source))
    assert [found[label] for label in range(len(source.classes))] == (counts or [2, 1, 1])
    kind, name = "link to a folder of these", Path(link).name
    refused = kind if "/b/" in link else f"class {name} ({kind})"
    assert source.ignored == ({} if counts else {refused: 1})


def test_a_folder_linked_from_two_classes_is_of_the_first(tmp_path):
    for name in ("train/a/1.png", "train/b/2.png", "extra/deep/3.png"):
        write(tmp_path / name, png(1))
    for link, target in (("a/y", "extra"), ("b/x", "extra/deep"), ("z", "extra")):
        (tmp_path / "train" / link).symlink_to(tmp_path / target)
    source = open_source(str(tmp_path), "train")
    # A class that is a link comes before links inside of classes.
    assert source.classes == ["a", "b", "z"] and [label for _, label in contents(source)] == [0, 1, 2]
    assert source.ignored == {"link to a folder of these": 2}


@pytest.mark.parametrize("links", [["val"], ["val/a", "val/b"]])
def test_a_split_may_be_the_other_one(links, tmp_path):
    """By a link: to try things out, the training images serve as those of validation."""
    for name in ("a/1.png", "b/2.png"):
        write(tmp_path / "train" / name, png(1))
    for link in links:
        (tmp_path / link).parent.mkdir(exist_ok=True)
        (tmp_path / link).symlink_to(tmp_path / link.replace("val", "train"))
    for split in ("train", "val"):
        source = open_source(str(tmp_path), split)
        assert (source.classes, len(source), source.ignored) == (["a", "b"], 2, {})


# Both splits


def test_splits_need_the_same_classes():
    def fake(split, classes, size=1):
        return type("Fake", (Source,), {"__len__": lambda self: size, "read": None})("fake", split, classes)

    for train, val, message in (
        (["n01440764", "n01443537"], ["n01443537"], "class 'n01440764' is in train but not in val"),
        (["a"], ["a", "x"], "class 'x' is in val but not in train"),
        (["a", "b"], ["b", "a"], "same order"),
    ):
        with pytest.raises(UserError, match=message):
            check_classes(fake("train", train), fake("val", val))
    thousand = [str(number) for number in range(1000)]
    assert check_classes(fake("train", thousand, 1_281_167), fake("val", thousand, 50_000)) == []
    (warning,) = check_classes(fake("train", thousand, 1_281_167), fake("val", thousand, 49_999))
    assert "49,999" in warning and "50,000" in warning
