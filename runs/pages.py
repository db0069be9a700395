"""Pages that commands write from code and result files: bring them up to date, or say which are not."""

import sys
from pathlib import Path


def update(folder: Path, pages: dict[str, str], command: str, check: bool) -> None:
    """Write the pages of `folder` (name -> text) that say something else, and print what was done with each.

    check: write nothing, and exit with 1 if there are such pages. command: what brings them up to date.
    """
    stale = [name for name, text in pages.items() if not _says(folder / name, text)]
    for name in pages:
        if check and name in stale:
            print(f"{name} is out of date: run {command}", file=sys.stderr)
        elif name in stale:
            (folder / name).write_text(pages[name])
            print(f"{folder / name}: written")
        else:
            print(f"{folder / name}: says it already")
    if check and stale:
        sys.exit(1)


def _says(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text
