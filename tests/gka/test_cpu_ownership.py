"""The CPU kernel's library is loaded from where nobody but this user and root could have put it, or built anew."""

import os
import stat

import pytest
import torch

from cpu_builds import ask, copier, needs_compiler
from gka.impl.cpu import build
from gka.impl.cpu.ownership import distrust

OTHER = 54321  # a user without a name
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may give files away")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files of the processes under test, as /tmp is."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path, temporary):
    """A folder as a user's own would be, and a compiler."""
    folder = tmp_path / "shared" / "gka"
    folder.mkdir(parents=True)
    return folder, copier(tmp_path)


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
def test_in_place_of_another_users_folder_a_private_one_is_kept(place, cache, temporary, monkeypatch):
    folder, compiler = cache
    path = planted(folder, compiler, monkeypatch)
    theirs, own = folder if place == "gka" else folder.parent, temporary / f"gka-{os.geteuid()}"
    os.chown(theirs, OTHER, OTHER)
    lines, said = ask(folder, CXX=compiler)
    where = f"gka: the CPU kernel is in {own}, not in {folder}: {theirs} is owned by user {OTHER}\n"
    assert lines == ["cpu 9"]
    assert said == f"{where}gka: compiling the CPU kernel, once, for a few seconds: {own / path.name}\n"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700 and list(temporary.iterdir()) == [own]
    assert ask(folder, CXX=compiler) == (["cpu 9"], where)  # the next process compiles nothing
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
@pytest.mark.parametrize("what", [pytest.param("another user's", marks=as_root), "a link"])
def test_a_private_folder_that_somebody_planted_is_not_used(what, cache, temporary, tmp_path, monkeypatch):
    folder, compiler = cache
    loosen(folder, stat.S_IWOTH)
    own, place = temporary / f"gka-{os.geteuid()}", tmp_path / "place"
    place.mkdir()
    planted(place, compiler, monkeypatch)
    if what == "a link":
        own.symlink_to(place)
    else:
        place.rename(own)
        os.chown(own, OTHER, OTHER)
    lines, said = ask(folder, CXX=compiler)
    reason = f"others may write to {folder} (mode {stat.S_IMODE(folder.stat().st_mode):o})"
    refused = f"for this process alone: {reason}; {own} is not a folder of this user's\n"
    assert lines == ["cpu 9"] and refused in said
    assert list(temporary.iterdir()) == [own]
    assert [file.read_text()[:7] for file in own.iterdir()] == ["planted"]  # not touched


def test_a_private_folder_is_a_folder_to_which_nobody_else_writes(temporary):
    own = temporary / "gka"
    own.symlink_to(temporary / "nothing")
    assert build._made_private(own) == f"{own} is not a folder of this user's"
    own.unlink()
    own.touch()
    assert build._made_private(own) == f"{own} is not a folder of this user's"
    own.unlink()
    before = os.umask(0)
    try:
        assert build._made_private(own) is None and stat.S_IMODE(own.stat().st_mode) == 0o700
    finally:
        os.umask(before)
    assert build._made_private(own) is None  # that of an earlier process
    loosen(own, stat.S_IWOTH)
    assert build._made_private(own) == f"others may write to {own} (mode 702)"


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


@needs_compiler
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
