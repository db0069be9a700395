"""patches/apply.py on a small upstream of our own: what it inserts and takes out again, and all the trees it must leave alone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PATCHES = Path(__file__).resolve().parents[2] / "patches"
sys.path.insert(0, str(PATCHES))
import series  # noqa: E402

GIT = [
    "git",
    "-c",
    "user.name=t",
    "-c",
    "user.email=t@example.org",
    "-c",
    "commit.gpgsign=false",
    "-c",
    "init.defaultBranch=main",
]
MODEL = "import math\n\ndef size():\n    return 1\n\ndef shape():\n    return 2\n\ndef name():\n    return 'x'\n"
TRAIN = "#!/usr/bin/env python\nflags = []\nrun(flags)\n"


def git(at, *arguments):
    return subprocess.run([*GIT, *arguments], cwd=at, check=True, capture_output=True, text=True).stdout


def commit(at, message="x"):
    git(at, "add", "-A")
    git(at, "commit", "-qm", message)
    return git(at, "rev-parse", "HEAD").strip()


def zero_context(at):
    """The staged change as this project keeps it: nothing of the upstream's text, whole ids."""
    return re.sub(r"^(@@ .* @@).*$", r"\1", git(at, "diff", "--cached", "-U0", "--full-index"), flags=re.M)


@pytest.fixture
def project(tmp_path):
    """A project with patches/ for a small upstream, and that upstream, `source`."""
    project, source = tmp_path / "project", tmp_path / "source"
    (project / "patches" / "small").mkdir(parents=True)
    for script in ("apply.py", "series.py"):
        shutil.copy(PATCHES / script, project / "patches")
    (source / "lib").mkdir(parents=True)
    (source / "lib" / "model.py").write_text(MODEL)
    (source / "train.py").write_text(TRAIN)
    (source / "train.py").chmod(0o755)
    (source / "README").write_text("small\n")
    git(source, "init", "-q")
    pin = commit(source)
    edits = [
        {
            "lib/new.py": "new = 1\n",
            "lib/model.py": MODEL.replace("math\n", "math\nimport new\n").replace("2\n", "2\n    # two\n"),
        },
        {
            "lib/model.py": MODEL.replace("math\n", "math\nimport new\n").replace("2\n", "2\n    # two\n")
            + "last = 1\n",
            "train.py": TRAIN.replace("[]\n", "[]\nflags += 1\n"),
        },
    ]
    for number, files in enumerate(edits):
        for path, text in files.items():
            (source / path).write_text(text)
        git(source, "add", "-A")
        (project / "patches" / "small" / f"000{number}.patch").write_text("Why.\n\n" + zero_context(source))
        commit(source)
    git(source, "checkout", "-q", pin)
    names = "".join(f"\n    000{number}.patch   words" for number in range(2))
    (project / "patches" / "UPSTREAM").write_text(
        f"[small]\nrepository = {tmp_path}/nowhere\ncommit = {pin}\nsource = SMALL_SRC\npatches ={names}\n"
    )
    return project


@pytest.fixture
def source(project):
    return project.parent / "source"


def call(project, *arguments, src=None, code=0, **environment):
    """Run apply.py as a user does; returns all it prints."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(project.parent),
        **({"SMALL_SRC": str(src)} if src else {}),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, project / "patches" / "apply.py", *map(str, arguments)],
        env=environment,
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stdout + done.stderr


def files(tree):
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in sorted(tree.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }


def test_insert_show_and_take_out(project, source):
    tree, before = project / "vendor" / "small", files(source)
    call(project, "vendor", src=source)
    assert files(tree) == before
    assert "5 lines inserted in 3 files" in call(project, "apply") and "already patched" in call(project, "apply")
    patched = files(tree)
    assert (
        patched["lib/model.py"].decode()
        == MODEL.replace("math\n", "math\nimport new\n").replace("2\n", "2\n    # two\n") + "last = 1\n"
    )
    assert patched["lib/new.py"] == b"new = 1\n" and patched["README"] == before["README"]
    assert (tree / "train.py").stat().st_mode & 0o777 == 0o755

    shown = call(project, "diff")
    assert "\n+import new\n" in shown and "\n-" not in shown.replace("\n--- ", "\n")
    assert (
        re.search(r"lib/model.py +\+3 +-0\n", shown)
        and re.search(r"lib/new.py +\+1 +-0 +new file\n", shown)
        and re.search(r"total +\+5 +-0\n", shown)
    )

    assert "3 files as they were" in call(project, "reverse") and "not patched" in call(project, "reverse")
    assert files(tree) == before and git(tree, "status", "--porcelain") == ""


def test_git_alone_makes_the_same_of_the_patches(project, source):
    call(project, "vendor", src=source)
    call(project, "apply")
    patched = files(project / "vendor" / "small")
    git(source, "apply", "--unidiff-zero", *sorted((project / "patches" / "small").glob("*.patch")))
    assert files(source) == patched


@pytest.mark.parametrize("kind", ["bare", "unpacked"])
def test_sources_that_are_no_checkout(project, source, kind):
    given = source.parent / kind
    if kind == "bare":
        git(source, "clone", "-q", "--bare", source, given)
    else:
        shutil.copytree(source, given, ignore=shutil.ignore_patterns(".git"))
    call(project, "vendor", src=given)
    call(project, "vendor", src=given)  # there already
    call(project, "apply")
    assert b"import new" in files(project / "vendor" / "small")["lib/model.py"]
    call(project, "reverse")
    assert files(project / "vendor" / "small") == files(source)


def test_sources_that_will_not_do(project, source):
    plain, other = source.parent / "plain", source.parent / "other"
    shutil.copytree(source, plain, ignore=shutil.ignore_patterns(".git"))
    (plain / "train.py").write_text("else\n")
    assert "its train.py is not that of" in call(project, "vendor", src=plain, code=2)
    other.mkdir()
    git(other, "init", "-q")
    (other / "a").write_text("a")
    commit(other)
    assert "does not have the commit" in call(project, "vendor", src=other, code=2)
    assert "there is no such folder" in call(project, "vendor", src=source.parent / "missing", code=2)
    message = call(project, "vendor", code=2)
    assert "cannot clone" in message and "Set SMALL_SRC" in message
    assert list((project / "vendor").iterdir()) == []
    assert "run `make vendor`" in call(project, "apply", code=2)
    (source.parent / "empty").mkdir()
    assert "for a checkout with a commit" in call(project, "apply", "small", "--tree", source.parent / "empty", code=2)
    assert "not one itself" in call(project, "apply", "small", "--tree", source / "lib", code=2)


def test_a_version_where_a_line_has_no_place_is_left_alone(project, source):
    (source / "lib" / "model.py").write_text(MODEL.replace("    return 2\n", "    return 3\n"))
    commit(source)
    before = files(source)
    for flags in ([], ["--merge"]):
        message = call(project, "apply", "small", "--tree", source, *flags, code=2)
        assert (
            "1 of 5 insertions no longer fit (0000.patch: lib/model.py, after its line 7)" in message
            and "git -C" in message
        )
        assert files(source) == before


def test_a_version_where_all_lines_have_a_place_needs_a_word(project, source):
    (source / "lib" / "model.py").write_text('"""More above."""\n\n\n' + MODEL)
    commit(source)
    before = files(source)
    assert "--merge" in call(project, "apply", "small", "--tree", source, code=2) and files(source) == before
    call(project, "apply", "small", "--tree", source, "--merge")
    assert "already patched" in call(project, "apply", "small", "--tree", source)
    assert files(source)["lib/model.py"].decode().startswith('"""More above."""\n\n\nimport math\nimport new\n')
    assert re.search(r"total +\+5 +-0\n", call(project, "diff", "small", "--tree", source))
    call(project, "reverse", "small", "--tree", source)
    assert files(source) == before


def test_a_version_with_the_same_files_is_as_good(project, source):
    (source / "README").write_text("later\n")
    commit(source)
    call(project, "apply", "small", "--tree", source)
    assert b"import new" in files(source)["lib/model.py"]


@pytest.mark.parametrize("path", ["lib/model.py", "lib/new.py"])
def test_changes_of_ones_own_are_left_alone(project, source, path):
    (source / path).write_text("mine\n")
    before = files(source)
    assert "changes of your own" in call(project, "apply", "small", "--tree", source, code=2)
    assert files(source) == before


def test_changes_after_patching_are_left_alone(project, source):
    call(project, "apply", "small", "--tree", source)
    (source / "train.py").write_text("mine\n")
    before = files(source)
    assert "undo those first" in call(project, "reverse", "small", "--tree", source, code=2)
    assert files(source) == before


def test_a_committed_patch_counts_as_patched(project, source):
    call(project, "apply", "small", "--tree", source)
    commit(source)
    assert "already patched" in call(project, "apply", "small", "--tree", source)
    assert "revert that commit" in call(project, "reverse", "small", "--tree", source, code=2)


@pytest.mark.parametrize("action", ["apply", "reverse"])
def test_a_run_that_was_cut_off_is_finished_or_undone(project, source, action):
    before = files(source)
    call(project, "apply", "small", "--tree", source)
    patched = files(source)
    git(source, "checkout", "-q", "--", "train.py")  # as if it had not come to this file
    (source / "lib" / ".model.py.patching").write_text("half")
    (project / "vendor").mkdir()
    (project / "vendor" / ".small-vendoring-x").mkdir()
    call(project, action, "small", "--tree", source)
    assert files(source) == (patched if action == "apply" else before)
    call(project, "vendor", src=source)
    assert [path.name for path in (project / "vendor").iterdir()] == ["small"]


def test_all_files_change_or_none(project, source):
    before = files(source)
    (source / ".train.py.patching").mkdir()  # in the way of the last file
    assert "Nothing was changed" in call(project, "apply", "small", "--tree", source, code=2)
    (source / ".train.py.patching").rmdir()
    (source / "lib" / "new.py").mkdir()
    assert "no plain file" in call(project, "apply", "small", "--tree", source, code=2)
    assert files(source) == before


def test_another_repository_in_the_environment_is_left_alone(project, source):
    """As in a hook, where git sets these."""
    mine, plain = source.parent / "mine", source.parent / "plain"
    shutil.copytree(source, plain, ignore=shutil.ignore_patterns(".git"))
    mine.mkdir()
    git(mine, "init", "-q")
    (mine / "a").write_text("a")
    head = commit(mine)
    for given in (plain, source):
        call(project, "vendor", src=given, GIT_DIR=str(mine / ".git"), GIT_INDEX_FILE=str(mine / ".git" / "index"))
        call(project, "apply", GIT_DIR=str(mine / ".git"))
        assert git(mine, "rev-parse", "HEAD").strip() == head and git(mine, "status", "--porcelain") == ""
        assert b"import new" in files(project / "vendor" / "small")["lib/model.py"]
        shutil.rmtree(project / "vendor")


def test_windows_line_ends_are_named(project, source):
    (source / "train.py").write_bytes((source / "train.py").read_bytes().replace(b"\n", b"\r\n"))
    assert "core.autocrlf" in call(project, "apply", "small", "--tree", source, code=2)
    (source / "train.py").unlink()
    assert "is missing" in call(project, "apply", "small", "--tree", source, code=2)


def test_without_git_it_says_so(project, source):
    assert "git is not installed" in call(project, "vendor", src=source, code=2, PATH="/nowhere")


def test_a_damaged_patch_is_named(project, source):
    patch = project / "patches" / "small" / "0001.patch"
    good = patch.read_text()
    for bad, why in [(good.replace("+last = 1", "+last = 2"), "damaged"), (good.replace("+last = 1", " last = 1"), "not inserted"),
                     (good.replace("+last = 1\n", ""), "0001.patch"), (good + "@@ -1 +1 @@\n-a\n+b\n", "more than insert")]:  # fmt: skip
        patch.write_text(bad)
        before = files(source)
        assert why in call(project, "apply", "small", "--tree", source, code=2)
        assert files(source) == before


def test_our_patches_only_insert_and_follow_each_other():
    for name, upstream in series.read_upstream().items():
        assert upstream.patches == sorted((PATCHES / name).glob("*.patch"))
        inserted = {change.path: change.inserted for change in upstream.changes()}
        new = {change.path for change in upstream.changes() if change.before == series.NO_FILE}
        assert sum(count for path, count in inserted.items() if path not in new) <= 23
        assert len(new) == 1
