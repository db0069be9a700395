"""Packing documents into rows: nanochat's best-fit algorithm."""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

BUFFER_DOCUMENTS = 1000


def best_fit_rows(
    batches: Iterable[Sequence[np.ndarray]], capacity: int, buffer_size: int = BUFFER_DOCUMENTS
) -> Iterator[np.ndarray]:
    """Rows (capacity,) uint16, each opened by a document's first id, of documents (length,) uint16 in batches.

    The buffer is kept at buffer_size documents or more, a batch at a time. The longest document that fits whole goes
    next; if none fits, the shortest is cut to fill the row and its rest is dropped. The first comes first among equals.
    A last, unfilled row is dropped.
    """
    source = iter(batches)
    lengths: list[tuple[int, int]] = []  # (length, arrival), sorted
    waiting: dict[int, np.ndarray] = {}
    arrived, exhausted = 0, False
    row, used = np.empty(capacity, dtype=np.uint16), 0
    while True:
        while len(lengths) < buffer_size and not exhausted:
            batch = next(source, None)
            exhausted = batch is None
            for document in batch or ():
                waiting[arrived] = document
                insort(lengths, (len(document), arrived))
                arrived += 1
        if not lengths:
            return
        remaining = capacity - used
        position = bisect_right(lengths, (remaining, arrived)) - 1
        if position >= 0:  # the longest that fits; step back to the first of its length
            position = bisect_right(lengths, (lengths[position][0], -1))
        else:
            position = 0
        length, index = lengths.pop(position)
        taken = min(length, remaining)
        row[used : used + taken] = waiting.pop(index)[:taken]
        used += taken
        if used == capacity:
            yield row
            row, used = np.empty(capacity, dtype=np.uint16), 0
