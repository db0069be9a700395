"""Documents -> packed rows of T + 1 token ids on disk: in parallel, resumable, checksummed.

    python -m nanochat_gka.pack --corpus out/corpus/fineweb --tokenizer out/tokenizer --out out/packed

The work is cut into units. Each is packed on its own (so the result does not depend on the number of workers) into `<split>_<unit>.bin`,
uint16 rows back to back, with its statistics and sha256 beside it. A killed run continues with the units that are missing. The manifest
is written last; the folder then holds everything a training run needs, tokenizer included.

Training rows come in units of a few parquet row groups. The validation file is one unit, and so is `train_first`, the beginning of the
training text once more, for evaluation alone. The rows of these two are those of nanochat's loader with one process, in its order, until
the file's documents have all been read (`upstream_rows` in the manifest); nanochat would go on with the next file or epoch there.
"""

import os
import time
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Annotated

import numpy as np

from nanochat_gka.corpus import SPLITS, ParquetCorpus, document_batches, open_parquet
from nanochat_gka.tokenizer import Tokenizer
from trainkit.cli import Bounds, UserError, check_bounds, run
from trainkit.files import atomic, locked, read_json, remove_stale_temporaries, sha256, write_json
from trainkit.progress import progress_bar
from trainkit.workers import begin, context

FORMAT = 1
ROW_GROUPS_PER_UNIT = 8
BUFFER_DOCUMENTS = 1000
FIRST = "train_first"
FIRST_TOKENS = 20_971_520  # what nanochat evaluates on
MANIFEST = "manifest.json"
PLAN = "plan.json"


def best_fit_rows(
    batches: Iterable[Sequence[np.ndarray]], capacity: int, buffer_size: int = BUFFER_DOCUMENTS
) -> Iterator[np.ndarray]:
    """nanochat's packing: rows of exactly `capacity` ids, each opened by a document's first id.

    The buffer is kept at >= buffer_size documents, a batch at a time. The longest one that fits whole goes next; if none fits, the
    shortest is cut to fill the row and its rest is dropped. The first comes first among equals. A last, unfilled row is dropped.
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


@dataclass(frozen=True)
class Unit:
    """A share of the work: row groups [first, last) of one file. The split is "train", "val" or "train_first"."""

    name: str
    split: str
    file: str
    first: int
    last: int


def plan_units(corpus: ParquetCorpus) -> list[Unit]:
    """The corpus cut into units, the two large ones first: they take longest."""
    units = []
    for split, path in (("val", corpus.files("val")[0]), (FIRST, corpus.files("train")[0])):
        units.append(Unit(f"{split}_000000", split, path.name, 0, open_parquet(path).num_row_groups))
    number = 0
    for path in corpus.files("train"):
        groups = open_parquet(path).num_row_groups
        for first in range(0, groups, ROW_GROUPS_PER_UNIT):
            units.append(
                Unit(f"train_{number:06d}", "train", path.name, first, min(first + ROW_GROUPS_PER_UNIT, groups))
            )
            number += 1
    return units


def pack_unit(unit: Unit, corpus: Path, tokenizer: Tokenizer, sequence_len: int, out: Path) -> dict:
    """Pack one unit to disk and return its record: rows, sha256, and what went in."""
    started = time.perf_counter()
    stats = {"documents": 0, "bytes": 0, "tokens": 0, "rows": 0}

    def batches():
        for texts in document_batches(corpus / unit.file, range(unit.first, unit.last)):
            documents = [tokenizer.encode_document(text) for text in texts]
            stats["documents"] += len(texts)
            stats["bytes"] += sum(len(text.encode()) for text in texts)
            stats["tokens"] += sum(map(len, documents))
            yield documents
        stats["upstream_rows"] = stats["rows"]  # from here on the buffer runs empty

    most = -(-FIRST_TOKENS // sequence_len) if unit.split == FIRST else None
    path = out / f"{unit.name}.bin"
    with atomic(path) as temporary:
        with open(temporary, "wb") as stream:
            for row in islice(best_fit_rows(batches(), sequence_len + 1), most):
                stream.write(row.astype("<u2").tobytes())
                stats["rows"] += 1
        digest = sha256(temporary)
    stats.setdefault("upstream_rows", stats["rows"])
    record = {**asdict(unit), **stats, "sha256": digest, "seconds": round(time.perf_counter() - started, 3)}
    write_json(out / f"{unit.name}.json", record)
    return record


_worker: dict = {}


def _start_worker(tokenizer_folder: Path) -> None:
    """Load the tokenizer once per process."""
    begin()
    _worker["tokenizer"] = Tokenizer.load(tokenizer_folder)


def _work(unit: Unit, corpus: Path, sequence_len: int, out: Path) -> dict:
    return pack_unit(unit, corpus, _worker["tokenizer"], sequence_len, out)


@dataclass
class PackConfig:
    """Tokenise a corpus and pack it into training rows. Continues where it stopped; does nothing if everything is there."""

    corpus: Path = Path("out/corpus/builtin")
    """folder of parquet files"""
    tokenizer: Path = Path("out/tokenizer")
    """folder of tokenizer.json"""
    out: Path = Path("out/packed")
    """folder for the packed rows"""
    sequence_len: Annotated[int, Bounds(1, 2**20)] = 2048
    """context length T; rows hold T + 1 ids"""
    workers: Annotated[int, Bounds(0)] = 0
    """processes; 0 = one per core"""


def main(config: PackConfig) -> None:
    check_bounds(config)
    corpus, tokenizer = ParquetCorpus(config.corpus), Tokenizer.load(config.tokenizer)
    identity = {
        "format": FORMAT,
        "sequence_len": config.sequence_len,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "source": [[path.name, path.stat().st_size] for path in corpus.paths()],
    }
    with locked(config.out, "packing"):
        remove_stale_temporaries(config.out)
        _check_identity(config.out, identity)
        tokenizer.save(config.out)
        if manifest := _reusable(config.out):
            print(f"{config.out}: reusing the tokenised data that is there ({_summary(manifest)})")
            return
        (config.out / MANIFEST).unlink(missing_ok=True)
        write_json(config.out / PLAN, identity)
        records, seconds = _pack_all(config, plan_units(corpus))
        manifest = {**identity, "corpus": str(config.corpus), "shards": records}
        if not all(any(r["rows"] for r in records if r["split"] == split) for split in SPLITS):
            for name in (
                *(f"{r['name']}.{end}" for r in records for end in ("bin", "json")),
                PLAN,
            ):  # the plan last: it guards the others
                (config.out / name).unlink()
            raise UserError(
                f"the corpus is too small for rows of {config.sequence_len} tokens: {_summary(manifest)}; lower --sequence-len"
            )
        write_json(config.out / MANIFEST, manifest)
        _remove_others(config.out, records)
        new_bytes = sum(r["bytes"] for r in records if r["new"])
        busy = sum(r["seconds"] for r in records if r["new"]) or 1.0
        print(
            f"{config.out}: {_summary(manifest)}; {new_bytes / 1e6 / busy:.1f} MB/s of text per worker, {seconds:.1f} s"
        )


def _pack_all(config: PackConfig, units: list[Unit]) -> tuple[list[dict], float]:
    """Pack what is missing. Returns the records in order and the wall-clock seconds."""
    done = {unit.name: record for unit in units if (record := _finished(config.out, unit))}
    todo = [unit for unit in units if unit.name not in done]
    if done:
        print(f"{config.out}: continuing, {len(done)} of {len(units)} units are there")
    workers = max(1, min(config.workers or os.cpu_count() or 1, len(todo)))
    started = time.perf_counter()
    with (
        ProcessPoolExecutor(workers, context("nanochat_gka"), _start_worker, (config.out,)) as pool,
        progress_bar() as bar,
    ):
        task = bar.add_task("packing", total=len(units), completed=len(done), status="")
        total = 0
        try:
            futures = [pool.submit(_work, unit, config.corpus, config.sequence_len, config.out) for unit in todo]
            for future in as_completed(futures):
                record = future.result()
                done[record["name"]] = {**record, "new": True}
                total += record["bytes"]
                bar.update(task, advance=1, status=f"{total / 1e6 / (time.perf_counter() - started):.1f} MB/s")
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed (out of memory?); run the same command again, perhaps with fewer --workers"
            ) from None
        except BaseException:
            for worker in active_children():
                worker.kill()
            raise
    return [{"new": False, **done[unit.name]} for unit in units], time.perf_counter() - started


def _finished(out: Path, unit: Unit) -> dict | None:
    """The record of a unit that is on disk, whole; None if it has to be packed."""
    record_path, rows_path = out / f"{unit.name}.json", out / f"{unit.name}.bin"
    if not (record_path.exists() and rows_path.exists()):
        return None
    try:
        record = read_json(record_path, "unit record")
    except UserError:
        return None
    # An earlier version cut the validation text otherwise.
    known = set() if unit.split == "train" else {"upstream_rows"}
    whole = asdict(unit).items() <= record.items() and record.keys() >= known
    return record if whole and sha256(rows_path) == record.get("sha256") else None


def _remove_others(out: Path, records: list[dict]) -> None:
    """Delete units that an earlier version cut otherwise."""
    names = {record["name"] for record in records}
    for path in out.glob("*_*.bin"):
        if path.stem not in names:
            path.unlink()
            path.with_suffix(".json").unlink(missing_ok=True)


def _reusable(out: Path) -> dict | None:
    """The manifest of a folder where nothing is missing or truncated (content is the loader's to check); None if there is work to do."""
    try:
        manifest = read_json(out / MANIFEST, "manifest")
    except UserError:
        return None
    return manifest if wrong_size(out, manifest) is None else None


def wrong_size(folder: Path, manifest: dict) -> str | None:
    """Which shard is missing or truncated; None if there is none."""
    for shard in manifest["shards"]:
        path, expected = shard_path(folder, shard), shard["rows"] * (manifest["sequence_len"] + 1) * 2
        if not path.is_file():
            return f"shard {path} is missing"
        if path.stat().st_size != expected:
            return f"shard {path} is truncated: {path.stat().st_size} bytes instead of {expected}"
    return None


def shard_path(folder: Path, shard: dict) -> Path:
    """The rows of one of the manifest's shards."""
    return folder / f"{shard['name']}.bin"


def _check_identity(out: Path, identity: dict) -> None:
    """Refuse to mix rows of another tokenizer, length or corpus into a folder."""
    if not (out / PLAN).exists():
        return
    there = read_json(out / PLAN, "packing plan")
    for key, words in (("tokenizer_sha256", "another tokenizer"), ("sequence_len", f"sequence length {there.get('sequence_len')}"), ("source", "other corpus files"), ("format", "another format")):  # fmt: skip
        if there.get(key) != identity[key]:
            raise UserError(f"{out} was packed with {words}; choose another --out or delete it")


def _summary(manifest: dict) -> str:
    rows = {split: sum(r["rows"] for r in manifest["shards"] if r["split"] == split) for split in SPLITS}
    tokens = sum(r["tokens"] for r in manifest["shards"] if r["split"] in SPLITS)
    kept = sum(rows.values()) * (manifest["sequence_len"] + 1)
    lost = 1 - kept / max(1, tokens)
    return f"{rows['train']:,} training and {rows['val']:,} validation rows of {manifest['sequence_len']} tokens, {lost:.0%} of {tokens:,} tokens cropped"


if __name__ == "__main__":
    run(main, PackConfig)
