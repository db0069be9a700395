"""Put GKA into a checkout of upstream nanochat or DeiT, show what that changes, and take it out again. Needs git and nothing else.

    python patches/apply.py vendor                            clone both at their commits into vendor/ (or take NANOCHAT_SRC, DEIT_SRC)
    python patches/apply.py apply                             insert the lines
    python patches/apply.py diff                              the difference from the untouched commit, and lines per file
    python patches/apply.py reverse                           take them out
    python patches/apply.py apply nanochat --tree ~/nanochat  the same for a checkout of your own

All contents are worked out, and written beside their files, before the first file is replaced, so that a run that was cut off is finished, or undone, by
the next. Files with changes of your own are not touched.
"""

import argparse
import contextlib
import difflib
import os
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from series import NO_FILE, Change, Fit, PatchError, Upstream, fit, git, read_upstream

PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class File:
    """A file that the patches change: at the tree's commit, patched, and as it is on the disk (None: absent)."""

    change: Change
    path: Path
    committed: bytes | None
    fit: Fit
    found: bytes | None

    @property
    def patched(self) -> bool:
        return self.found == self.fit.new

    @property
    def edited(self) -> bool:
        return self.found not in (self.committed, self.fit.new)

    @property
    def beside(self) -> Path:
        """Where its new content waits."""
        return self.path.with_name(f".{self.path.name}.patching")


def why_edited(file: File) -> str:
    """What is the matter with a file that is neither as committed nor patched."""
    if file.found is None:
        return f"{file.path} is missing: git checkout it first"
    if file.found.replace(b"\r\n", b"\n") in (file.committed, file.fit.new):
        return f"{file.path} has Windows line ends: check the tree out with core.autocrlf=false"
    return f"{file.path} has changes of your own: commit or stash them first"


def write(contents: list[tuple[File, bytes | None]]) -> None:
    """Give every file its content, None: delete it. All or, if something is in the way, none of them."""
    done: list[File] = []
    try:
        for file, content in contents:
            if content is not None:
                file.beside.write_bytes(content)
                if file.found is not None:
                    file.beside.chmod(stat.S_IMODE(file.path.stat().st_mode))
        for file, content in contents:
            if content is None:
                file.path.unlink()
            else:
                os.replace(file.beside, file.path)
            done.append(file)
    except BaseException:
        for file in done:
            if file.found is None:
                file.path.unlink(missing_ok=True)
            else:
                file.path.write_bytes(file.found)
        raise
    finally:
        for file, _ in contents:
            with contextlib.suppress(OSError):
                file.beside.unlink(missing_ok=True)


def read_tree(upstream: Upstream, tree: Path) -> tuple[str, list[File]]:
    """The tree's commit, and its files that the patches change. Raises PatchError if it is no checkout."""
    if not tree.is_dir():
        raise PatchError(f"there is no folder {tree}: run `make vendor`, or give --tree")
    try:
        top = Path(os.fsdecode(git("rev-parse", "--show-toplevel", at=tree)).removesuffix("\n"))
        commit = git("rev-parse", "--verify", "HEAD", at=tree).decode().strip()
    except PatchError as error:
        raise PatchError(f"git does not take {tree} for a checkout with a commit: {error}") from None
    if top != tree.resolve():
        raise PatchError(f"{tree} is inside the checkout {top}, not one itself")
    entries = [
        os.fsdecode(entry).partition("\t")
        for entry in git("ls-tree", "-r", "-z", "HEAD", at=tree).split(b"\0")
        if entry
    ]
    listed = {path: what.split()[2] for what, _, path in entries}
    files = []
    for change in upstream.changes():
        committed = git("cat-file", "blob", listed[change.path], at=tree) if change.path in listed else None
        path = tree / change.path
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise PatchError(f"{path} is no plain file: move it away first. Nothing was changed")
        files.append(
            File(change, path, committed, fit(change, committed, tree), path.read_bytes() if path.exists() else None)
        )
        if files[-1].beside.is_file():  # of a run that was cut off
            files[-1].beside.unlink()
    return commit, files


def misfits(files: list[File]) -> list[str]:
    """Every insertion that has no place in the tree's commit."""
    return [
        f"{hunk.patch}: {file.change.path}, after its line {line}" for file in files for hunk, line in file.fit.misfits
    ]


def apply(upstream: Upstream, tree: Path, merge: bool) -> None:
    """Insert the patches' lines. Raises PatchError, with nothing written, if the tree is another version or has changes of its own there."""
    commit, files = read_tree(upstream, tree)
    if all(file.patched for file in files):
        print(f"{tree}: already patched")
        return
    lost, moved = (
        misfits(files),
        [file.change.path for file in files if file.fit.moved and file.committed != file.fit.new],
    )
    pin = f"git -C {tree} checkout {upstream.commit[:12]}"
    if lost:
        count = sum(len(file.change.hunks) for file in files)
        raise PatchError(f"{tree} is at {commit[:12]}, the patches are for {upstream.commit[:12]}: {len(lost)} of {count} insertions no longer fit "
                         f"({'; '.join(lost)}). Nothing was changed. Take their commit: {pin}")  # fmt: skip
    if moved and not merge:
        raise PatchError(f"{tree} is at {commit[:12]}, the patches are for {upstream.commit[:12]}, and {', '.join(moved)} changed in between. All "
                         f"insertions still find a place: insert them with --merge, and test; or take their commit: {pin}")  # fmt: skip
    for file in files:
        if file.edited:
            raise PatchError(f"{why_edited(file)}. Nothing was changed")
    write([(file, file.fit.new) for file in files if not file.patched])
    print(f"{tree}: {sum(file.change.inserted for file in files)} lines inserted in {len(files)} files")


def reverse(upstream: Upstream, tree: Path) -> None:
    """Take the patches' lines out. Raises PatchError, with nothing written, if a file was changed since, or committed with them."""
    _, files = read_tree(upstream, tree)
    for file in files:
        if file.edited:
            raise PatchError(f"{file.path} has changes beside the patch: undo those first. Nothing was changed")
        if file.committed is not None and file.committed == file.fit.new:
            raise PatchError(f"{file.path} was committed with the patch: revert that commit")
    todo = [file for file in files if file.patched]
    write([(file, file.committed) for file in todo])
    print(f"{tree}: {f'{len(todo)} files as they were' if todo else 'not patched'}")


def diff(upstream: Upstream, tree: Path) -> None:
    """Print the difference between the tree's commit and its files, then the lines inserted and removed in each."""
    commit, files = read_tree(upstream, tree)
    rows = []
    for file in files:
        old, new = (lines_of(text or b"") for text in (file.committed, file.found))
        lines = list(
            difflib.unified_diff(
                old,
                new,
                f"a/{file.change.path}" if file.committed is not None else "/dev/null",
                f"b/{file.change.path}",
            )
        )
        sys.stdout.writelines(lines)
        counts = [sum(line.startswith(sign) for line in lines[2:]) for sign in "+-"]
        rows.append((file.change.path, *counts, "new file" if file.change.before == NO_FILE else ""))
    print(f"\n{upstream.name}, against {commit[:12]}")
    width = max(len(path) for path, *_ in rows)
    for path, inserted, removed, note in [
        *rows,
        ("total", sum(row[1] for row in rows), sum(row[2] for row in rows), ""),
    ]:
        print(f"  {path:{width}}  +{inserted:<3} -{removed:<3} {note}".rstrip())


def lines_of(text: bytes) -> list[str]:
    """Its lines for showing, each with its end, also the last."""
    lines = text.decode(errors="replace").split("\n")
    return [line + "\n" for line in (lines if lines[-1] else lines[:-1])]


def vendor(upstream: Upstream, tree: Path) -> None:
    """Make `tree` a clone at the commit, from the source that the environment names or else from the repository. Raises PatchError."""
    if tree.exists():
        commit, files = read_tree(upstream, tree)
        if any(file.fit.moved for file in files):
            raise PatchError(f"{tree} is at {commit[:12]}, not {upstream.commit[:12]}: delete it, and run this again")
        print(f"{tree}: there already, at {commit[:12]}")
        return
    given = os.path.expanduser(os.environ.get(upstream.source, ""))
    tree.parent.mkdir(parents=True, exist_ok=True)
    for left in tree.parent.glob(f".{upstream.name}-vendoring-*"):  # of a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(mkdtemp(prefix=f".{upstream.name}-vendoring-", dir=tree.parent))
    try:
        fresh = folder / "tree"
        if given and is_plain_folder(Path(given)):
            adopt(upstream, Path(given), fresh)
        else:
            clone(upstream, given, fresh)
        os.replace(fresh, tree)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{tree}: {upstream.name} at {upstream.commit[:12]}, from {given or upstream.repository}")


def clone(upstream: Upstream, given: str, fresh: Path) -> None:
    source = given or upstream.repository
    if given and ":" not in given and not Path(given).exists():
        raise PatchError(f"{upstream.source}={given}: there is no such folder")
    try:
        git(
            "clone",
            "--quiet",
            "--no-checkout",
            "--config",
            "core.autocrlf=false",
            "--config",
            "core.eol=lf",
            "--",
            Path(given).resolve() if given and Path(given).exists() else source,
            fresh,
        )
    except PatchError as error:
        raise PatchError(
            f"cannot clone {source} ({error}). Set {upstream.source} to a folder or repository that has it"
        ) from None
    try:
        git("checkout", "--quiet", "--detach", upstream.commit, at=fresh)
    except PatchError:
        raise PatchError(
            f"{source} does not have the commit {upstream.commit[:12]}: update it, or unset {upstream.source}"
        ) from None


def is_plain_folder(path: Path) -> bool:
    """Whether it is a folder of files without git, such as an unpacked archive."""
    return path.is_dir() and not (path / ".git").exists() and not (path / "HEAD").exists()


def adopt(upstream: Upstream, folder: Path, fresh: Path) -> None:
    """Copy a folder without git, checking the files that the patches change, and commit it. The commit is therefore not upstream's."""
    for change in upstream.changes():
        path = folder / change.path
        if change.before != NO_FILE and (
            not path.is_file() or git("hash-object", "--no-filters", path.resolve()).decode().strip() != change.before
        ):
            raise PatchError(f"{upstream.source}={folder}: its {change.path} is not that of {upstream.commit[:12]}")
    if fresh.resolve().is_relative_to(folder.resolve()):
        raise PatchError(
            f"{upstream.source}={folder} contains {fresh.parent.parent}, where it would be copied to: give --tree a place outside"
        )
    shutil.copytree(folder, fresh, symlinks=True, ignore=shutil.ignore_patterns(".venv", "__pycache__"))
    git("init", "--quiet", at=fresh)
    git("config", "core.autocrlf", "false", at=fresh)
    git("add", "--all", at=fresh)
    author = ("-c", "user.name=gka", "-c", "user.email=gka@localhost", "-c", "commit.gpgsign=false")
    git(
        *author,
        "-c",
        f"core.hooksPath={os.devnull}",
        "commit",
        "--quiet",
        "--no-verify",
        "--message",
        f"{upstream.name}, the files of {folder.name}",
        at=fresh,
    )


def main(argv: list[str] | None = None) -> int:
    known = read_upstream()
    summary, *details = __doc__.splitlines()
    parser = argparse.ArgumentParser(
        description=summary, epilog="\n".join(details), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["vendor", "apply", "diff", "reverse"])
    parser.add_argument(
        "upstream", nargs="*", help=f"{' or '.join(known)}; all of them if left out", metavar="UPSTREAM"
    )
    parser.add_argument("--tree", type=Path, help="the checkout; default: vendor/UPSTREAM in this project")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="apply: insert into another version of the files too, where every insertion finds its place",
    )
    options = parser.parse_args(argv)
    names = options.upstream or list(known)
    for name in names:
        if name not in known:
            parser.error(f"there is no upstream {name}, only {' and '.join(known)}")
    if options.tree and len(names) > 1:
        parser.error("--tree is for one upstream: name it")
    failed = False
    for name in names:
        tree = options.tree.expanduser() if options.tree else Path(os.path.relpath(PROJECT / "vendor" / name))
        try:
            if options.action == "apply":
                apply(known[name], tree, options.merge)
            else:
                {"vendor": vendor, "diff": diff, "reverse": reverse}[options.action](known[name], tree)
        except (PatchError, shutil.Error) as error:
            failed = True
            print(f"error: {error}", file=sys.stderr)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except OSError as error:
            failed = True
            print(f"error: {error.filename}: {error.strerror}. Nothing was changed in {tree}", file=sys.stderr)
        except KeyboardInterrupt:
            print(f"interrupted; nothing was changed in {tree}", file=sys.stderr)
            return 130
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
