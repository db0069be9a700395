"""Packing documents into rows: nanochat's best-fit algorithm, and the same without its waste."""

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import numpy as np

BUFFER_DOCUMENTS = 1000


def best_fit_rows(
    batches: Iterable[Sequence[np.ndarray]],
    capacity: int,
    buffer_size: int = BUFFER_DOCUMENTS,
    split_documents: bool = False,
) -> Iterator[np.ndarray]:
    """Rows (capacity,) uint16, each opened by a document's first id, of documents (length,) uint16 in batches.

    The buffer holds buffer_size documents or more, filled a batch at a time. The longest document that fits goes next;
    if none fits, the shortest is cut to fill the row and its rest is dropped. The first comes first among equals. A
    last, unfilled row is dropped.

    split_documents: the rest goes back into the buffer as a document, and a new row begins with what fits of the
    longest document, so that nothing but the last row is dropped. A rest opens with the document's first id, BOS, as
    every row must, in place of an id which is in a row already: the documents are used up.
    """
    source, exhausted = iter(batches), False
    lengths: list[tuple[int, int]] = []  # (length, arrival), sorted
    waiting: dict[int, np.ndarray] = {}
    arrivals = count()

    def wait(document: np.ndarray) -> None:
        arrival = next(arrivals)
        waiting[arrival] = document
        insort(lengths, (len(document), arrival))

    row, used = np.empty(capacity, dtype=np.uint16), 0
    while True:
        while len(lengths) < buffer_size and not exhausted:
            batch = next(source, None)
            exhausted = batch is None
            for document in batch or ():
                wait(document)
        if not lengths:
            return
        remaining = capacity - used
        longest = math.inf if split_documents and not used else remaining
        position = bisect_right(lengths, (longest, math.inf)) - 1
        # The longest that fits, and the first of its length; or else the shortest.
        position = bisect_right(lengths, (lengths[position][0], -1)) if position >= 0 else 0
        length, arrival = lengths.pop(position)
        taken = min(length, remaining)
        document = waiting.pop(arrival)
        row[used : used + taken] = document[:taken]
        used += taken
        if split_documents and taken < length:
            rest = document[taken - 1 :]
            rest[0] = document[0]
            wait(rest)
        if used == capacity:
            yield row
            row, used = np.empty(capacity, dtype=np.uint16), 0
