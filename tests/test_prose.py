"""What keeps the pages right: links that resolve, commands and folders that exist."""

import re

import pytest

from sources import FENCE, GENERATED, PACKAGES, ROOT, modules, tracked

PAGES = {str(path): (ROOT / path).read_text() for path in tracked(".md")}
PROSE = {path: FENCE.sub("", text) for path, text in PAGES.items()}
LATEST = [path for path in PAGES if path != "CHANGELOG.md"]
OF_TODAY = [path for path in LATEST if not path.startswith("runs/log/")]  # the log names the modules of its day
MODULES = modules()
TARGETS = re.findall(r"^([\w%.][\w%. -]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
A_TARGET = "|".join(re.escape(name).replace("%", ".+") for names in TARGETS for name in names.split())


def commands(path):
    """The code of a page without the tables that programs write: its fenced blocks and its code spans."""
    text = GENERATED.sub("", PAGES[path])
    return "\n".join(FENCE.findall(text) + re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))


def anchors(path):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", PROSE[path], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def expand(word):
    """`a-{b,c}` is a-b and a-c."""
    start, *choice = re.split(r"\{([^}]*)\}", word, maxsplit=1)
    return [each for part in choice[0].split(",") for each in expand(start + part + choice[1])] if choice else [word]


@pytest.mark.parametrize("path", PAGES)
def test_links_between_pages_resolve(path):
    for target in re.findall(r"\[[^\]]*\]\(([^()\s]+)\)", PROSE[path]):
        if not re.match(r"https?://\S", target):
            name, _, anchor = target.partition("#")
            linked = (ROOT / path).parent.joinpath(name).resolve() if name else ROOT / path
            assert linked.exists(), target
            assert not anchor or anchor in anchors(str(linked.relative_to(ROOT))), target


@pytest.mark.parametrize("path", LATEST)
def test_make_targets_that_a_page_names_exist(path):
    words = re.findall(r"\bmake(?: -n)?(?: [A-Z_]+=\S+)* ([a-z][a-z0-9{},-]*)", commands(path))
    assert not [name for word in words for name in expand(word) if not re.fullmatch(A_TARGET, name)]


@pytest.mark.parametrize("path", OF_TODAY)
def test_modules_that_a_page_runs_can_be_run(path):
    for name in re.findall(rf"-m (?:-- )?((?:{'|'.join(PACKAGES)})(?:\.\w+)*)", commands(path)):
        program = MODULES.get(f"{name}.__main__", MODULES.get(name))
        assert program is not None, name
        assert '__name__ == "__main__"' in program.read_text() or program.name == "__main__.py", name


def test_the_readme_names_every_folder():
    folders = {path.parts[0] for path in tracked() if len(path.parts) > 1}
    assert not [name for name in folders if f"{name}/" not in PAGES["README.md"]]


def test_the_page_of_what_trainers_share_names_every_file():
    listed = re.findall(r"(?m)^(\w+)/? {2,}", "\n".join(FENCE.findall(PAGES["trainkit_gka/README.md"])))
    parts = {path.parts[1].removesuffix(".py") for path in tracked(".py") if path.parts[0] == "trainkit_gka"}
    assert sorted(listed) == sorted(parts - {"__init__"})
