"""Images of digits and of folders, and what both splits must agree on; mistakes are one line."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import ImageFolder

from deit_gka.data.sources import DataParts, check_classes, decode, located, open_source
from image_files import contents, error, png, write
from tiny_vision import encoded
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


@pytest.fixture
def folder(tmp_path) -> Path:
    def red(value, form, **options):
        return encoded(Image.new("RGB", (4, 4), (value, 0, 0)), form, **options)

    files = {
        "train/b_dog/2.JPEG": png(2),  # the content decides, not the name
        "train/b_dog/1.png": png(1),
        "train/b_dog/deep/er/0.WebP": red(0, "WEBP", lossless=True),
        "train/a_cat/7.tiff": red(7, "TIFF"),
        "validation/a_cat/3.bmp": red(3, "BMP"),
        "validation/b_dog/4.ppm": red(4, "PPM"),
        **dict.fromkeys(("train/a_cat/.hidden.png", "train/a_cat/.cache/9.png", "train/.trash/9.png"), png(99)),
        **{f"train/a_cat/{name}": b"not an image" for name in ("notes.txt", "1.heic", "2.HEIC", "README")},
    }
    for name, content in files.items():
        write(tmp_path / name, content)
    return tmp_path


def test_folder(folder):
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
