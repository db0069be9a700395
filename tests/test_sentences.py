"""Numbers of prose are those of tables: `<!-- numbers: NAMES -->` before a passage says of which ones."""

import re

import pytest

from sources import FENCE, ROOT, tracked

PASSAGE = re.compile(r"<!-- numbers: ([^>]+) -->\n(.*?)\n<!-- /numbers -->", re.DOTALL)
BLOCK = re.compile(r"<!-- (table|study|printed|bench):(\S+) -->\n(.*?)\n<!-- /\1 -->", re.DOTALL)
NUMBER = r"[-+]?\d+\.\d+"
INTERVAL = re.compile(rf"({NUMBER})(?: points?)? \[({NUMBER}), ({NUMBER})\]")
TEXTS = {path: FENCE.sub("", (ROOT / path).read_text()) for path in tracked(".md")}
TABLES = {name: table for text in TEXTS.values() for _, name, table in BLOCK.findall(text)}
PASSAGES = [(path, names, passage) for path, text in TEXTS.items() for names, passage in PASSAGE.findall(text)]


def parsed(text):
    """The numbers and intervals of a text, without signs: tuples of (value, half a unit of its last digit)."""

    def number(word):
        return abs(float(word)), 0.5 * 10 ** -len(word.partition(".")[2])

    text = " ".join(re.sub(r"`[^`\n]*`", "", text).split())
    found = [(number(value), *sorted(map(number, ends))) for value, *ends in INTERVAL.findall(text)]
    return found + [(number(word),) for word in re.findall(NUMBER, INTERVAL.sub("", text))]


def same(ours, theirs):
    """Whether both have equally many numbers, equal to within what was rounded away."""

    def close(one, other):
        (value, half), (known, smaller) = one, other
        return abs(value - known) <= smaller + (half if half > smaller else 0) + 1e-9

    return len(ours) == len(theirs) and all(map(close, ours, theirs))


@pytest.mark.parametrize("path, names, passage", PASSAGES, ids=[str(path) for path, _, _ in PASSAGES])
def test_numbers_of_a_passage_are_in_its_tables(path, names, passage):
    known = [number for name in names.split() for number in parsed(TABLES[name])]
    # The mean of a table's interval may be quoted alone.
    known += [number[:1] for number in known if len(number) > 1]
    assert not [number for number in parsed(passage) if not any(same(number, other) for other in known)]
