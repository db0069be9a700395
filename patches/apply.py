"""Insert GKA into a checkout of upstream nanochat or DeiT, show the difference, and remove it again. Needs only git.

    python patches/apply.py vendor                            clone both at their commits into vendor/
    python patches/apply.py apply                             insert the lines
    python patches/apply.py diff                              show the difference from the commit, and lines per file
    python patches/apply.py reverse                           remove the lines
    python patches/apply.py apply nanochat --tree ~/nanochat  do the same in another checkout

If NANOCHAT_SRC or DEIT_SRC names a checkout, a bare repository or a folder of files, `vendor` takes that instead of the
network. The patches have no context lines, and git would insert such lines by number alone. They are therefore applied
to the versions of the files for which they were made, taken from the tree's history, and both versions are merged with
the tree's: all lines go in, or none if a line does not fit.
"""

import argparse
import configparser
import functools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

PATCHES = Path(__file__).resolve().parent
NO_FILE = "0" * 40  # git's id for the content of a file that a patch creates
HEADER = re.compile(r"^diff --git a/(\S+) b/\S+\n(?:new file mode \d+\n)?index ([0-9a-f]{40})\.\.", re.MULTILINE)
NO_CONFIG = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


class PatchError(Exception):
    """An error that the user can correct; the message says how."""


@functools.cache
def environment() -> dict[str, str]:
    """The environment without the variables by which git names a hook's repository."""
    command = ["git", "rev-parse", "--local-env-vars"]
    local = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {name: value for name, value in os.environ.items() if name not in local}


def git(*arguments: str | Path, at: Path, stdin: bytes = b"", **variables: str) -> bytes:
    """The output of git for the repository in `at`, never for one around it.

    variables: added to the environment. Raises PatchError with git's errors in one line.
    """
    settings = {**environment(), "GIT_CEILING_DIRECTORIES": str(at.resolve().parent), **variables}
    done = subprocess.run(["git", "-C", at, *arguments], env=settings, input=stdin, capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        errors = [re.sub("^(error|fatal): ", "", line) for line in lines if line.startswith(("error: ", "fatal: "))]
        raise PatchError("; ".join(errors) or lines[-1])
    return done.stdout


def commit_of(tree: Path) -> str:
    """The first digits of the commit that is checked out."""
    return git("rev-parse", "--short=12", "HEAD", at=tree).decode().strip()


@dataclass(frozen=True)
class Upstream:
    """One section of the file UPSTREAM. source: the environment variable that names another source than the network."""

    name: str
    repository: str
    commit: str
    source: str
    patches: list[Path]

    def files(self) -> dict[str, str]:
        """The files that the patches change, with the git id of each file before its first patch."""
        return dict(
            reversed([header for patch in self.patches for header in HEADER.findall(patch.read_text(encoding="utf-8"))])
        )


def read_upstream() -> dict[str, Upstream]:
    """The sections of UPSTREAM by name."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(PATCHES / "UPSTREAM", encoding="utf-8")
    upstreams = {}
    for name in config.sections():
        section = config[name]
        patches = [PATCHES / name / line.split()[0] for line in section["patches"].splitlines() if line]
        upstreams[name] = Upstream(name, section["repository"], section["commit"], section["source"], patches)
    return upstreams


def changed_files(upstream: Upstream, tree: Path) -> list[str]:
    """The patched files whose version in the tree's commit is not the one before the patches. Raises PatchError."""
    if not tree.is_dir():
        raise PatchError("there is no such folder: run `make vendor`, or give --tree")
    listing = git("ls-tree", "-r", "HEAD", at=tree).decode().splitlines()
    ids = {path: entry.split()[2] for entry, _, path in (line.partition("\t") for line in listing)}
    return [path for path, blob in upstream.files().items() if ids.get(path, NO_FILE) != blob]


def merged(upstream: Upstream, tree: Path, undo: bool = False) -> tuple[dict[Path, bytes], list[str]]:
    """The files that inserting the patches, or with `undo` removing them, changes, with their new content.

    A file that the patches create is empty without them. The second value are files with a line that does not fit.
    Raises PatchError if the tree's history lacks a file before the patches.
    """
    changed, conflicts = {}, []
    with TemporaryDirectory() as name:
        before, after, ours = (Path(name) / part for part in ("before", "after", "ours"))
        for path, blob in upstream.files().items():
            try:
                content = b"" if blob == NO_FILE else git("cat-file", "blob", blob, at=tree)
            except PatchError:
                problem = f"its history lacks the {path} of {upstream.commit[:12]}"
                raise PatchError(f"{problem}: run git fetch, with --unshallow in a shallow clone") from None
            for folder in (before, after) if content else (before,):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)
        git("apply", "--unidiff-zero", *upstream.patches, at=after, **NO_CONFIG)
        base, other = (after, before) if undo else (before, after)
        for path in upstream.files():
            content = (tree / path).read_bytes() if (tree / path).is_file() else b""
            ours.write_bytes(content)
            try:
                result = git("merge-file", "-p", ours, base / path, other / path, at=Path(name))
            except PatchError:
                conflicts.append(path)
            else:
                changed |= {tree / path: result} if result != content else {}
    return changed, conflicts


def write(files: dict[Path, bytes]) -> None:
    """Write the files, and delete those that are empty."""
    for path, content in files.items():
        if content:
            path.write_bytes(content)
        else:
            path.unlink()


def apply(upstream: Upstream, tree: Path, merge: bool) -> None:
    """Insert the patches' lines. Raises PatchError, with nothing written, if one does not fit or needs `merge`."""
    other_version = changed_files(upstream, tree)
    versions = f"the tree is at {commit_of(tree)}, the patches are for {upstream.commit[:12]}"
    pin = f"git -C {tree} checkout {upstream.commit[:12]}"
    files, conflicts = merged(upstream, tree)
    if conflicts:
        advice = f"{versions}; take that commit: {pin}" if other_version else "undo your changes there first"
        raise PatchError(f"not all insertions fit ({', '.join(conflicts)}), so nothing was changed; {advice}")
    if files and other_version and not merge:
        raise PatchError(
            f"{versions}, and {', '.join(other_version)} changed in between; all insertions find a place: "
            f"insert them with --merge, and test; or take that commit: {pin}"
        )
    write(files)
    print(f"{tree}: {len(files)} files patched" if files else f"{tree}: already patched")


def reverse(upstream: Upstream, tree: Path) -> None:
    """Remove the patches' lines. Raises PatchError, with nothing written, if they are not there as they were made."""
    changed_files(upstream, tree)  # which raises for what is not a tree
    files, conflicts = merged(upstream, tree, undo=True)
    if conflicts:
        where = f"the patches are not all there ({', '.join(conflicts)})"
        raise PatchError(f"{where}, so nothing was changed; undo your changes there first")
    write(files)
    print(f"{tree}: patches taken out of {len(files)} files" if files else f"{tree}: not patched")


def show(upstream: Upstream, tree: Path) -> None:
    """Print the diff of the patched files against the tree's commit, then the number of lines inserted in each."""
    new = [path for path, blob in upstream.files().items() if blob == NO_FILE and (tree / path).exists()]
    with TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": os.path.join(folder, "index")}  # git diff shows new files that the index knows
        git("read-tree", "HEAD", at=tree, **index)
        git("add", "--intent-to-add", "--force", "--", *new, at=tree, **index)
        print(f"{upstream.name}, against {commit_of(tree)}")
        for form in (["--patch"], ["--stat", "--summary"]):
            text = git("diff", *form, "HEAD", "--", *upstream.files(), at=tree, **index)
            print(text.decode(errors="replace"))


def vendor(upstream: Upstream, tree: Path) -> None:
    """Make `tree` a checkout of the commit, from the source named by the environment, else from the network."""
    if tree.exists():
        if changed_files(upstream, tree):
            raise PatchError(f"this is not {upstream.name} at {upstream.commit[:12]}: delete it, and run this again")
        print(f"{tree}: already there")
        return
    source = os.path.expanduser(os.environ.get(upstream.source, "")) or upstream.repository
    tree.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{upstream.name}-", dir=tree.parent) as folder:
        fresh = Path(folder) / "tree"
        if os.path.isdir(source) and not {".git", "HEAD"} & set(os.listdir(source)):
            copy(upstream, Path(source), fresh)
        else:
            clone(upstream, os.path.abspath(source) if os.path.exists(source) else source, fresh)
        fresh.rename(tree)
    print(f"{tree}: {upstream.name} at {upstream.commit[:12]}, from {source}")


def clone(upstream: Upstream, source: str, fresh: Path) -> None:
    """Clone a repository that has the commit. Raises PatchError."""
    try:
        git("clone", "--quiet", "--no-checkout", "-c", "core.autocrlf=false", "--", source, "tree", at=fresh.parent)
        git("checkout", "--quiet", "--detach", upstream.commit, at=fresh)
    except PatchError as error:
        advice = f"set {upstream.source} to a folder or repository that has it"
        raise PatchError(f"cannot get {upstream.commit[:12]} from {source} ({error}); {advice}") from None


def copy(upstream: Upstream, source: Path, fresh: Path) -> None:
    """Copy a folder without git and commit its files, which gives another commit than upstream's. Raises PatchError."""
    shutil.copytree(source, fresh, symlinks=True, ignore=shutil.ignore_patterns(".venv", "__pycache__"))
    git("init", "--quiet", at=fresh, **NO_CONFIG)
    git("config", "core.autocrlf", "false", at=fresh)
    git("add", "--all", at=fresh, **NO_CONFIG)
    author = ("-c", "user.name=gka", "-c", "user.email=gka@localhost")
    git(*author, "commit", "--quiet", "--message", f"{upstream.name}, the files of {source}", at=fresh, **NO_CONFIG)
    if changed := changed_files(upstream, fresh):
        raise PatchError(f"{upstream.source}={source}: its {changed[0]} is not that of {upstream.commit[:12]}")


def main(argv: list[str] | None = None) -> int:
    known = read_upstream()
    summary, _, details = __doc__.partition("\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=form)
    parser.add_argument("action", choices=["vendor", "apply", "diff", "reverse"])
    parser.add_argument("upstream", nargs="*", metavar="UPSTREAM", help=f"{' or '.join(known)}. Default: all of them.")
    parser.add_argument("--tree", type=Path, help="The checkout. Default: vendor/UPSTREAM in this project.")
    merge = "For apply: insert into another version of the files, too, if every insertion finds its place there."
    parser.add_argument("--merge", action="store_true", help=merge)
    options = parser.parse_args(argv)
    names = options.upstream or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no upstream {unknown[0]}, only {' and '.join(known)}")
    if options.tree and len(names) > 1:
        parser.error("--tree is for one upstream: name it")
    if not shutil.which("git"):
        print("error: git is not installed, or not on the PATH", file=sys.stderr)
        return 2
    insert = functools.partial(apply, merge=options.merge)
    action = {"vendor": vendor, "apply": insert, "diff": show, "reverse": reverse}[options.action]
    status = 0
    for name in names:
        tree = Path(os.path.expanduser(options.tree or os.path.relpath(PATCHES.parent / "vendor" / name)))
        try:
            action(known[name], tree)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (PatchError, OSError) as error:
            print(f"error: {tree}: {error}", file=sys.stderr)
            status = 2
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
