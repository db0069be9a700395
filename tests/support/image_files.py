"""Images as files and in tars, recognised by their red value."""

import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from deit_gka.data.sources import DataParts, decode, open_source
from tiny_vision import encoded
from trainkit_gka.cli import UserError


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
