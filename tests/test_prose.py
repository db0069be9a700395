"""What keeps the pages right: commands that exist, numbers of tables in the text. `make site` checks the links."""

import re

import pytest

from gka.dispatch import IMPLEMENTATIONS
from gka.validation import FLOATING
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


def expand(word):
    """`a-{b,c}` is a-b and a-c."""
    start, *choice = re.split(r"\{([^}]*)\}", word, maxsplit=1)
    return [each for part in choice[0].split(",") for each in expand(start + part + choice[1])] if choice else [word]


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


# Numbers of prose are those of tables: `<!-- numbers: NAMES -->` before a passage says of which ones.

PASSAGE = re.compile(r"<!-- numbers: ([^>]+) -->\n(.*?)\n<!-- /numbers -->", re.DOTALL)
BLOCK = re.compile(r"<!-- (table|study|printed|bench):(\S+) -->\n(.*?)\n<!-- /\1 -->", re.DOTALL)
NUMBER = r"[-+]?\d+\.\d+"
INTERVAL = re.compile(rf"({NUMBER})(?: points?)? \[({NUMBER}), ({NUMBER})\]")
TABLES = {}
for text in PROSE.values():
    for _, name, table in BLOCK.findall(text):  # a name may stand on several pages
        TABLES[name] = TABLES.get(name, "") + table + "\n"
PASSAGES = [(path, names, passage) for path, text in PROSE.items() for names, passage in PASSAGE.findall(text)]


def parsed(text):
    """The numbers and intervals of a text, without signs: tuples of (value, half a unit of its last digit)."""
    text = " ".join(re.sub(r"`[^`\n]*`", "", text).split())
    words = [*INTERVAL.findall(text), *((word,) for word in re.findall(NUMBER, INTERVAL.sub("", text)))]
    numbers = [[(abs(float(word)), 0.5 * 10 ** -len(word.partition(".")[2])) for word in one] for one in words]
    return [(value, *sorted(ends)) for value, *ends in numbers]


def same(quoted, known):
    """Whether both have equally many numbers, equal to within the digits that were rounded away."""
    if len(quoted) != len(known):
        return False
    pairs = [(abs(a - b), half, finer) for (a, half), (b, finer) in zip(quoted, known)]
    return all(distance <= finer + (half if half > finer else 0) + 1e-9 for distance, half, finer in pairs)


@pytest.mark.parametrize("path, names, passage", PASSAGES, ids=[str(path) for path, _, _ in PASSAGES])
def test_numbers_of_a_passage_are_in_its_tables(path, names, passage):
    known = [number for name in names.split() for number in parsed(TABLES[name])]
    known += [number[:1] for number in known if len(number) > 1]  # the mean of an interval may be quoted alone
    assert not [number for number in parsed(passage) if not any(same(number, other) for other in known)]


# The table of docs/use-in-your-model.md that says what each implementation serves

ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")]
    for line in PAGES["docs/use-in-your-model.md"].splitlines()
    if re.match(r"\| `(impl|reference|triton|cpu|flex|sdpa)` \|", line)
]
TABLE = {row[0]: dict(zip(ROWS[0], row)) for row in ROWS if len(row) == len(ROWS[0])}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_page_says_what_an_implementation_serves(name):
    row, serves = TABLE[name], IMPLEMENTATIONS[name].SERVES
    for option in ("causal", "window", "lengths", "attn_mask", "cu_seqlens"):
        assert (row[option] == "yes") == (option in serves.options), option
    padding = "yes" if "key_padding_mask" in serves.options else "packed" if "lengths" in serves.options else "no"
    assert row["key_padding_mask"] == padding
    assert (row["forward mode"] == "yes") == ("forward_mode" in serves.options)
    missing = [str(dtype).removeprefix("torch.") for dtype in FLOATING if dtype not in serves.dtypes]
    assert row["dtypes"] == (f"all but {', '.join(missing)}" if missing else "all")
    most, least = serves.max_head_dim, serves.min_head_dim
    assert row["head_dim"] == (f"up to {most}" if most else f"{least} or more" if least > 1 else "any")
    assert row["eps"] == ("applied" if serves.applies_eps else "dropped")
