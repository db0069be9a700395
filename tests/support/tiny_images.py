"""Images as files, in tars and as sources, recognised by their red value; recipes and processes for their order."""

import io
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from deit_gka.data.sources import DataParts, ImageSource, decode, open_source
from deit_gka.recipe import Recipe
from tiny_vision import SIZE, encoded
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime

CPU = torch.device("cpu")


def runtime(rank=0, ranks=1):
    return Runtime(rank, ranks, CPU)


class Numbers(ImageSource):
    """Image i is a gray of i, and i its label."""

    def __init__(self, count, split="train"):
        super().__init__("numbers", split, [str(label) for label in range(count)])
        self.count = count

    def __len__(self):
        return self.count

    def read(self, index):
        return Image.new("L", (12, 12), index % 256), index, f"number {index}"


def small_recipe(**settings) -> Recipe:
    return Recipe(**{**dict(epochs=3, warmup_epochs=1, batch_size=40, group_size=8, input_size=SIZE), **settings})


def drawn(order, start, stop):
    """{place: key} of each update."""
    stream = order.batches(start, stop)
    updates = [
        {place: key for unit in order.units for place, key in zip(unit, next(stream), strict=True)}
        for _ in range(start, stop)
    ]
    assert next(stream, None) is None
    return updates


def union(parts):
    """{place: key} of each update, of several processes together."""
    return [{place: key for part in parts for place, key in part[step].items()} for step in range(len(parts[0]))]


def png(value: int) -> bytes:
    return encoded(Image.new("RGB", (4, 4), (value, 0, 0)), "PNG")


def value_of(record) -> int:
    return decode(record[0]).getpixel((0, 0))[0]


def contents(source) -> list[tuple[int, int]]:
    """Red value and label of every image of a source."""
    return [(value_of(source.read(index)), source.read(index)[1]) for index in range(len(source))]


def write(path: Path, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def write_tar(path: Path, members: list[tuple[str, bytes]], **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pair(key: str, value: int, label: int) -> list[tuple[str, bytes]]:
    """The members of a tar for one image and its label."""
    return [(f"{key}.JPEG", png(value)), (f"{key}.cls", str(label).encode())]


def error(data, split="train", **parts) -> str:
    """The message of the UserError that opening `data` raises: one line."""
    with pytest.raises(UserError) as caught:
        open_source(str(data), split, DataParts(**parts))
    assert "\n" not in str(caught.value)
    return str(caught.value)
