"""The CPU kernel's library is loaded from where nobody but this user and root could have put it, or built anew."""

import os
import stat

import pytest
import torch

from cpu_builds import COMPILER, ask, needs_compiler, wrapper
from gka.impl.cpu import build
from gka.impl.cpu.ownership import distrust

OTHER = 54321  # a user without a name
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may give files away")
QUICK = 'exec REAL "$@" -O0\n'  # the real compiler, without its optimiser


@pytest.fixture
def cache(tmp_path):
    """A folder as a user's own would be, and the library's path in it."""
    folder = tmp_path / "shared" / "gka"
    folder.mkdir(parents=True)
    compiler = wrapper(tmp_path, QUICK)
    return folder, compiler


def planted(folder, compiler, monkeypatch):
    """Put a text under the library's name, which the process under test would load, and return its path."""
    monkeypatch.setenv("CXX", compiler)
    instructions = torch.backends.cpu.get_cpu_capability()
    command = [compiler, *build.FLAGS, *build.INSTRUCTIONS[instructions]]
    digest = build._digest(command, [compiler])
    path = folder / f"gka-{instructions.lower()}-{digest}.so"
    path.write_text(f"planted {digest}")
    return path


def loosen(path, mode):
    path.chmod(stat.S_IMODE(path.stat().st_mode) | mode)


@needs_compiler
@as_root
@pytest.mark.parametrize("place", ["gka", "shared"])
def test_a_folder_of_another_user_is_not_used(place, cache, monkeypatch):
    folder, compiler = cache
    path = planted(folder, compiler, monkeypatch)
    theirs = folder if place == "gka" else folder.parent
    os.chown(theirs, OTHER, OTHER)
    lines, said = ask(folder, CXX=compiler)
    assert lines == ["cpu 9"]
    assert said.splitlines()[0] == (
        f"gka: the CPU kernel is compiled for this process alone, not in {folder}: {theirs} is owned by user {OTHER}"
    )
    assert list(folder.iterdir()) == [path]  # not touched


@needs_compiler
@pytest.mark.parametrize("mode", [stat.S_IWOTH, stat.S_IWOTH | stat.S_ISVTX], ids=["all write", "sticky"])
def test_a_folder_that_others_write_to_is_not_used(mode, cache, monkeypatch):
    folder, compiler = cache
    path = planted(folder, compiler, monkeypatch)
    loosen(folder, mode)
    lines, said = ask(folder, CXX=compiler)
    assert lines == ["cpu 9"] and f"others may write to {folder} (mode " in said
    assert list(folder.iterdir()) == [path]


@needs_compiler
@as_root
def test_a_library_of_another_user_is_built_again(cache, monkeypatch):
    folder, compiler = cache
    path = planted(folder, compiler, monkeypatch)
    os.chown(path, OTHER, OTHER)
    lines, said = ask(folder, CXX=compiler)
    assert lines == ["cpu 9"] and f"compiling the CPU kernel again: {path} is owned by user {OTHER}" in said
    assert path.stat().st_uid == 0 and not path.read_bytes().startswith(b"planted")
    assert ask(folder, CXX=compiler) == (["cpu 9"], "")


@pytest.mark.skipif(COMPILER is None, reason="no compiler")
def test_what_is_built_is_nobody_elses_to_write_whatever_the_umask(cache):
    folder, _ = cache
    before = os.umask(0)
    try:
        new = folder / "new"
        assert build._prepared(new) is None and stat.S_IMODE(new.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_folders_above_may_be_sticky_and_links_are_followed(tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "shared" / "own"
    own.mkdir(parents=True)
    assert distrust(own) is None
    loosen(shared, stat.S_IWOTH)
    assert distrust(own) == f"others may write to {shared} (mode {stat.S_IMODE(shared.stat().st_mode):o})"
    (tmp_path / "link").symlink_to(own)
    assert distrust(tmp_path / "link") == distrust(own)
    loosen(shared, stat.S_ISVTX)
    assert distrust(own) is None


@as_root
def test_of_groups_a_users_own_alone_may_write(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    loosen(place, stat.S_IWGRP)
    os.chown(place, 0, 0)
    assert distrust(place) is None
    os.chown(place, 0, OTHER)  # a group that does not exist
    assert distrust(place).startswith(f"others may write to {place}")
    os.chown(place, 0, 1)
    assert distrust(place).startswith(f"others may write to {place}")
