"""A folder with a subfolder of images for every class.

torchvision's and timm's listings follow links in circles, take hidden files for images, and keep a list of paths that
is copied into every worker: 67 MB for ImageNet. timm's also numbers classes in another order.
"""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from deit_gka.data.sources.base import ImageSource, Names, Record, listing, tracked
from deit_gka.data.sources.classes import in_order
from deit_gka.data.sources.decode import EXTENSIONS, is_image, is_system_folder
from trainkit_gka.cli import UserError

LINK = "link to a folder of these"


class Folder(ImageSource):
    """`folder`/<class>/**/*: a class per subfolder, in the order of `classes.in_order`.

    splits: the folders of all splits; below a class no link into them is followed. Raises UserError if the folder, or a
    class in it, lacks images.
    """

    def __init__(self, name: str, split: str, folder: Path, splits: Iterable[Path] = ()):
        is_link = class_folders(folder)
        links = Links([folder / name for name in is_link if not is_link[name]], above=[folder, *splits])
        names = [name for name in is_link if not is_link[name] or links.follow(folder / name)]
        links.add(folder, *splits)
        super().__init__(name, split, in_order(names))
        entries = [*os.scandir(folder)]
        loose = [entry.name for entry in entries if not entry.name.startswith(".") and not entry.is_dir()]
        if not self.classes and any(map(is_image, loose)):
            flat = f"{folder} has images but no class folders (as ImageNet's val comes)"
            raise UserError(f"{flat}; sort them into {folder.name}/<class>/ as in train/")
        paths, counts = [], []
        for name in tracked(names, f"{split}: listing images"):
            images = _images_under(str(folder / name), self.ignored, links)
            paths += [path[len(str(folder)) + 1 :] for path in sorted(images)]
            counts.append(len(images))
        self.ignored.update(map(kind_of, loose))
        self.ignored.update(f"{entry.name}/" for entry in entries if is_system_folder(entry.name) and entry.is_dir())
        self.ignored.update(f"class {name} ({LINK})" for name in sorted(is_link.keys() - set(names)))
        if not paths:
            wanted = f"<class>/*{{{','.join(sorted(EXTENSIONS))}}}"
            raise UserError(f"no images in {folder}; it needs {wanted}, it has: {listing(folder)}")
        for count, empty in zip(counts, names):
            if not count:
                todo = f"add some, or remove it from train and val. It has: {listing(folder / empty)}"
                raise UserError(f"class folder {folder / empty} has no images; {todo}")
        places = {name: place for place, name in enumerate(self.classes)}
        labels = torch.tensor([places[name] for name in names], dtype=torch.int32)
        self._folder, self._paths = str(folder), Names(paths)
        self._labels = labels.repeat_interleave(torch.tensor(counts))

    def __len__(self) -> int:
        return len(self._labels)

    def index(self) -> list[torch.Tensor]:
        return [*self._paths.tensors, self._labels]

    def read(self, index: int) -> Record:
        path = os.path.join(self._folder, self._paths[index])
        with open(path, "rb") as file:
            return file.read(), int(self._labels[index]), path


def class_folders(folder: Path) -> dict[str, bool]:
    """The names of the classes, and whether each is a link.

    They are sorted as text: the images are listed in this order, whatever their numbers.
    """
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    return {entry.name: entry.is_symlink() for entry in entries if not is_system_folder(entry.name) and entry.is_dir()}


def kind_of(name: str) -> str:
    """The kind under which an unused file is counted."""
    return os.path.splitext(name)[1].lower() or "without an extension"


class Links:
    """Decides which links to folders are followed: those whose images are not read by another path.

    folders: folders that are read; no link to one, below one or above one is followed. above: folders that links may
    lead below, but not to or above.
    """

    def __init__(self, folders: Iterable[Path], above: Iterable[Path]):
        self.folders: set[str] = set()
        self._above = {path for folder in above for path in _upwards(folder)}
        self.add(*folders)

    def add(self, *folders: str | Path) -> None:
        for folder in folders:
            real, *parents = _upwards(folder)
            self.folders.add(real)
            self._above.update((real, *parents))

    def follow(self, link: str | Path) -> bool:
        """Whether to follow a link; its target then is a folder that is read."""
        places = _upwards(link)
        if places[0] in self._above or not self.folders.isdisjoint(places):
            return False
        self.add(link)
        return True


def _upwards(folder: str | Path) -> list[str]:
    """The real path of a folder, and those of all folders above it."""
    path = Path(os.path.realpath(folder))
    return [str(path), *map(str, path.parents)]


def _images_under(folder: str, unused: Counter[str], links: Links) -> list[str]:
    """Paths of the images in `folder` and below. Counts other files, and folders of systems, in `unused`."""
    images, folders = [], []
    for entry in os.scandir(folder):
        if entry.is_dir():
            if is_system_folder(entry.name):
                unused[f"{entry.name}/"] += 1
            else:
                folders.append((entry.path, entry.is_symlink()))
        elif entry.name.startswith("."):
            continue
        elif is_image(entry.name):
            images.append(entry.path)
        else:
            unused[kind_of(entry.name)] += 1
    for path, is_link in sorted(folders):  # of two links to one folder, the first is followed
        if is_link and not links.follow(path):
            unused[LINK] += 1
        else:
            images += _images_under(path, unused, links)
    return images
