"""Sources of images. `open_source` makes an `ImageSource` (random access) or an `ImageStream` of a string.

    DIR              a folder with train/<class>/*.jpg and val/<class>/*.jpg, or with webdataset tars
    wds:DIR          webdataset tars: DIR/*train*.tar and DIR/*val*.tar, or DIR/train/*.tar and DIR/val/*.tar
    hf:NAME          a Hugging Face dataset with images and labels, from the hub or a local folder; a folder of parquet
                     files needs no hf:
    hf-stream:NAME   the same, read while training and never stored
    digits           scikit-learn's 1,797 digits of 8x8 pixels; no network
    cifar10          a folder of that name, else the hub's; its test images are val

Images stay encoded until `decode` makes them RGB, in the worker processes.
"""

import os
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from deit_gka.data.sources.base import ALL_PARTS, FOLDERS, NONE, DataParts, ImageSource, Record, listing
from deit_gka.data.sources.classes import check_classes as check_classes
from deit_gka.data.sources.decode import BrokenImage as BrokenImage
from deit_gka.data.sources.decode import decode as decode
from deit_gka.data.sources.folder import Folder, class_folders
from deit_gka.data.sources.hub import CIFAR10, Hub, ImageStream
from deit_gka.data.sources.tars import Tars, shards_of
from trainkit_gka import extras
from trainkit_gka.cli import UserError

FORMS = "a folder with train/<class>/ and val/<class>/, wds:FOLDER, hf:NAME, hf-stream:NAME, digits or cifar10"
HUB_CIFAR10 = "uoft-cs/cifar10"


def open_source(data: str, split: Literal["train", "val"], parts: DataParts = NONE) -> ImageSource | ImageStream:
    """The `split` of the data called `data`. Raises UserError if there is none, or it cannot serve."""
    form, _, rest = data.partition(":")
    if data == "digits":
        parts.refuse(data, *ALL_PARTS)
        return Digits(split)
    if form in ("hf", "hf-stream") and rest:
        return (Hub if form == "hf" else ImageStream)(data, split, rest, parts)
    root = Path(os.path.expanduser(rest if form == "wds" else data)).absolute()
    if data == CIFAR10 and not root.is_dir():
        return Hub(data, split, HUB_CIFAR10, parts)
    if not root.is_dir():
        raise UserError(f"{data} {'is not a folder' if root.exists() else 'does not exist'}; data is {FORMS}")
    names = parts.split_names(split, FOLDERS[split])
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    shards = shards_of(root, names, (parts.train_split, parts.val_split))
    if shards and (form == "wds" or folder is None or not class_folders(folder)):
        parts.refuse(data, "data_config")
        return Tars(data, split, root, shards, parts)
    if form != "wds" and folder is None and any(next(root.glob(name), None) for name in ("*.parquet", "*/*.parquet")):
        return Hub(data, split, str(root), parts)
    if form == "wds" or folder is None:
        tars = f".tar files with {names[0]} in their names, nor in {names[0]}/"
        missing = f"{tars if form == 'wds' else f'{names[0]}/ folder'} (or name another by --{split}-split)"
        raise UserError(f"{root} has no {missing}; it has: {listing(root)}. Data is {FORMS}")
    parts.refuse(data, "data_config", "input_key", "target_key")
    splits = {parts.train_split, parts.val_split, *FOLDERS["train"], *FOLDERS["val"]} - {""}
    return Folder(data, split, folder, [root / name for name in splits if (root / name).is_dir()])


class Digits(ImageSource):
    """scikit-learn's handwritten digits. A third of them is `val`, every class alike, always the same ones."""

    def __init__(self, split: str):
        if reason := extras.missing("vision", "sklearn"):
            raise UserError(f"digits: {reason}")
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        parts = train_test_split(np.arange(len(digits.target)), test_size=1 / 3, random_state=0, stratify=digits.target)
        super().__init__("digits", split, [str(digit) for digit in range(10)])
        self._places = parts[split == "val"]
        images = np.rint(digits.images * 255 / 16).astype(np.uint8)
        self._images = images[self._places]
        self._labels = digits.target[self._places]

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int) -> Record:
        return Image.fromarray(self._images[index]), int(self._labels[index]), f"digits/{self._places[index]}"


def located(data: str) -> str:
    """`data` with an absolute path, so that it names the same images from any folder."""
    form, colon, rest = data.partition(":")
    prefix, name = (form + colon, rest) if form in ("wds", "hf", "hf-stream") else ("", data)
    folder = Path(os.path.expanduser(name))
    return data if data == "digits" or not name or not folder.is_dir() else f"{prefix}{folder.absolute()}"
