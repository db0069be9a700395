"""What the Makefile itself says it has: its targets and its settings."""

import re

from sources import ROOT

TEXT = (ROOT / "Makefile").read_text()


def _words(start: str) -> list[str]:
    """The words of a definition or rule, with its continued lines."""
    return re.search(rf"^{start} *((?:.*\\\n)*.*)$", TEXT, re.MULTILINE)[1].replace("\\\n", " ").split()


SETTINGS = _words("SETTINGS +:=")
TARGETS = _words(r"\.PHONY:")
