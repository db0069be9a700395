"""Lists of images that are cached between starts: equal to fresh ones, and read again after any change."""

import os
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from deit_gka.data.sources import cache as lists
from deit_gka.data.sources import open_source
from deit_gka.data.sources.base import list_hash
from tiny_images import contents, pair, png, write, write_tar

TICK = 0.02  # seconds in which every file system's clock has moved on


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The cache folder; also short and fresh lists are cached."""
    monkeypatch.setenv("GKA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(lists, "WORTH_KEEPING", 0.0)
    monkeypatch.setattr(lists, "SETTLED", -60.0)
    return tmp_path / "cache/lists"


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, value in (("a/1.png", 1), ("a/2.png", 2), ("a/deep/er/3.png", 3), ("b/4.png", 4)):
        write(tmp_path / "data/train" / name, png(value))
    write(tmp_path / "elsewhere/5.png", png(5))
    (tmp_path / "data/train/c").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "data"


@pytest.fixture
def tars(tmp_path) -> Path:
    for number in range(3):
        write_tar(tmp_path / f"tars/train-{number}.tar", [*pair("x", number, number), *pair("y", 9, 0)])
    return tmp_path / "tars"


def train(data: Path) -> list[tuple[int, int]]:
    return contents(open_source(str(data), "train"))


def reads(monkeypatch, data: Path) -> int:
    """How many times the places of `data` are listed when it is opened."""
    calls = []
    with monkeypatch.context() as patched:
        for module, name in (("folder", "_images_under"), ("tars", "_index")):
            place = sys.modules[f"deit_gka.data.sources.{module}"]
            read = getattr(place, name)
            patched.setattr(place, name, lambda *args, read=read: calls.append(args) or read(*args))
        open_source(str(data), "train")
    return len(calls)


@pytest.mark.parametrize("data", ["folder", "tars"])
def test_cached_lists_are_equal_and_read_again_if_torn(data, cache, request, monkeypatch):
    data = request.getfixturevalue(data)
    monkeypatch.setenv(lists.SWITCH, "0")
    fresh, want = open_source(str(data), "train"), train(data)
    assert reads(monkeypatch, data) > 0 and not cache.exists()
    monkeypatch.delenv(lists.SWITCH)
    assert reads(monkeypatch, data) > 0 and reads(monkeypatch, data) == 0
    (path,) = cache.iterdir()
    again, content = open_source(str(data), "train"), path.read_bytes()
    assert list_hash(again) == list_hash(fresh) and again.ignored == fresh.ignored and train(data) == want
    path.write_bytes(content[: len(content) // 2])
    assert train(data) == want and path.read_bytes() == content and reads(monkeypatch, data) == 0


@pytest.mark.parametrize("name, value", [("WORTH_KEEPING", 100.0), ("SETTLED", 2.0), ("HOME", None)])
def test_quick_and_fresh_lists_and_those_without_a_home_are_not_cached(name, value, folder, cache, monkeypatch):
    """A folder that changed in the tick in which it was read would look unchanged after the next change."""
    if name == "HOME":  # nor an account, as with docker --user
        monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
        for variable in ("GKA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setattr(lists, name, value)
    train(folder)
    assert not cache.exists()


CHANGES = {
    "added below": lambda folder: write(folder / "train/a/deep/er/9.png", png(7)),
    "added behind a link": lambda folder: write(folder.parent / "elsewhere/9.png", png(7)),
    "removed": lambda folder: (folder / "train/a/1.png").unlink(),
    "moved": lambda folder: (folder / "train/a/1.png").rename(folder / "train/b/1.png"),
    "a new class": lambda folder: write(folder / "train/aa/1.png", png(7)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_names_is_noticed(change, folder, cache, monkeypatch):
    before = train(folder)
    time.sleep(TICK)
    CHANGES[change](folder)
    after = train(folder)
    monkeypatch.setenv(lists.SWITCH, "0")
    assert after == train(folder) != before


def test_a_tar_of_the_same_size_and_time_is_noticed(tars, cache):
    """As archives and copies leave it, which set the time of the last change back."""
    assert train(tars) == [(0, 0), (9, 0), (1, 1), (9, 0), (2, 2), (9, 0)]
    path = tars / "train-1.tar"
    time.sleep(TICK)
    then = path.stat()
    write_tar(path, [*pair("y", 8, 0), *pair("x", 7, 1)])
    assert path.stat().st_size == then.st_size
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert train(tars)[2:4] == [(8, 0), (7, 1)]
