"""Packing a small corpus, and what it leaves on disk."""

from pathlib import Path

from nanochat_gka import pack


def config(root: Path, out: Path, **changes) -> pack.PackConfig:
    """To pack `root`/corpus with `root`/tokenizer into nanochat's rows, by one process."""
    inputs = {"corpus": root / "corpus", "tokenizer": root / "tokenizer", "split_documents": "no"}
    return pack.PackConfig(**{**inputs, "out": out, "sequence_len": 32, "workers": 1, **changes})


def bins(out: Path) -> dict[str, bytes]:
    """The contents of all shards."""
    return {path.name: path.read_bytes() for path in out.glob("*.bin")}


def cut(documents: list, size: int) -> list[list]:
    """Batches of `size`, the last one shorter."""
    return [documents[first : first + size] for first in range(0, len(documents), size)]


def literal_best_fit(batches: list[list[list[int]]], capacity: int, buffer_size: int) -> list[list[int]]:
    """The rule as upstream words it, with plain lists."""
    waiting, buffer, rows, row = list(batches), [], [], []
    while True:
        while len(buffer) < buffer_size and waiting:
            buffer = buffer + waiting.pop(0)
        if not buffer:
            return rows
        room = capacity - len(row)
        fitting = [i for i, doc in enumerate(buffer) if len(doc) <= room]
        if fitting:
            chosen = max(fitting, key=lambda i: (len(buffer[i]), -i))
        else:
            chosen = min(range(len(buffer)), key=lambda i: (len(buffer[i]), i))
        row = row + buffer.pop(chosen)[:room]
        if len(row) == capacity:
            rows, row = [*rows, row], []
