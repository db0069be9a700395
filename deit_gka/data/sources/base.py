"""Base of all kinds of data: the interface, the flags that choose a part, names and listings of files."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image

from trainkit_gka.cli import Group, MayChange, UserError, flag_of
from trainkit_gka.progress import progress_bar

Record = tuple[bytes | Image.Image, int, str]  # encoded or decoded image, label, a name for reports
MAX_CLASSES = 1_000_000  # a larger label is a mistake
FOLDERS: dict[str, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "valid", "eval")}


class ImageSource(ABC):
    """Labelled images by index; can be pickled. `ignored` counts the files or members that are not used, by kind."""

    def __init__(self, name: str, split: str, classes: list[str]):
        self.name, self.split, self.classes = name, split, classes
        self.ignored: Counter[str] = Counter()

    @abstractmethod
    def __len__(self) -> int: ...

    def index(self) -> list[torch.Tensor]:
        """The list of images as tensors, where there is one."""
        return []

    @abstractmethod
    def read(self, index: int) -> Record:
        """The image of `index`, from 0. Raises OSError if the file is gone or cut short."""


@dataclass(frozen=True)
class DataParts:
    """Names within the data; empty ones are found where there is no choice. All but the first are timm's flags."""

    data_config: MayChange[Annotated[str, Group.DATA]] = ""
    """The configuration of a Hugging Face dataset that has several."""
    train_split: MayChange[Annotated[str, Group.DATA]] = ""
    """The training images: a split of a Hugging Face dataset, such as train[:90%], or a folder. Empty = train."""
    val_split: MayChange[Annotated[str, Group.DATA]] = ""
    """The validation images, such as test. Empty = validation, val or valid."""
    input_key: MayChange[Annotated[str, Group.DATA]] = ""
    """The column of the images, or the suffix of their members in tars: left.jpg, or "jpg;png" for either."""
    target_key: MayChange[Annotated[str, Group.DATA]] = ""
    """The column of the labels, or the suffix of their members in tars, such as cls."""

    def split_names(self, split: str, usual: tuple[str, ...]) -> tuple[str, ...]:
        """The names that the split "train" or "val" may have."""
        name = self.train_split if split == "train" else self.val_split
        return (name,) if name else usual

    def given_parts(self) -> dict[str, str]:
        """The names that are not empty, by field."""
        return {name: value for name in ALL_PARTS if (value := getattr(self, name))}

    def refuse(self, data: str, *names: str) -> None:
        """Raises UserError if one of these fields is not empty: `data` has no such part."""
        for name in self.given_parts():
            if name in names:
                raise UserError(f"{data} has nothing that {flag_of(name)} could choose; leave it out")


NONE = DataParts()
ALL_PARTS = tuple(field.name for field in fields(DataParts))


def check_parts(parts: DataParts, saved: dict[str, str], folder: Path) -> None:
    """Raises UserError that names the first flag whose value differs from that of the run in `folder`."""
    for name in ALL_PARTS:
        value = getattr(parts, name) or "none"
        before = saved.get(name) or "none"
        if value != before:
            raise UserError(f"{flag_of(name)} is {value} but the run in {folder} has {before}; use its value")


def list_hash(images) -> str:
    """Hash of the list of images of a source or stream, not of their content."""
    digest = hashlib.sha256("\0".join([*images.classes, str(len(images))]).encode())
    for part in images.index() if isinstance(images, ImageSource) else ():
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


class Names(Sequence):
    """Many strings in two tensors, which worker processes share; a list would be copied into every worker."""

    def __init__(self, names: Iterable[str]):
        encoded = [os.fsencode(name) for name in names]
        text = torch.from_numpy(np.frombuffer(b"".join(encoded), np.uint8).copy())
        self.tensors = [text, torch.from_numpy(np.cumsum([0, *map(len, encoded)], dtype=np.int64))]

    def __len__(self) -> int:
        return len(self.tensors[1]) - 1

    def __getitem__(self, index: int) -> str:
        text, ends = self.tensors
        return os.fsdecode(text[ends[index] : ends[index + 1]].numpy().tobytes())


def ignored_text(source: ImageSource) -> str:
    """How many files of each kind are not used; empty if all are."""
    if not source.ignored:
        return ""
    most, rest = source.ignored.most_common(6), len(source.ignored) - 6
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in most) + (f", {rest} kinds more" if rest > 0 else "")
    heic = "; convert .heic, as to JPEG, to use them" if {".heic", ".heif"} & source.ignored.keys() else ""
    return f"{source.split}: not used: {kinds}{heic}"


def listing(folder: Path) -> str:
    """The names in a folder, shortened."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in os.scandir(folder) if not entry.name.startswith("."))
    return ", ".join(names[:6]) + (f" and {len(names) - 6:,} more" if len(names) > 6 else "") or "nothing"


def tracked(items: Sequence, description: str) -> Iterator:
    """`items`, with a progress bar on rank 0 if there are many."""
    if len(items) <= 16 or os.environ.get("RANK", "0") != "0":
        yield from items
        return
    with progress_bar() as bar:
        yield from bar.track(items, task_id=bar.add_task(description, total=len(items), status=""))
