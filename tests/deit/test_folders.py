"""Images of digits and of folders, and what both splits must agree on; mistakes are one line."""

import os
import pickle
import shutil
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


def test_digits_are_split_by_class():
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


def test_digits_are_scaled_to_255():
    from sklearn.datasets import load_digits

    digits, source = load_digits(), open_source("digits", "val")
    image, label, name = source.read(5)
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
    assert (train.ignored, val.ignored, train.split, train.name) == ({".txt": 1}, {}, "train", str(folder))
    assert check_classes(train, val) == ["train: not used: 1 .txt"]


def test_folder_has_torchvisions_order(folder):
    from torchvision.datasets import ImageFolder

    reference, source = ImageFolder(str(folder / "validation")), open_source(str(folder), "val")
    assert source.classes == reference.classes
    assert [(source.read(i)[2], source.read(i)[1]) for i in range(len(source))] == reference.samples


def test_folder_follows_links_without_circles(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere")
    write(other / "x.png", png(50))
    (folder / "train/c_linked").symlink_to(other)
    (folder / "train/a_cat/up").symlink_to(folder / "train/a_cat")
    (folder / "train/a_cat/0.png").symlink_to(other / "x.png")
    source = open_source(str(folder), "train")
    assert source.classes == ["a_cat", "b_dog", "c_linked"] and len(source) == 6
    assert [value_of(source.read(i)) for i in range(6) if source.read(i)[1] != 1] == [50, 7, 50]


def test_folder_survives_chdir_and_pickling(folder, monkeypatch):
    odd = os.fsdecode(b"caf\xe9 \xc3\xa9\n.png")
    write(folder / "train/a_cat" / odd, png(60))
    monkeypatch.chdir(folder.parent)
    source = open_source(folder.name, "train")
    monkeypatch.chdir("/")
    again = pickle.loads(pickle.dumps(source))
    assert sorted(value_of(again.read(i)) for i in range(len(again))) == [0, 1, 2, 7, 60]


def test_empty_and_vanished_files_fail_when_read(folder):
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


def test_flat_validation_folder_is_refused(folder):
    write(folder / "val/ILSVRC2012_val_00000001.JPEG", png(1))
    message = error(folder, "val")
    assert "class folders" in message and "val/<class>/" in message


def test_content_decides_the_format(folder):
    write(folder / "train/a_cat/n02105855_2933.JPEG", png(42))
    source = open_source(str(folder), "train")
    assert 42 in [value_of(source.read(i)) for i in range(len(source))]


def test_names_of_data_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for form in ("", "wds:", "hf:", "hf-stream:"):
        assert located(f"{form}here") == located(f"{form}./here") == f"{form}{tmp_path}/here"
    for name in ("digits", "hf:ILSVRC/imagenet-1k", "hf-stream:ILSVRC/imagenet-1k", "hf:", "nowhere"):
        assert located(name) == name


def fake(split, classes, size=1):
    return type("Fake", (Source,), {"__len__": lambda self: size, "read": None})("fake", split, classes)


def test_splits_need_the_same_classes():
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


def test_every_kind_of_image_is_read_and_others_are_named(tmp_path):
    rgb = Image.new("RGB", (4, 4), (200, 0, 0))
    kinds = {"jfif": "JPEG", "jpe": "JPEG", "JPG": "JPEG", "avif": "AVIF", "WebP": "WEBP", "pnm": "PPM", "apng": "PNG"}
    kinds = {end: form for end, form in kinds.items() if form in FORMATS}  # an older Pillow has no AVIF
    for end, form in kinds.items():
        write(tmp_path / f"train/a/x.{end}", encoded(rgb, form))
    for name in ("1.heic", "2.HEIC", "Thumbs.db", "README", "depth.pfm", ".DS_Store", "._x.jpg"):
        write(tmp_path / "train/a" / name, b"?")
    write(tmp_path / "train/notes.txt")
    source = open_source(str(tmp_path), "train")
    assert sorted(source.read(index)[2].rpartition(".")[2] for index in range(len(source))) == sorted(kinds)
    assert all(abs(value_of(source.read(index)) - 200) < 5 for index in range(len(source)))
    assert source.ignored == {".heic": 2, ".db": 1, ".pfm": 1, "without an extension": 1, ".txt": 1}
    assert ignored_text(source).startswith("train: not used: 2 .heic, ") and "convert .heic" in ignored_text(source)
    shutil.rmtree(tmp_path / "train/a")
    write(tmp_path / "train/a/1.heic")
    write(tmp_path / "train/b/1.png", png(1))
    assert "train/a has no images" in error(tmp_path) and "It has: 1.heic" in error(tmp_path)


LINKS = {"the class": "train/a", "all classes": "train", "the data": ".", "everything": "/", "another class": "train/b"}


@pytest.mark.parametrize("target", LINKS)
def test_no_link_gives_an_image_another_label(target, tmp_path):
    for name, value in (("a/1.png", 1), ("a/deep/2.png", 2), ("b/3.png", 3)):
        write(tmp_path / "data/train" / name, png(value))
    write(tmp_path / "other/x/4.png", png(4))
    (tmp_path / "other/x/up").symlink_to(tmp_path / "other")  # above the class's real folder
    write(tmp_path / "other/5.png", png(5))
    (tmp_path / "data/train/c").symlink_to(tmp_path / "other/x")
    write(tmp_path / "more/6.png", png(6))
    (tmp_path / "data/train/b/more").symlink_to(tmp_path / "more")
    (tmp_path / "data/train/a/deep/link").symlink_to(tmp_path / "data" / LINKS[target])
    source = open_source(str(tmp_path / "data"), "train")
    images = [(value_of(source.read(index)), source.read(index)[1]) for index in range(len(source))]
    assert images == [(1, 0), (2, 0), (3, 1), (6, 1), (4, 2)]
    assert source.ignored == {"link to a folder of these": 2}


LINKED = {  # link: its target, and how many images of each class there are with it
    "a class to all classes": ("train/all", "train", None),
    "a class to another": ("train/zcopy", "train/a", None),
    "a class into another": ("train/zdeep", "train/a/deep", None),
    "a class above another's real folder": ("train/zmore", "other", None),
    "a class to the other split": ("train/zval", "val", None),
    "the other split": ("train/b/leak", "val", None),
    "a class of the other split": ("train/b/leak", "val/b", None),
    "a new class": ("train/z", "extra", [2, 1, 1, 1]),
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
    found = Counter(source.read(index)[1] for index in range(len(source)))
    assert [found[label] for label in range(len(source.classes))] == (counts or [2, 1, 1])
    kind, name = "link to a folder of these", Path(link).name
    refused = kind if "/b/" in link else f"class {name} ({kind})"
    assert source.ignored == ({} if counts else {refused: 1})
    assert ignored_text(source) == ("" if counts else f"train: not used: 1 {refused}")


def test_a_folder_linked_from_two_classes_is_of_the_first(tmp_path):
    for name in ("train/a/1.png", "train/b/2.png", "train/c/3.png", "extra/deep/4.png"):
        write(tmp_path / name, png(1))
    for link, target in (("c/x", "extra/deep"), ("b/x", "extra"), ("b/y", "extra/deep"), ("y", "extra")):
        (tmp_path / "train" / link).symlink_to(tmp_path / target)
    (tmp_path / "train/z").symlink_to(tmp_path / "extra")
    source = open_source(str(tmp_path), "train")
    assert source.classes == ["a", "b", "c", "y"]
    assert [source.read(index)[2].removeprefix(f"{tmp_path}/train/") for index in range(len(source))] == [
        "a/1.png", "b/2.png", "c/3.png", "y/deep/4.png"]  # fmt: skip
    assert source.ignored == {"link to a folder of these": 3, "class z (link to a folder of these)": 1}
    for link in ("y", "z"):
        (tmp_path / "train" / link).unlink()
    assert len(open_source(str(tmp_path), "train")) == 4 and open_source(str(tmp_path), "train").read(2)[1] == 1


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


def test_splits_of_a_folder_may_have_any_name(folder):
    (folder / "validation").rename(folder / "test")
    assert "no val/ folder (or name another by --val-split); it has: test/, train/" in error(folder, "val")
    assert len(open_source(str(folder), "val", DataParts(val_split="test"))) == 2
    assert "nothing that --target-key could choose" in error(folder, target_key="label")
    assert "nothing that --val-split could choose" in error("digits", val_split="test")
