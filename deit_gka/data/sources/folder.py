"""Images that are there: scikit-learn's digits, and a folder with a subfolder for every class."""

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from deit_gka.data.sources.base import EXTENSIONS, Names, Record, Source, is_image, listing, tracked
from trainkit.cli import UserError


class Digits(Source):
    """A third of the digits is `val`, every class alike, always the same ones."""

    def __init__(self, split: str):
        try:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split
        except ImportError:
            raise UserError("digits come with scikit-learn: pip install scikit-learn") from None
        digits = load_digits()
        parts = train_test_split(np.arange(len(digits.target)), test_size=1 / 3, random_state=0, stratify=digits.target)
        super().__init__("digits", split, [str(digit) for digit in range(10)])
        self._places = parts[split == "val"]
        self._images = np.rint(digits.images * 255 / 16).astype(np.uint8)[self._places]
        self._labels = digits.target[self._places]

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int) -> Record:
        return Image.fromarray(self._images[index]), int(self._labels[index]), f"digits/{self._places[index]}"


class Folder(Source):
    """`folder`/<class>/**/*: a class per subfolder, numbered in sorted order as torchvision does."""

    def __init__(self, name: str, split: str, folder: Path):
        super().__init__(name, split, class_folders(folder))
        loose = [entry.name for entry in os.scandir(folder) if not entry.name.startswith(".") and not entry.is_dir()]
        if not self.classes and any(is_image(file) for file in loose):
            raise UserError(
                f"{folder} has images but no class folders (as ImageNet's val comes); sort them into {folder.name}/<class>/ as in train/"
            )
        paths, counts, self.ignored = [], [], len(loose)
        for number in tracked(range(len(self.classes)), f"{split}: listing images"):
            images, others = _images_under(str(folder / self.classes[number]))
            paths += [path[len(str(folder)) + 1 :] for path in sorted(images)]
            counts.append(len(images))
            self.ignored += others
        if not paths:
            raise UserError(
                f"no images in {folder}; it needs <class>/*{{{','.join(sorted(EXTENSIONS))}}}, it has: {listing(folder)}"
            )
        if 0 in counts:
            raise UserError(
                f"class folder {folder / self.classes[counts.index(0)]} has no images; add some, or remove it from train and val"
            )
        self._folder, self._paths = str(folder), Names(paths)
        self._labels = torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts))

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int) -> Record:
        path = os.path.join(self._folder, self._paths[index])
        with open(path, "rb") as file:
            return file.read(), int(self._labels[index]), path


def class_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith(".") and entry.is_dir())


def _images_under(folder: str, above: tuple[str, ...] = ()) -> tuple[list[str], int]:
    """Paths of the images in `folder` and below, and the number of other files."""
    above = (*above, os.path.realpath(folder))
    images, others = [], 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if os.path.realpath(entry.path) not in above:  # a link back up would never end
                    inner = _images_under(entry.path, above)
                    images, others = images + inner[0], others + inner[1]
            elif is_image(entry.name):
                images.append(entry.path)
            else:
                others += 1
    return images, others
