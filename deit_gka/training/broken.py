"""The broken images that a run meets: the list in its folder, and which of its evaluations could read enough images."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE_NAMES = {"encoding": "utf-8", "errors": "surrogateescape"}  # they may be any bytes
BROKEN_SHARE = 0.01  # of the validation images


class BrokenList:
    """The file broken_images.txt of a run's folder: a line for each, its name and the reason with a tab between.

    A process lists a file once, and none that an earlier run listed.
    """

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
            printable = os.fsencode(name).decode(errors="replace")
            print(f"warning: {printable} cannot be read ({reason}); {consequence}", file=sys.stderr)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", **FILE_NAMES) as file:
                file.write(f"{name}\t{reason}\n")


def best(evaluations: Iterable[dict[str, Any]], metric: str) -> dict[str, Any]:
    """The first of the evaluations with the highest `metric`.

    One that left out many more images than another could not read them for a reason that will pass, such as a slow
    disk, and does not count.
    """
    evaluations = list(evaluations)
    fewest = min(record["broken"] for record in evaluations)
    complete = [
        record
        for record in evaluations
        if record["broken"] - fewest <= BROKEN_SHARE * (record["images"] + record["broken"])
    ]
    return max(complete, key=lambda record: record[metric])
