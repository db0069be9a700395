"""webdataset tars, read in place by random access.

timm reads such tars as a stream through the webdataset package, and other tars with their folders as classes. Neither
gives an image and its label in KEY.cls by index, which every image's own seed needs, and neither notices a tar that is
cut short.
"""

import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import torch

from deit_gka.data.sources.base import EXTENSIONS, FOLDERS, Names, Record, Source, is_image, tracked
from deit_gka.data.sources.kept import Note, Tensors, kept
from trainkit.cli import UserError, reason_of

SHARD_WORD = re.compile("(?<![a-z])(train|val|eval)")  # starts a word, so "retrieval-train-0.tar" is training data
MAX_OPEN = 64  # shards per process
MAX_CLASSES = 1_000_000  # a larger label is a mistake


class Tars(Source):
    """webdataset shards: KEY.jpg beside KEY.cls (an integer) or KEY.json (with "label" or "cls"). Nothing is extracted.

    Raises UserError if images or labels are missing, and for a damaged tar.
    """

    def __init__(self, name: str, split: str, root: Path, shards: list[Path]):
        self._shards, self._files = [str(shard) for shard in shards], {}
        key = ("tars", *self._shards, *sorted(EXTENSIONS))
        tensors = kept(key, lambda note: _read(self._shards, f"{split}: listing tars", note))
        self._names, self._rows = Names.of(tensors["text"], tensors["ends"]), tensors["rows"]
        if not len(self._names):
            files = f"the {len(shards)} {split} tar files of {root}"
            raise UserError(f"no images in {files}; they need members KEY.jpg and KEY.cls")
        count = int(self._rows[:, 3].max()) + 1
        super().__init__(name, split, _class_names(root / "classes.txt", count, split))

    def __getstate__(self):
        return {**self.__dict__, "_files": {}}

    def __len__(self) -> int:
        return len(self._rows)

    def index(self) -> list[torch.Tensor]:
        return [*self._names.tensors, self._rows[:, 1:]]

    def read(self, index: int) -> Record:
        shard, offset, size, label = self._rows[index].tolist()
        file = self._files.get(shard)
        if file is None:
            if len(self._files) >= MAX_OPEN:
                del self._files[next(iter(self._files))]
            file = open(self._shards[shard], "rb", buffering=0)  # noqa: SIM115 (kept for the next image)
            self._files[shard] = file
        data = os.pread(file.fileno(), size, offset)
        if len(data) != size:
            raise OSError(f"{self._shards[shard]} has become shorter")
        return data, label, self._names[index]


def shards_of(root: Path, split: str) -> list[Path]:
    """The tars of a split: those in its folder, or else those in `root` with its word in their names."""
    tars = [path for folder in FOLDERS[split] for path in sorted((root / folder).glob("*.tar"))]
    words = FOLDERS[split] if split == "val" else ("train",)
    for path in [] if tars else sorted(root.glob("*.tar")):
        word = SHARD_WORD.search(path.name.lower())
        if word and word[1] in words:
            tars.append(path)
    return [path for path in tars if not path.name.startswith(".")]


def _class_names(file: Path, count: int, split: str) -> list[str]:
    """The lines of `file`, or numbers if it is missing."""
    if not file.exists():
        return [str(label) for label in range(count)]
    try:
        classes = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text") from None
    if count > len(classes):
        last = f"{split} has an image of class {count - 1} (counted from 0)"
        raise UserError(f"{file} has {len(classes)} lines, but {last}")
    return classes


def _read(shards: list[str], description: str, note: Note) -> Tensors:
    """SHARD:KEY of every image, and rows of (shard, offset, size, label)."""
    keys, rows = [], [np.empty((0, 4), np.int64)]
    for number in tracked(range(len(shards)), description):
        note(shards[number])
        images = _index(shards[number])
        keys += [f"{os.path.basename(shards[number])}:{key}" for key, *_ in images]
        rows.append(np.array([(number, *row) for _, *row in images], np.int64).reshape(-1, 4))
    text, ends = Names(keys).tensors
    return {"text": text, "ends": ends, "rows": torch.from_numpy(np.concatenate(rows))}


def _index(path: str) -> list[tuple[str, int, int, int]]:
    """(key, offset, size, label) of every image in a tar. Raises UserError naming the file."""
    images, notes = [], {}
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                key, extension = os.path.splitext(member.name)
                if member.isreg() and not member.issparse() and not os.path.basename(key).startswith("."):
                    if is_image(member.name):
                        images.append((key, member.offset_data, member.size))
                    elif extension in (".cls", ".json"):
                        notes[key + extension] = (member.size, member.offset_data)
            file.seek(tar.offset)
            # tarfile stops at damage without an error; a whole archive ends with a block of zeros.
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise tarfile.ReadError(f"damaged or cut short at byte {tar.offset:,}")
            return [(*image, _label(path, image[0], file.fileno(), notes)) for image in images]
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable tar file ({reason_of(error)}); fetch it again") from None


def _label(path: str, key: str, file: int, notes: dict[str, tuple[int, int]]) -> int:
    """The label in KEY.cls or KEY.json; notes: (size, offset) of the members that hold labels."""
    try:
        if f"{key}.cls" in notes:
            label = int(os.pread(file, *notes[f"{key}.cls"]))
        else:
            note = json.loads(os.pread(file, *notes[f"{key}.json"]))
            label = int(note["label"] if "label" in note else note["cls"])
        if 0 <= label < MAX_CLASSES:
            return label
    except (KeyError, TypeError, ValueError):
        pass
    beside = f'{key}.cls, an integer from 0 to {MAX_CLASSES - 1}, or {key}.json with "label"'
    one_class = "tars without labels, one per class, have to be unpacked into train/<class>/"
    raise UserError(f"{path}: image {key} has no label; beside it must be {beside} ({one_class})")
