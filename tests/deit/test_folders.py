"""Images of digits and of folders, and what both splits must agree on; mistakes are one line."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from deit_gka.data.sources import DataParts, ImageSource, check_classes, decode, located, open_source
from image_files import contents, error, png, write
from tiny_vision import encoded
from trainkit_gka.cli import UserError

# Digits


def test_digits_are_split_by_class_and_scaled_to_255():
    train, val = open_source("digits", "train"), open_source("digits", "val")
    assert (len(train), len(val), train.classes) == (1198, 599, [str(digit) for digit in range(10)])
    assert len({source.read(index)[2] for source in (train, val) for index in range(len(source))}) == 1797
    counts = [Counter(source.read(index)[1] for index in range(len(source))) for source in (train, val)]
    assert all(abs(counts[0][digit] - 2 * counts[1][digit]) <= 2 for digit in range(10))

    digits, (image, label, name) = load_digits(), val.read(5)
    place = int(name.removeprefix("digits/"))
    assert label == digits.target[place]
    np.testing.assert_allclose(np.asarray(decode(image))[..., 1], digits.images[place] * 255 / 16, atol=0.5)


# Folders


@pytest.fixture
def folder(tmp_path) -> Path:
    def red(value, form, **options):
        return encoded(Image.new("RGB", (4, 4), (value, 0, 0)), form, **options)

    write(tmp_path / "train/b_dog/2.JPEG", png(2))  # the content decides, not the name
    write(tmp_path / "train/b_dog/1.png", png(1))
    write(tmp_path / "train/b_dog/deep/er/0.WebP", red(0, "WEBP", lossless=True))
    write(tmp_path / "train/a_cat/7.tiff", red(7, "TIFF"))
    for other in ("notes.txt", "1.heic", "2.HEIC", "README"):
        write(tmp_path / "train/a_cat" / other, b"not an image")
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
    assert (train.ignored, val.ignored) == ({".txt": 1, ".heic": 2, "without an extension": 1}, {})
    reference = ImageFolder(str(folder / "validation"))
    assert val.classes == reference.classes
    assert [(val.read(i)[2], val.read(i)[1]) for i in range(len(val))] == reference.samples


def test_names_of_data_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for form in ("", "wds:", "hf:", "hf-stream:"):
        assert located(f"{form}here") == located(f"{form}./here") == f"{form}{tmp_path}/here"
    for name in ("digits", "hf:ILSVRC/imagenet-1k", "hf-stream:ILSVRC/imagenet-1k", "hf:", "nowhere"):
        assert located(name) == name


def test_mistakes_about_folders(folder, tmp_path_factory):
    assert all(form in error("/no/such/place") for form in ("train/", "hf:", "hf-stream:", "wds:", "digits"))
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


# Links

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


# Both splits


@pytest.mark.parametrize("train, val, message", [
    (["n01440764", "n01443537"], ["n01443537"], "class 'n01440764' is in train but not in val"),
    (["a"], ["a", "x"], "class 'x' is in val but not in train"),
    (["a", "b"], ["b", "a"], "same order"),
])  # fmt: skip
def test_splits_need_the_same_classes(train, val, message):
    class Fake(ImageSource):
        __len__ = read = None

    with pytest.raises(UserError, match=message):
        check_classes(Fake("fake", "train", train), Fake("fake", "val", val))
