"""What the Makefile itself says it has: its targets and its settings."""

import re

from sources import ROOT

TEXT = (ROOT / "Makefile").read_text()


def _words(start: str) -> list[str]:
    """The words of a definition or rule, with its continued lines."""
    return re.search(rf"^{start} *((?:.*\\\n)*.*)$", TEXT, re.MULTILINE)[1].replace("\\\n", " ").split()


SETTINGS = _words("SETTINGS +:=")
TARGETS = [name for names in re.findall(r"^([a-z0-9 -]+): launch  ##", TEXT, re.MULTILINE) for name in names.split()]
# The files of runs/ that make runs before there is an environment.
RECIPES = ("paper/gpt_d20_gka", "paper/gpt_d20_softmax", "study/gpt_d20_best", "study/gpt_small")
LAUNCHER = ("make", "commands", "settings", *RECIPES)
