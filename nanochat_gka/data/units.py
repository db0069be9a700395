"""Units of packing work. Each is packed on its own, so that the rows do not depend on the number of processes.

Training rows come in units of a few parquet row groups. Where documents are split, a large row group is cut into
several; whole documents are packed as ever, so that their rows stay the same. A validation file is one unit, and so is
`train_first`, the beginning of the training text once more, for evaluation alone. The rows of these two are those of
nanochat's loader with one process, in its order, until the file's documents have all been read (`upstream_rows` in the
record); nanochat would go on with the next file or epoch there.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from nanochat_gka.data.corpora import ParquetCorpus, document_batches, open_parquet
from nanochat_gka.data.packing import best_fit_rows
from nanochat_gka.data.shards import TRAIN_FIRST
from nanochat_gka.data.tokenizer import Tokenizer
from trainkit_gka.cli import UserError
from trainkit_gka.files import atomic, read_json, sha256, write_json

ROW_GROUPS_PER_UNIT = 8
DOCUMENTS_PER_PART, BYTES_PER_PART = 8192, 2**25  # the least of each in a part of a row group
MOST_PARTS = 8  # a part reads past those before it
FIRST_TOKENS = 20_971_520  # what nanochat evaluates on


@dataclass(frozen=True)
class Unit:
    """A share of the work: row groups [first, last) of one file. The split is "train", "val" or "train_first"."""

    name: str
    split: str
    file: str
    first: int
    last: int

    def batches(self, corpus: Path) -> Iterator[list[str]]:
        """Its documents, as nanochat's loader batches them."""
        return document_batches(corpus / self.file, range(self.first, self.last))


@dataclass(frozen=True)
class GroupPart(Unit):
    """Part `part`, from 0, of `parts` of one row group that is large."""

    part: int
    parts: int

    def batches(self, corpus: Path) -> Iterator[list[str]]:
        return document_batches(corpus / self.file, range(self.first, self.last), (self.part, self.parts))


def plan_units(corpus: ParquetCorpus, cut: bool = False) -> list[Unit]:
    """The corpus in units, the two large ones first: they take longest. cut: large row groups are several units."""
    single = {"val": corpus.files("val"), TRAIN_FIRST: corpus.files("train")[:1]}
    units = [
        Unit(f"{split}_{number:06d}", split, path.name, 0, open_parquet(path).num_row_groups)
        for split, paths in single.items()
        for number, path in enumerate(paths)
    ]
    shares = [(path.name, *share) for path in corpus.files("train") for share in _shares(path, cut)]
    for number, (file, first, last, *part) in enumerate(shares):
        name = f"train_{number:06d}", "train", file, first, last
        units.append(GroupPart(*name, *part) if part else Unit(*name))
    return units


def _shares(path: Path, cut: bool) -> Iterator[tuple[int, ...]]:
    """Row groups [first, last) for each unit of a training file, and which of how many parts for those that are cut."""
    file = open_parquet(path)
    parts = [_parts(file.metadata.row_group(group)) if cut else 1 for group in range(file.num_row_groups)]
    for first in range(0, len(parts), ROW_GROUPS_PER_UNIT):
        last = min(first + ROW_GROUPS_PER_UNIT, len(parts))
        if max(parts[first:last]) == 1:
            yield first, last
        else:
            yield from ((g, g + 1, part, parts[g]) for g in range(first, last) for part in range(parts[g]))


def _parts(group: pq.RowGroupMetaData) -> int:
    """How many units a row group is cut into."""
    usual = max(group.num_rows // DOCUMENTS_PER_PART, group.total_byte_size // BYTES_PER_PART)
    return max(1, min(MOST_PARTS, usual))


def pack_unit(
    unit: Unit, corpus: Path, tokenizer: Tokenizer, sequence_len: int, out: Path, split_documents: bool = False
) -> dict:
    """Pack one unit into `out` and return its record: rows, sha256, and what went in.

    split_documents: as in `best_fit_rows`; the record then counts the pieces, of which each has a BOS.
    """
    started = time.perf_counter()
    stats = {"documents": 0, "bytes": 0, "tokens": 0, "rows": 0} | ({"pieces": 0} if split_documents else {})

    def batches():
        for texts in unit.batches(corpus):
            documents = [tokenizer.encode_document(text) for text in texts]
            stats["documents"] += len(texts)
            stats["bytes"] += sum(len(text.encode()) for text in texts)
            stats["tokens"] += sum(map(len, documents))
            yield documents
        stats["upstream_rows"] = stats["rows"]  # from here on the buffer runs empty

    max_rows = -(-FIRST_TOKENS // sequence_len) if unit.split == TRAIN_FIRST else None
    with atomic(out / f"{unit.name}.bin") as temporary:
        with open(temporary, "wb") as stream:
            for row in islice(best_fit_rows(batches(), sequence_len + 1, split_documents=split_documents), max_rows):
                stream.write(row.astype("<u2").tobytes())
                stats["rows"] += 1
                if split_documents:
                    stats["pieces"] += int(np.count_nonzero(row == tokenizer.bos_id))
        digest = sha256(temporary)
    stats["upstream_rows"] = 0 if split_documents else stats.get("upstream_rows", stats["rows"])
    record = {**asdict(unit), **stats, "sha256": digest, "seconds": round(time.perf_counter() - started, 3)}
    write_json(out / f"{unit.name}.json", record)
    return record


def read_record(unit: Unit, out: Path) -> dict | None:
    """The record of a unit that `out` holds whole, or None if the unit has to be packed."""
    record_path, rows_path = out / f"{unit.name}.json", out / f"{unit.name}.bin"
    if not (record_path.exists() and rows_path.exists()):
        return None
    try:
        record = read_json(record_path, "unit record")
    except UserError:
        return None
    matches = asdict(unit).items() <= record.items()
    return record if matches and sha256(rows_path) == record.get("sha256") else None
