"""The patches as data: what they insert where, and the contents that come of it. See UPSTREAM for what they are patches of."""

import configparser
import hashlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
NO_FILE = "0" * 40
KEPT = {
    "GIT_SSH",
    "GIT_SSH_COMMAND",
    "GIT_ASKPASS",
    "GIT_TERMINAL_PROMPT",
    "GIT_SSL_CAINFO",
    "GIT_SSL_NO_VERIFY",
    "GIT_EXEC_PATH",
}


class PatchError(Exception):
    """Something the user can mend; the message says what to do."""


def call_git(*arguments: str | Path) -> subprocess.CompletedProcess:
    """Run git, on the repository that the arguments say: not on the one whose hook this may run in. Raises PatchError if there is no git."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in KEPT}
    try:
        return subprocess.run(["git", *arguments], env=environment, capture_output=True)
    except FileNotFoundError:
        raise PatchError("git is not installed, or not on the PATH") from None


def git(*arguments: str | Path, at: Path | None = None) -> bytes:
    """What a git command prints. Raises PatchError with its complaint."""
    done = call_git(*(["-C", at] if at else []), *arguments)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        complaint = next((line for line in lines if line.startswith(("fatal: ", "error: "))), lines[-1])
        raise PatchError(re.sub(r"^(fatal|error): ", "", complaint))
    return done.stdout


@dataclass(frozen=True)
class Hunk:
    """Lines that go in after line `after` (0: at the top) of one file, as the hunks and patches before this one left it."""

    patch: str
    after: int
    lines: tuple[bytes, ...]

    def insert(self, text: bytes) -> bytes:
        old = text.splitlines(keepends=True)
        return b"".join([*old[: self.after], *self.lines, *old[self.after :]])


@dataclass
class Change:
    """All that the patches do to one file: from the content with git id `before` (NO_FILE: it is new) to that with id `after`."""

    path: str
    before: str
    after: str
    hunks: list[Hunk]

    @property
    def inserted(self) -> int:
        """Number of lines."""
        return sum(len(hunk.lines) for hunk in self.hunks)


@dataclass(frozen=True)
class Upstream:
    """One section of the file UPSTREAM. source: the environment variable that names a folder or repository to take in place of `repository`."""

    name: str
    repository: str
    commit: str
    source: str
    patches: list[Path]

    def changes(self) -> list[Change]:
        """What the patches do, file by file. Raises PatchError for a patch that does more than insert, or does not follow on the one before."""
        changes: dict[str, Change] = {}
        for patch in self.patches:
            for found in parse(patch):
                known = changes.setdefault(found.path, Change(found.path, found.before, found.before, []))
                if known.after != found.before:
                    raise PatchError(f"{patch}: {found.path} is not as the patches before it leave it")
                known.after = found.after
                known.hunks += found.hunks
        return list(changes.values())


def read_upstream() -> dict[str, Upstream]:
    """The sections of UPSTREAM by name."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(HERE / "UPSTREAM", encoding="utf-8")
    return {
        name: Upstream(
            name, section["repository"], section["commit"], section["source"],
            [HERE / name / line.split()[0] for line in section["patches"].splitlines() if line],
        )
        for name, section in config.items() if name != config.default_section
    }  # fmt: skip


def parse(patch: Path) -> list[Change]:
    """The changes of one zero-context patch file. Raises PatchError for anything but insertions."""
    changes: list[Change] = []
    inserted: list[bytes] = []
    missing = 0  # lines that the current hunk still has to bring
    for line in patch.read_bytes().splitlines(keepends=True):
        if missing:
            if not line.startswith(b"+"):
                raise PatchError(f"{patch}: has a line that is not inserted: {line.decode().rstrip()}")
            inserted.append(line[1:])
            missing -= 1
            if not missing:
                hunk = changes[-1].hunks[-1]
                changes[-1].hunks[-1] = Hunk(hunk.patch, hunk.after, tuple(inserted))
        elif match := re.match(rb"diff --git a/(.+) b/\1$", line):
            changes.append(Change(match[1].decode(), NO_FILE, NO_FILE, []))
        elif not changes:
            if line.startswith((b"@@", b"+", b"index ")):
                raise PatchError(
                    f"{patch}: has no line 'diff --git a/FILE b/FILE' (or Windows line ends: core.autocrlf)"
                )
        elif match := re.match(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40})", line):
            changes[-1].before, changes[-1].after = match[1].decode(), match[2].decode()
        elif match := re.match(rb"@@ -\d+,0 \+(\d+)(?:,(\d+))? @@$", line):
            changes[-1].hunks.append(Hunk(patch.name, int(match[1]) - 1, ()))
            inserted, missing = [], int(match[2] or 1)
        elif line.startswith((b"@@", b"-", b"+")) and not line.startswith((b"--- ", b"+++ ")):
            raise PatchError(f"{patch}: does more than insert lines: {line.decode().rstrip()}")
    if not changes or missing:
        raise PatchError(f"{patch}: ends in the middle of a hunk")
    return changes


@dataclass(frozen=True)
class Fit:
    """A change against one version of its file. new: the file with every hunk that fits; misfits: the others, with the line each is for."""

    new: bytes | None
    misfits: list[tuple[Hunk, int]]
    moved: bool  # the file is not the version the patches were made for


def fit(change: Change, current: bytes | None, tree: Path) -> Fit:
    """Insert the hunks of `change` into `current`, the file's content at the tree's commit (None: there is no such file).

    Where that is the version they were made for, at their lines; in another version where git's three-way merge finds their place.
    Raises PatchError if the repository does not have the version they were made for.
    """
    new_file = change.before == NO_FILE
    if new_file:
        base = b""
    else:
        try:
            base = git("cat-file", "blob", change.before, at=tree)
        except PatchError:
            raise PatchError(
                f"{tree} lacks the version of {change.path} that the patches are for: fetch the commit that UPSTREAM names"
            ) from None
    if current is None and not new_file:
        return Fit(None, [(hunk, hunk.after) for hunk in change.hunks], moved=True)
    moved = current is not None and (new_file or current != base)
    text = (current or b"") if moved else base
    misfits, earlier = [], 0
    # `base` grows into what the patches make of the version they are for.
    for hunk in change.hunks:
        patched = hunk.insert(base)
        merged = merge(text, base, patched) if moved else patched
        if merged is None:
            misfits.append((hunk, hunk.after - earlier))
        else:
            text = merged
        base, earlier = patched, earlier + len(hunk.lines)
    if hashlib.sha1(b"blob %d\0" % len(base) + base).hexdigest() != change.after:
        raise PatchError(
            f"the patches of {change.path} are damaged: they do not make the version they name. Get them again"
        )
    return Fit(text, misfits, moved)


def merge(ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """The change from base to theirs made in ours, or None where they touch the same place."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("ours", "base", "theirs")]
        for path, content in zip(paths, (ours, base, theirs)):
            path.write_bytes(content)
        done = call_git("merge-file", "-p", *paths)
    return done.stdout if done.returncode == 0 else None
