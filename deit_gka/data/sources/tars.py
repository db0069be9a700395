"""webdataset tars, read in place by random access.

timm reads such tars as a stream through the webdataset package, and other tars with their folders as classes. Neither
gives an image and its label in KEY.cls by index, which every image's own seed needs, and neither notices a tar that is
cut short.
"""

import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from deit_gka.data.sources.base import MAX_CLASSES, NONE, DataParts, ImageSource, Names, Record, tracked
from deit_gka.data.sources.decode import is_image, is_system_folder
from trainkit_gka.cli import UserError, reason_of

USUAL_WORDS = ("train", "val", "eval")  # the first that starts a word: "retrieval-train-0.tar" is training data
KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)  # webdataset's: the suffix begins at the name's first dot
LABELS = ("cls", "json")
MAX_OPEN = 64  # shards per process
Members = dict[str, tuple[int, int]]  # of one key: suffix -> (offset, size)


class Tars(ImageSource):
    """webdataset shards: KEY.jpg beside KEY.cls (an integer) or KEY.json (with "label" or "cls"). Nothing is extracted.

    Raises UserError if images or labels are missing, if a key has several images, and for a damaged tar.
    """

    def __init__(self, name: str, split: str, root: Path, shards: list[Path], parts: DataParts = NONE):
        self._shards, self._files = [str(shard) for shard in shards], {}
        keys, rows, ignored = [], [], Counter()
        for number in tracked(range(len(shards)), f"{split}: listing tars"):
            images = _index(self._shards[number], parts, ignored)
            keys += [f"{shards[number].name}:{key}" for key, *_ in images]
            rows.append(np.array([(number, *row) for _, *row in images], np.int64).reshape(-1, 4))
        if not keys:
            has = ", ".join(f"{count:,} {kind}" for kind, count in ignored.most_common(6)) or "none"
            needs = f"they need members KEY.{parts.input_key or 'jpg'} and KEY.{parts.target_key or 'cls'}"
            raise UserError(f"no images in the {len(shards)} {split} tar files of {root}; {needs}, they have: {has}")
        self._names, self._rows = Names(keys), torch.from_numpy(np.concatenate(rows))
        count = int(self._rows[:, 3].max()) + 1
        file = root / "classes.txt"
        try:
            classes = file.read_text(encoding="utf-8").splitlines() if file.exists() else list(map(str, range(count)))
        except UnicodeDecodeError:
            raise UserError(f"{file} is not UTF-8 text") from None
        if count > len(classes):
            raise UserError(f"{file} has {len(classes)} lines, but {split} has an image of class {count - 1}, from 0")
        super().__init__(name, split, classes)
        self.ignored = ignored

    def __getstate__(self):
        return {**self.__dict__, "_files": {}}

    def __len__(self) -> int:
        return len(self._rows)

    def index(self) -> list[torch.Tensor]:
        return [*self._names.tensors, self._rows[:, 1:]]

    def read(self, index: int) -> Record:
        shard, offset, size, label = self._rows[index].tolist()
        if shard not in self._files:
            if len(self._files) >= MAX_OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[shard] = open(self._shards[shard], "rb", buffering=0)  # noqa: SIM115 (kept for the next image)
        data = os.pread(self._files[shard].fileno(), size, offset)
        if len(data) != size:
            raise OSError(f"{self._shards[shard]} has become shorter")
        return data, label, self._names[index]


def shards_of(root: Path, names: tuple[str, ...], splits: Iterable[str] = ()) -> list[Path]:
    """The tars of a split: those in a folder of one of its `names`, else those in `root` whose names have one.

    splits: names that splits have besides the usual ones.
    """
    tars = [path for folder in names for path in sorted((root / folder).glob("*.tar"))]
    if not tars:
        words = sorted({*USUAL_WORDS, *names, *splits} - {""}, key=len, reverse=True)
        start = re.compile(f"(?<![a-z])({'|'.join(map(re.escape, words))})", re.IGNORECASE)
        wanted = {name.lower() for name in names}
        first_words = {path: start.search(path.name) for path in sorted(root.glob("*.tar"))}
        tars = [path for path, word in first_words.items() if word and word[1].lower() in wanted]
    return [path for path in tars if not path.name.startswith(".")]


def _index(path: str, parts: DataParts, unused: Counter[str]) -> list[tuple[str, int, int, int]]:
    """(key, offset, size, label) of every image in a tar, in its order. Raises UserError naming the file."""
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            samples = _samples(tar, unused)
            file.seek(tar.offset)
            # tarfile stops at damage without an error; a complete archive ends with a block of zeros.
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise tarfile.ReadError(f"damaged or cut short at byte {tar.offset:,}")
            images = []
            for key, members in samples.items():
                used = _images_of(f"{path}: {key}", key, members, parts)
                for name, image, label in used:
                    images.append((name, *members[image], _label(path, name, file.fileno(), label, members)))
                taken = {suffix for _, *both in used for suffix in both}
                unused.update(f".{suffix}" for suffix in members if suffix not in taken)
            return sorted(images, key=lambda image: image[1])
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable tar file ({reason_of(error)}); fetch it again") from None


def _samples(tar: tarfile.TarFile, unused: Counter[str]) -> dict[str, Members]:
    """The members of every key."""
    samples: dict[str, Members] = {}
    for member in tar:
        match = KEY.fullmatch(member.name)
        *folders, name = member.name.split("/")
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            unused["links"] += 1
        elif systems := list(filter(is_system_folder, folders)):
            unused[f"{systems[0]}/"] += 1
        elif name.startswith("."):
            unused["hidden"] += 1
        elif not match:
            unused["without an extension"] += 1
        elif (suffix := match[2].lower()) in (members := samples.setdefault(match[1], {})):
            unused[f".{suffix} once more"] += 1
        else:
            members[suffix] = (member.offset_data, member.size)
    return samples


def _suffixes(names: str) -> list[str]:
    """Those of a flag, as in "jpg;png": a key's member is the first that it has."""
    return [suffix for suffix in names.lower().split(";") if suffix]


def _images_of(where: str, key: str, members: Members, parts: DataParts) -> list[tuple[str, str, str]]:
    """(name, suffix of the image, suffix of its label) of a key: one image, that with the shortest suffix.

    Images of one key that have labels of their own (0.5.jpg and 0.5.cls) are images by themselves. Raises UserError for
    several without.
    """
    wanted, alone, shared = _suffixes(parts.input_key), [], []
    for image in [suffix for suffix in wanted if suffix in members][:1] if wanted else members:
        stem = image.rpartition(".")[0]
        label = next((f"{stem}.{kind}" for kind in LABELS if stem and f"{stem}.{kind}" in members), "")
        if wanted or is_image(f"{key}.{image}"):
            if label and not parts.target_key:
                alone.append((f"{key}.{stem}", image, label))
            else:
                shared.append(image)
    labels = _suffixes(parts.target_key) or LABELS
    label = next((kind for kind in labels if kind in members), labels[0])
    shared = [image for image in shared if "." not in image] or shared
    if alone and label not in members:
        return alone  # the rest belongs to these, such as masks
    if len(shared) > 1:
        raise UserError(f"{where} has {len(shared)} images, {', '.join(shared)}: choose, as by --input-key {shared[0]}")
    return alone + [(key, image, label) for image in shared]


def _label(path: str, key: str, file: int, suffix: str, members: Members) -> int:
    """The label in KEY.cls or KEY.json, whose suffix may be another."""
    try:
        offset, size = members[suffix]
        content = os.pread(file, size, offset)
        if suffix.rpartition(".")[2] == "json":
            note = json.loads(content)
            content = note["label"] if "label" in note else note["cls"]
            if isinstance(content, float) and not content.is_integer():  # such as Infinity
                raise ValueError
        label = int(content)
        if 0 <= label < MAX_CLASSES:
            return label
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    beside = f'{key}.cls, an integer from 0 to {MAX_CLASSES - 1}, or {key}.json with "label"'
    one_class = "tars without labels, one per class, have to be unpacked into train/<class>/"
    raise UserError(f"{path}: image {key} has no label; beside it must be {beside} ({one_class})")
