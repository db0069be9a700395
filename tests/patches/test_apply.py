"""patches/apply.py on a small upstream: what it inserts and takes out again, and which trees it leaves alone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PATCHES = Path(__file__).resolve().parents[2] / "patches"
OPTIONS = ("user.name=t", "user.email=t@example.org", "commit.gpgsign=false", "init.defaultBranch=main")
GIT = ["git", *(word for option in OPTIONS for word in ("-c", option))]
MODEL = "import math\n\n" + "".join(f"def f{n}():\n    return {n}\n\n" for n in range(1, 10))
FIRST = MODEL.replace("math\n", "math\nimport new\n").replace("return 5\n", "return 5\n    # five\n")
PATCHED = FIRST + "last = 1\n"
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
    shutil.copy(PATCHES / "apply.py", project / "patches")
    (source / "lib").mkdir(parents=True)
    (source / "lib" / "model.py").write_text(MODEL)
    (source / "train.py").write_text(TRAIN)
    (source / "train.py").chmod(0o755)
    (source / "README").write_text("small\n")
    git(source, "init", "-q")
    pin = commit(source)
    edits = [
        {"lib/new.py": "new = 1\n", "lib/model.py": FIRST},
        {"lib/model.py": PATCHED, "train.py": TRAIN.replace("[]\n", "[]\nflags += 1\n")},
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


@pytest.fixture
def unpacked(source):
    """The same files, in a folder without git."""
    return shutil.copytree(source, source.parent / "unpacked", ignore=shutil.ignore_patterns(".git"))


def call(project, *arguments, src=None, code=0, **environment):
    """Run apply.py as a user does; returns all it prints."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(project.parent), **environment}
    if src:
        environment["SMALL_SRC"] = str(src)
    command = [sys.executable, project / "patches" / "apply.py", *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=project, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stdout + done.stderr


def in_source(project, action, *flags, **options):
    """The same on the upstream itself, as a checkout of the user's own."""
    return call(project, action, "small", "--tree", project.parent / "source", *flags, **options)


def files(tree):
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in sorted(tree.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }


def test_lines_go_in_are_shown_and_come_out(project, source):
    tree, before = project / "vendor" / "small", files(source)
    call(project, "vendor", src=source)
    assert files(tree) == before
    assert "3 files patched" in call(project, "apply") and "already patched" in call(project, "apply")
    patched = files(tree)
    assert patched["lib/model.py"].decode() == PATCHED
    assert patched["lib/new.py"] == b"new = 1\n" and patched["README"] == before["README"]
    assert (tree / "train.py").stat().st_mode & 0o777 == 0o755

    difference = call(project, "diff")
    assert "\n+import new\n" in difference and "\n-" not in difference.replace("\n--- ", "\n")
    assert re.search(r"lib/model.py +\| +3 \+\+\+\n", difference) and "create mode 100644 lib/new.py" in difference
    assert "3 files changed, 5 insertions(+)\n" in difference

    assert "taken out of 3 files" in call(project, "reverse") and "not patched" in call(project, "reverse")
    assert files(tree) == before and git(tree, "status", "--porcelain") == ""
    call(project, "apply")
    (tree / "train.py").write_bytes(before["train.py"])  # as if a run had ended before this file
    assert "1 files patched" in call(project, "apply") and files(tree) == patched
    commit(tree)
    assert "already patched" in call(project, "apply")
    call(project, "reverse")
    assert files(tree) == before


def test_other_sources_and_trees_are_refused(project, source, unpacked):
    (unpacked / "train.py").write_text("else\n")
    assert "its train.py is not that of" in call(project, "vendor", src=unpacked, code=2)
    empty, other = source.parent / "empty", source.parent / "other"
    for folder in (empty, other):
        folder.mkdir()
    git(other, "init", "-q")
    (other / "a").write_text("a")
    commit(other)
    for origin in (other, source.parent / "missing", None):
        message = call(project, "vendor", src=origin, code=2)
        assert "cannot get" in message and "set SMALL_SRC to a folder or repository that has it" in message
    assert list((project / "vendor").iterdir()) == []
    assert "run `make vendor`" in call(project, "apply", code=2)
    for tree in (empty, source / "lib"):
        assert "not a git repository" in call(project, "apply", "small", "--tree", tree, code=2)
    assert "git is not installed" in call(project, "vendor", src=source, code=2, PATH="/nowhere")


def test_another_version_needs_merge(project, source):
    (source / "lib" / "model.py").write_text('"""More above."""\n\n\n' + MODEL)
    commit(source)
    before = files(source)
    assert "--merge" in in_source(project, "apply", code=2) and files(source) == before
    in_source(project, "apply", "--merge")
    assert "already patched" in in_source(project, "apply")
    assert files(source)["lib/model.py"].decode() == '"""More above."""\n\n\n' + PATCHED
    status = git(source, "status", "--porcelain")
    assert "5 insertions(+)\n" in in_source(project, "diff") and "?? lib/new.py" in status
    assert git(source, "status", "--porcelain") == status
    in_source(project, "reverse")
    assert files(source) == before
    (source / "lib" / "model.py").write_text(MODEL.replace("return 5\n", "return 55\n"))  # there is no place
    commit(source)
    before = files(source)
    message = in_source(project, "apply", "--merge", code=2)
    assert "not all insertions fit (lib/model.py)" in message and "git -C" in message and files(source) == before


@pytest.mark.parametrize("action, path", [("apply", "lib/model.py"), ("apply", "lib/new.py"), ("reverse", "train.py")])
def test_users_own_changes_stay(project, source, action, path):
    """Those elsewhere in a file, too."""
    (source / "lib" / "model.py").write_text(MODEL.replace("return 2\n", "return 22\n"))
    before = files(source)
    in_source(project, "apply")
    assert files(source)["lib/model.py"].decode() == PATCHED.replace("return 2\n", "return 22\n")
    if action == "apply":
        in_source(project, "reverse")
        assert files(source) == before
    (source / path).write_text("mine\n")
    before = files(source)
    message = in_source(project, action, code=2)
    assert path in message and "undo your changes there first" in message
    assert files(source) == before


def test_the_users_git_and_its_settings_change_nothing_and_stay_unchanged(project, source, unpacked):
    """From every kind of source; as in a hook, where git sets variables that name another repository."""
    settings = "[diff]\n noprefix\n context = 0\n external = false\n[apply]\n whitespace = fix\n[color]\n ui = always\n"
    settings += "[core]\n autocrlf = true\n hooksPath = /nowhere\n[commit]\n gpgsign = true\n"
    mine, bare = source.parent / "mine", source.parent / "bare"
    git(source, "clone", "-q", "--bare", source, bare)
    mine.mkdir()
    git(mine, "init", "-q")
    (mine / "a").write_text("a")
    head = commit(mine)
    (project.parent / ".gitconfig").write_text(settings)
    hook = {"GIT_DIR": str(mine / ".git"), "GIT_INDEX_FILE": str(mine / ".git" / "index")}
    for origin in (unpacked, source, bare):
        call(project, "vendor", src=origin, **hook)
        assert "already there" in call(project, "vendor", src=origin, **hook)
        call(project, "apply", **hook)
        call(project, "diff", HOME="/nowhere", **hook)  # an external diff is the user's choice
        assert git(mine, "rev-parse", "HEAD").strip() == head and git(mine, "status", "--porcelain") == ""
        assert files(project / "vendor" / "small")["lib/model.py"].decode() == PATCHED
        call(project, "reverse", **hook)
        assert files(project / "vendor" / "small") == files(source)
        shutil.rmtree(project / "vendor")


HEADER = re.compile(r"^diff --git a/(\S+) b/\S+\n(?:new file .*\n)?index (\w{40})\.\.(\w{40})", re.M)


@pytest.mark.upstream
@pytest.mark.parametrize("name", ["nanochat", "deit"])
def test_applied_patches_make_the_files_they_name(tree, name):
    """Each patch says which git id its files have after it."""
    patches = sorted((PATCHES / name).glob("*.patch"))
    ids = {file: after for patch in patches for file, _, after in HEADER.findall(patch.read_text())}
    assert len(ids) > 1 and git(tree(name), "hash-object", "--no-filters", *ids).split() == [*ids.values()]


@pytest.mark.parametrize("name", ["nanochat", "deit"])
def test_our_patches_only_insert_are_listed_and_follow_each_other(name):
    listed = re.findall(r"^ +(\S+\.patch)", (PATCHES / "UPSTREAM").read_text(), flags=re.M)
    ids = {}
    for path in sorted((PATCHES / name).glob("*.patch")):
        text = path.read_text()
        for file, before, after in HEADER.findall(text):
            assert ids.get(file, before) == before
            ids[file] = after
        inserting = re.findall(r"^@@ -\d+,0 \+\d+(?:,\d+)? @@$", text, flags=re.M)
        assert path.name in listed and inserting and len(inserting) == len(re.findall("^@@", text, flags=re.M))
        assert not re.findall(r"^-(?!-- )", text, flags=re.M)
    assert ids
