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
