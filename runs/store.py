"""What is measured already: a file of results in which every row is one trial, known by a key of what it computes."""

import hashlib
import json
from pathlib import Path
from typing import Any

from trainkit_gka.progress import read_lines
from trainkit_gka.results import append_line


def key_of(computed: dict[str, Any]) -> str:
    """A hash of everything that is computed."""
    return hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest()[:16]


class Store:
    """The rows of a file. kind: of the rows of finished trials."""

    def __init__(self, path: Path, kind: str):
        self.path, self.kind = path, kind

    def rows(self, ending: str = "") -> dict[str, dict[str, Any]]:
        """The rows of the kind by key; the last one of a key counts. ending: of the kind, for rows of another outcome.

        Lines that are cut short or of another version, which have no key, are left out.
        """
        lines = [line for line in read_lines(self.path) if line.get("kind") == self.kind + ending]
        return {line["key"]: line for line in lines if "key" in line}

    def add(self, row: dict[str, Any], ending: str = "") -> None:
        """Append a row of a trial, with its key in it."""
        append_line(self.path, {**row, "kind": self.kind + ending})
