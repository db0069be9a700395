"""The list of broken images that a run has met: a process reports a file once, and none that an earlier run listed."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

FILE_NAMES = {"encoding": "utf-8", "errors": "surrogateescape"}  # they may be any bytes


class BrokenList:
    """The file broken_images.txt of a run's folder: a line for each, its name and the reason with a tab between."""

    def __init__(self, folder: Path):
        self.path = folder / "broken_images.txt"
        lines = self.path.read_text(**FILE_NAMES).splitlines() if self.path.exists() else []
        self._names = {line.split("\t")[0] for line in lines}

    def report(self, images: Iterable[tuple[str, str]], consequence: str) -> None:
        """Warn of the images, (name, reason), that are new to this process, and add them to the list."""
        for name, reason in images:
            if name in self._names:
                continue
            self._names.add(name)
            shown = os.fsencode(name).decode(errors="replace")
            print(f"warning: {shown} cannot be read ({reason}); {consequence}", file=sys.stderr)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", **FILE_NAMES) as file:
                file.write(f"{name}\t{reason}\n")
