"""Images of digits and of folders, and what both splits must agree on; mistakes are one line."""

import os
import pickle
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deit_gka.data.sources import BrokenImage, Source, check_classes, decode, located, open_source
from deit_gka.figures.subjects import photographs
from image_files import error, png, value_of, write
from tiny_vision import encoded
from trainkit.cli import UserError


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
    assert (train.ignored, val.ignored, train.split, train.name) == (1, 0, "train", str(folder))
    assert check_classes(train, val) == ["train: ignored files, without an image's extension: 1"]


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
