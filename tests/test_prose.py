"""What keeps the pages right: links that resolve, commands and folders that exist."""

import re
from pathlib import Path

import pytest

from sources import FENCE, GENERATED, PACKAGES, ROOT, modules, tracked

URL = re.compile(r"https?://\S+")
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
MAKE = re.compile(r"\bmake(?: -n)?(?: [A-Z_]+=\S+)* ([a-z][a-z0-9{},-]*)")
MODULE = re.compile(rf"-m (?:-- )?((?:{'|'.join(PACKAGES)})(?:\.\w+)*)")
PAGES = tracked(".md")
OF_THEIR_DAY = (Path("runs/log"), Path("CHANGELOG.md"))  # these keep the commands that there were


def page(path):
    """A Markdown page without the tables that programs write."""
    return GENERATED.sub("", (ROOT / path).read_text())


def commands(path):
    """The code of a page: its fenced blocks and its code spans."""
    text = page(path)
    return "\n".join(FENCE.findall(text) + re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))


def anchors(path):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", (ROOT / path).read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def targets():
    """Patterns of the targets that the Makefile has."""
    rules = re.findall(r"^([\w%.][\w%. -]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [re.escape(name).replace("%", ".+") for names in rules for name in names.split()]


def expand(word):
    """`a-{b,c}` is a-b and a-c."""
    choice = re.search(r"\{([^}]*)\}", word)
    if not choice:
        return [word]
    start, end = word[: choice.start()], word[choice.end() :]
    return [each for part in choice[1].split(",") for each in expand(start + part + end)]


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_links_between_pages_resolve(path):
    for target in LINK.findall(FENCE.sub("", (ROOT / path).read_text())):
        if URL.match(target):
            continue
        name, _, anchor = target.partition("#")
        linked = (ROOT / path.parent / name).resolve() if name else ROOT / path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("path", [path for path in PAGES if path != Path("CHANGELOG.md")], ids=str)
def test_make_targets_that_a_page_names_exist(path):
    rules = targets()
    named = {name for word in MAKE.findall(commands(path)) for name in expand(word)}
    assert not [name for name in named if not any(re.fullmatch(rule, name) for rule in rules)]


@pytest.mark.parametrize("path", [p for p in PAGES if p not in OF_THEIR_DAY and p.parent not in OF_THEIR_DAY], ids=str)
def test_modules_that_a_page_runs_can_be_run(path):
    names = modules()
    for name in MODULE.findall(commands(path)):
        program = names.get(f"{name}.__main__", names.get(name))
        assert program is not None, name
        assert '__name__ == "__main__"' in program.read_text() or program.name == "__main__.py", name


def test_the_readme_names_every_folder():
    folders = {path.parts[0] for path in tracked() if len(path.parts) > 1}
    text = (ROOT / "README.md").read_text()
    assert not [name for name in folders if f"{name}/" not in text]


def test_the_page_of_what_trainers_share_names_every_file():
    listed = re.findall(r"^(\w+)/? {2,}", "\n".join(FENCE.findall(page("trainkit_gka/README.md"))), re.MULTILINE)
    parts = {path.parts[1].removesuffix(".py") for path in tracked(".py") if path.parts[0] == "trainkit_gka"}
    assert sorted(listed) == sorted(parts - {"__init__"})
