"""Units of packing work, and the processes that pack them: their number does not change the rows.

Training rows come in units of a few parquet row groups. Where documents are split, a large row group is cut into
several; whole documents are packed as ever, so that their rows stay the same. A validation file is one unit, and so is
`train_first`, the beginning of the training text once more, for evaluation alone. The rows of these two are those of
nanochat's loader with one process, in its order, until the file's documents have all been read (`upstream_rows` in the
record); nanochat would go on with the next file or epoch there.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np

from nanochat_gka.data.corpora import ParquetCorpus, document_batches, open_parquet
from nanochat_gka.data.packing import best_fit_rows
from nanochat_gka.data.shards import TRAIN_FIRST, has_fields, shard_fields
from nanochat_gka.data.tokenizer import Tokenizer
from trainkit_gka.cli import UserError
from trainkit_gka.files import atomic, read_json, sha256, write_json
from trainkit_gka.progress import progress_bar, rate
from trainkit_gka.workers import begin, context, cores, interrupt_held_back

ROW_GROUPS_PER_UNIT = 8
DOCUMENTS_PER_PART, BYTES_PER_PART = 8192, 2**25  # the least of each in a part of a row group
MOST_PARTS = 8  # a part reads past those before it
FIRST_TOKENS = 20_971_520  # what nanochat evaluates on


@dataclass(frozen=True)
class PackJob:
    """What is packed, and how: the tokenizer is the one in `out`; split_documents: as in `best_fit_rows`."""

    corpus: Path
    out: Path
    sequence_len: int
    split_documents: bool = False


@dataclass(frozen=True)
class Unit:
    """A share of the work: row groups [first, last) of one file. The split is "train", "val" or "train_first".

    part, parts: which part, from 0, of how many of one row group that is large; None for all of them.
    """

    name: str
    split: str
    file: str
    first: int
    last: int
    part: int | None = None
    parts: int | None = None

    def note(self) -> dict[str, Any]:
        """The fields that records hold."""
        return {key: value for key, value in vars(self).items() if value is not None}

    def batches(self, corpus: Path) -> Iterator[list[str]]:
        """Its documents, as nanochat's loader batches them."""
        return document_batches(corpus / self.file, range(self.first, self.last), (self.part or 0, self.parts or 1))


def plan_units(corpus: ParquetCorpus, split_documents: bool = False) -> list[Unit]:
    """The corpus in units, the large ones first: they take longest.

    split_documents: large row groups are several units, and there is none of `train_first`, for nanochat's first rows
    are of documents that are not split.
    """
    single = {"val": corpus.files("val"), TRAIN_FIRST: [] if split_documents else corpus.files("train")[:1]}
    units = [
        Unit(f"{split}_{number:06d}", split, path.name, 0, open_parquet(path).num_row_groups)
        for split, paths in single.items()
        for number, path in enumerate(paths)
    ]
    shares = ((path.name, *share) for path in corpus.files("train") for share in _shares(path, split_documents))
    return units + [Unit(f"train_{number:06d}", "train", *share) for number, share in enumerate(shares)]


def _shares(path: Path, cut: bool) -> Iterator[tuple[int, ...]]:
    """Row groups [first, last) for each unit of a training file, and which of how many parts for those that are cut."""
    metadata = open_parquet(path).metadata
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    sizes = (max(group.num_rows // DOCUMENTS_PER_PART, group.total_byte_size // BYTES_PER_PART) for group in groups)
    parts = [max(1, min(MOST_PARTS, size)) if cut else 1 for size in sizes]
    for first in range(0, len(parts), ROW_GROUPS_PER_UNIT):
        last = min(first + ROW_GROUPS_PER_UNIT, len(parts))
        if max(parts[first:last]) == 1:
            yield first, last
        else:
            yield from ((g, g + 1, part, parts[g]) for g in range(first, last) for part in range(parts[g]))


def pack_unit(unit: Unit, job: PackJob, tokenizer: Tokenizer) -> dict[str, Any]:
    """Pack one unit into `job.out` and return its record: rows, sha256, and what went in.

    Of split documents the record counts the pieces, of which each has a BOS.
    """
    started = time.perf_counter()
    stats = {"documents": 0, "bytes": 0, "tokens": 0, "rows": 0} | ({"pieces": 0} if job.split_documents else {})

    def batches() -> Iterator[list[np.ndarray]]:
        for texts in unit.batches(job.corpus):
            documents = [tokenizer.encode_document(text) for text in texts]
            stats["documents"] += len(texts)
            stats["bytes"] += sum(len(text.encode()) for text in texts)
            stats["tokens"] += sum(map(len, documents))
            yield documents
        stats["upstream_rows"] = stats["rows"]  # from here on the buffer runs empty

    rows = best_fit_rows(batches(), job.sequence_len + 1, split_documents=job.split_documents)
    max_rows = -(-FIRST_TOKENS // job.sequence_len) if unit.split == TRAIN_FIRST else None
    with atomic(job.out / f"{unit.name}.bin") as temporary:
        with open(temporary, "wb") as stream:
            for row in islice(rows, max_rows):
                stream.write(row.astype("<u2").tobytes())
                stats["rows"] += 1
                if job.split_documents:
                    stats["pieces"] += int(np.count_nonzero(row == tokenizer.bos_id))
        digest = sha256(temporary)
    stats["upstream_rows"] = 0 if job.split_documents else stats.get("upstream_rows", stats["rows"])
    record = {**unit.note(), **stats, "sha256": digest, "seconds": round(time.perf_counter() - started, 3)}
    write_json(job.out / f"{unit.name}.json", record)
    return record


def read_record(unit: Unit, out: Path, split_documents: bool) -> dict[str, Any] | None:
    """The record of a unit of which `out` holds all rows, or None if the unit has to be packed."""
    rows = out / f"{unit.name}.bin"
    try:
        record = read_json(out / f"{unit.name}.json", "unit record")
    except UserError:
        return None
    matches = (
        has_fields(record, shard_fields(split_documents)) and unit.note().items() <= record.items() and rows.exists()
    )
    return record if matches and sha256(rows) == record["sha256"] else None


def pack_units(units: list[Unit], job: PackJob, workers: int) -> tuple[list[dict[str, Any]], float | None]:
    """Pack the units that `job.out` lacks. Those that it holds are checked and stay.

    workers: processes; 0 = one for each core that this process may use. Returns the units' records in order, without
    the seconds they took, and the MB of text that a worker packed in a second, None if nothing was packed. Raises
    UserError if a process is killed.
    """
    processes = max(1, min(workers or cores(), len(units)))
    records = {}
    size = 0
    seconds = 0.0
    reused = 0
    started = time.perf_counter()
    with (
        ProcessPoolExecutor(processes, context("nanochat_gka"), _start_worker, (job,)) as pool,
        progress_bar() as bar,
    ):
        task = bar.add_task("packing", total=len(units), status="")
        try:
            with interrupt_held_back():  # processes start here
                packed = [pool.submit(_pack, unit) for unit in units]
            for future in as_completed(packed):
                record, is_new = future.result()
                # Without the time, records are the same wherever and however often a unit is packed.
                took = record.pop("seconds", 0.0)
                records[record["name"]] = record
                reused += not is_new
                if is_new:
                    size, seconds = size + record["bytes"], seconds + took
                speed = rate(size / 1e6 / (time.perf_counter() - started), "MB/s") if seconds else "checking"
                bar.update(task, advance=1, status=speed)
        except BrokenProcessPool:
            advice = "run the same command again, perhaps with fewer --workers"
            raise UserError(f"a worker process was killed (out of memory?); {advice}") from None
        except BaseException:
            for worker in active_children():
                worker.kill()
            raise
    if reused:
        print(f"{job.out}: {reused} of {len(units)} units were packed before")
    return [records[unit.name] for unit in units], size / 1e6 / seconds if seconds else None


_worker: dict[str, Any] = {}


def _start_worker(job: PackJob) -> None:
    """Load the tokenizer once per process."""
    begin()
    _worker.update(job=job, tokenizer=Tokenizer.load(job.out))


def _pack(unit: Unit) -> tuple[dict[str, Any], bool]:
    """The unit's record, and whether it had to be packed."""
    job = _worker["job"]
    if record := read_record(unit, job.out, job.split_documents):
        return record, False
    return pack_unit(unit, **_worker), True
