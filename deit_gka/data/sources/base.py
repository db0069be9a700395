"""Base of all kinds of data: the interface, names and listings of files."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

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


def list_hash(images) -> str:
    """Hash of the list of images of a source or stream, not of their content."""
    digest = hashlib.sha256("\0".join([*images.classes, str(len(images))]).encode())
    for part in images.index() if isinstance(images, ImageSource) else ():
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


class Names(Sequence):
    """Many strings in two tensors, which worker processes share; a list would be copied into every worker."""

    def __init__(self, names: Iterable[str] = (), tensors: Sequence[torch.Tensor] = ()):
        """tensors: those of another one, in place of names."""
        if not tensors:
            encoded = [os.fsencode(name) for name in names]
            text = torch.from_numpy(np.frombuffer(b"".join(encoded), np.uint8).copy())
            tensors = text, torch.from_numpy(np.cumsum([0, *map(len, encoded)], dtype=np.int64))
        self.tensors = list(tensors)

    def __len__(self) -> int:
        return len(self.tensors[1]) - 1

    def __getitem__(self, index: int) -> str:
        text, ends = self.tensors
        return os.fsdecode(text[ends[index] : ends[index + 1]].numpy().tobytes())


def packed(names: Iterable[str], unused: Counter[str], **numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """A list of images as tensors: their names, the counts of what is not used, and `numbers`."""
    (text, ends), (kinds_text, kinds_ends) = Names(names).tensors, Names(unused).tensors
    counts = torch.tensor(list(unused.values()), dtype=torch.int64)
    return {"text": text, "ends": ends, "kinds.text": kinds_text, "kinds.ends": kinds_ends, "kinds": counts, **numbers}


def unpacked(tensors: dict[str, torch.Tensor]) -> tuple[Names, Counter[str]]:
    """The names and the counts in a list that `packed` made."""
    kinds = Names(tensors=(tensors["kinds.text"], tensors["kinds.ends"]))
    return Names(tensors=(tensors["text"], tensors["ends"])), Counter(dict(zip(kinds, tensors["kinds"].tolist())))


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
