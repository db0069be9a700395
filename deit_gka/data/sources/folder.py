"""A folder with a subfolder of images for every class.

torchvision's and timm's listings follow links in circles, take hidden files for images, and keep a list of paths that
is copied into every worker: 67 MB for ImageNet. timm's also numbers classes in another order.
"""

import os
from pathlib import Path

import numpy as np
import torch

from deit_gka.data.sources.base import EXTENSIONS, Names, Record, Source, is_image, listing, tracked
from trainkit.cli import UserError


class Folder(Source):
    """`folder`/<class>/**/*: a class per subfolder, numbered in sorted order as torchvision does.

    Raises UserError if the folder, or a class in it, lacks images.
    """

    def __init__(self, name: str, split: str, folder: Path):
        super().__init__(name, split, class_folders(folder))
        loose = [entry.name for entry in os.scandir(folder) if not entry.name.startswith(".") and not entry.is_dir()]
        if not self.classes and any(is_image(file) for file in loose):
            flat = f"{folder} has images but no class folders (as ImageNet's val comes)"
            raise UserError(f"{flat}; sort them into {folder.name}/<class>/ as in train/")
        paths, counts, self.ignored = [], [], len(loose)
        for number in tracked(range(len(self.classes)), f"{split}: listing images"):
            images, others = _images_under(str(folder / self.classes[number]))
            paths += [path[len(str(folder)) + 1 :] for path in sorted(images)]
            counts.append(len(images))
            self.ignored += others
        if not paths:
            wanted = f"<class>/*{{{','.join(sorted(EXTENSIONS))}}}"
            raise UserError(f"no images in {folder}; it needs {wanted}, it has: {listing(folder)}")
        if 0 in counts:
            empty = folder / self.classes[counts.index(0)]
            raise UserError(f"class folder {empty} has no images; add some, or remove it from train and val")
        self._folder, self._paths = str(folder), Names(paths)
        self._labels = torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts))

    def __len__(self) -> int:
        return len(self._labels)

    def index(self) -> list[torch.Tensor]:
        return [*self._paths.tensors, self._labels]

    def read(self, index: int) -> Record:
        path = os.path.join(self._folder, self._paths[index])
        with open(path, "rb") as file:
            return file.read(), int(self._labels[index]), path


def class_folders(folder: Path) -> list[str]:
    """The names of the classes, sorted."""
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
                if os.path.realpath(entry.path) not in above:  # a link to a folder above would never end
                    inner = _images_under(entry.path, above)
                    images, others = images + inner[0], others + inner[1]
            elif is_image(entry.name):
                images.append(entry.path)
            else:
                others += 1
    return images, others
