"""Corpora: folders of parquet files with a string column `text`, read document by document.

Where file names say which are for training and which for validation, they decide; otherwise files are taken in name
order, the last one is the validation split and the others are training, as in nanochat, unless its name says train.
"""

import contextlib
import hashlib
import io
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_gka.data import SPLITS
from trainkit_gka.cli import UserError, reason_of
from trainkit_gka.files import read_json, write_json

COLUMN = "text"
NOTE = "source.json"  # of what a corpus that we made is made of
ROW_GROUP = 1024  # documents, as in nanochat's shards
GROUP_BYTES = 2**24  # of documents that are held in memory until they are written
DOCUMENT_BATCH = 128  # documents that nanochat's loader tokenises at once
BUFFER = 2**20  # bytes of a file that are read at once
SAMPLES, SAMPLE = 16, 2**16  # blocks and their bytes, in a checksum that is quick for any file
MUCH_HELD_OUT = 0.05
ENDINGS = re.compile(r"(\.(txt|md|jsonl|json|parquet|gz|zst))+$")
SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLIT_NAMES.update(dict.fromkeys(("val", "valid", "validation", "dev"), "val"))


class ParquetCorpus:
    """A folder of parquet files. names: all of them. splits: those of "train" and "val".

    Raises UserError if the folder is absent or has fewer than two files, if a file is unreadable or has no text in its
    column, or if a split has none.
    """

    def __init__(self, folder: Path):
        if not folder.exists():
            raise UserError(f"corpus folder not found: {folder} (python -m nanochat_gka.corpus makes one)")
        names = top_parquet(folder)
        command = f"python -m nanochat_gka.corpus --source {shlex.quote(str(folder))} --out FOLDER"
        if len(names) < 2:
            rule = f"needs at least two .parquet files (the last by name is the validation split), found {len(names)}"
            raise UserError(f"{folder} {rule}; other files of text become such a folder by: {command}")
        self.folder = folder
        self.names = names
        self.splits = deal(names)
        last = self.splits["val"][-1]
        if _split_in_name(last) == "train":
            rule = f"{last} is the last file and would be held out, but its name says train"
            raise UserError(f"{folder}: {rule}; 1 % of the text is held out by: {command}")
        for path in self.paths():
            open_parquet(path)
        for split, chosen in self.splits.items():
            if not any(self.documents(split)):
                empty = f"column {COLUMN} of {first_names(chosen)} is empty"
                raise UserError(f"{folder} has no text for the {split} split: {empty}")

    def paths(self) -> list[Path]:
        """The files of both splits in name order."""
        return sorted(path for split in SPLITS for path in self.files(split))

    def files(self, split: str) -> list[Path]:
        """The files of "train" or "val"."""
        return [self.folder / name for name in self.splits[split]]

    def documents(self, split: str) -> Iterator[str]:
        """The split's documents in order, without empty ones."""
        for path in self.files(split):
            for batch in document_batches(path):
                yield from filter(None, batch)

    def print_remarks(self) -> None:
        """Print which files are not read, and how much the last one is, if it is held out and is much."""
        if ignored := len(self.names) - len(self.paths()):
            print(f"{self.folder}: {ignored} parquet files are in no split, by their names, and are not read")
        sizes = [(self.folder / name).stat().st_size for name in self.names]
        share = sizes[-1] / sum(sizes)
        if self.splits["val"] == self.names[-1:] and share > MUCH_HELD_OUT:
            print(f"{self.folder}: the last file is held out, {self.names[-1]}: {share:.0%} of the bytes")


def top_parquet(folder: Path) -> list[str]:
    """Names of the parquet files directly in a folder, in name order."""
    return sorted(path.name for path in folder.glob("[!.]*.parquet"))


def deal(names: Sequence[str]) -> dict[str, list[str]]:
    """The files of the train and val splits, of names in order: as they say, or else the last one for validation."""
    return splits_of({name: _split_in_name(name) for name in names}) or {"train": names[:-1], "val": names[-1:]}


def splits_of(split_of: dict[str, str | None]) -> dict[str, list[str]] | None:
    """The files of the train and val splits, if there are both; test stands in for a val that is absent.

    split_of: train, val, test or None by file.
    """
    named = {split: [name for name in split_of if split_of[name] == split] for split in ("train", "val", "test")}
    held_out = named["val"] or named["test"]
    return {"train": named["train"], "val": held_out} if named["train"] and held_out else None


def _split_in_name(name: str) -> str | None:
    """The split that the first or last word of a file's name is: `wiki.train-0-of-2.parquet`."""
    words = re.findall(r"[^-._ \d]+", re.sub(r"\d+-of-\d+$", "", ENDINGS.sub("", name.lower())))
    return next((SPLIT_NAMES[word] for word in (*words[:1], *words[-1:]) if word in SPLIT_NAMES), None)


def open_parquet(path: Path, column: str = COLUMN) -> pq.ParquetFile:
    """Open one file and check its column. Raises UserError naming the file.

    Its footer is read without the note on how the writer held columns in memory. A large_string, a string_view and a
    dictionary of strings are then the strings that they are on disk; a dictionary would stay in memory, batch by batch.
    """
    try:
        metadata = pq.read_metadata(io.BytesIO(b"PAR1" + _footer(path).replace(b"ARROW:schema", b"arrow.schema")))
        file = pq.ParquetFile(path, metadata=metadata, pre_buffer=False, buffer_size=BUFFER)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({reason_of(error)})") from None
    needs = f"{path} needs a string column named {column}"
    if names.count(column) != 1:
        raise UserError(f"{needs}, it has: {', '.join(names)}")
    if not pa.types.is_string(kind := file.schema_arrow.field(column).type):
        raise UserError(f"{needs}, its {column} is of type {kind}")
    place = next(i for i in range(len(file.schema)) if file.schema.column(i).path == column)
    chunks = [metadata.row_group(group).column(place) for group in range(file.num_row_groups)]
    if metadata.num_rows and all(c.statistics is not None and c.statistics.null_count == c.num_values for c in chunks):
        raise UserError(f"{path} has nothing but nulls in its column {column}")
    return file


def _footer(path: Path) -> bytes:
    """The end of a parquet file, which says where everything is and what the least and greatest values are."""
    with open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little") + 8
        file.seek(max(0, size - length))
        return file.read()


def document_batches(
    path: Path, groups: range | None = None, part: tuple[int, int] = (0, 1), column: str = COLUMN
) -> Iterator[list[str]]:
    """Documents of a file's row groups (default: all) in lists of DOCUMENT_BATCH, as nanochat reads them.

    The last list of a row group may be shorter. An empty text counts as a document, a null does not. part: which of how
    many equal parts of every row group's batches. Raises UserError naming the file if it is damaged.
    """
    file = open_parquet(path, column)
    for group in range(file.num_row_groups) if groups is None else groups:
        count = -(-file.metadata.row_group(group).num_rows // DOCUMENT_BATCH)
        ends = [count * number // part[1] for number in (part[0], part[0] + 1)]
        try:
            batches = file.iter_batches(DOCUMENT_BATCH, row_groups=[group], columns=[column], use_threads=False)
            for batch in islice(batches, *ends):
                yield [text for text in batch.column(0).to_pylist() if text is not None]
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            damage = f"{path} is damaged in row group {group} ({reason_of(error)})"
            raise UserError(f"{damage}; delete it and fetch it again") from None


def write_documents(documents: Iterable[tuple[str, str]], paths: dict[str, Path]) -> dict[str, Counter[str]]:
    """Write parquet files in row groups of ROW_GROUP documents, or of fewer if these are long.

    documents: the split and the text of each. paths: by split. Returns how many `documents` and `chars` each split has.
    """
    waiting: dict[str, list[bytes]] = {split: [] for split in paths}
    counts: dict[str, Counter[str]] = {split: Counter() for split in paths}
    schema = pa.schema([(COLUMN, pa.string())])
    with contextlib.ExitStack() as stack:
        files = {
            s: stack.enter_context(pq.ParquetWriter(path, schema, compression="zstd")) for s, path in paths.items()
        }

        def flush(split: str) -> None:
            if waiting[split]:
                files[split].write_table(pa.table([pa.array(waiting[split], pa.string())], schema))
            waiting[split], counts[split]["bytes waiting"] = [], 0

        for split, text in documents:
            waiting[split].append(text.encode(errors="replace"))  # half a character, in JSON, becomes a question mark
            counts[split].update({"documents": 1, "chars": len(text), "bytes waiting": len(waiting[split][-1])})
            if len(waiting[split]) == ROW_GROUP or counts[split]["bytes waiting"] >= GROUP_BYTES:
                flush(split)
        for split in paths:
            flush(split)
    return counts


def split_by_checksum(text: str, one_in: int) -> str:
    """The split of a text of which one in `one_in` is held out."""
    digest = hashlib.sha256(text.encode(errors="replace")).digest()
    return "val" if int.from_bytes(digest[:4], "big") % one_in == 0 else "train"


def fingerprint(files: Sequence[Path]) -> dict[str, list]:
    """What tells a corpus's files from all but their copies: names and sizes, and checksums."""
    checksums = [checksum(path) for path in files]
    return {"source": [[path.name, path.stat().st_size] for path in files], "checksums": checksums}


def checksum(path: Path) -> str:
    """Of a file's SAMPLES blocks, evenly spaced, which is all of a file of up to SAMPLES * SAMPLE bytes."""
    digest, last = hashlib.sha256(), max(0, path.stat().st_size - SAMPLE)
    with open(path, "rb") as file:
        for number in range(SAMPLES):
            file.seek(last * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:16]


def file_changes(before: dict[str, Any], now: dict[str, Any], source: str = "source") -> str:
    """What became of a corpus's files between two notes that hold fingerprints; empty if nothing.

    source: the key of names and sizes.
    """
    try:
        old, new = ({e[0][0]: e for e in zip(note[source], note["checksums"])} for note in (before, now))
        return describe_changes(old, new)
    except (KeyError, TypeError, IndexError):
        return "the note of them is damaged"


def describe_changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What became of named things: "1 added (c.parquet), 2 changed (a.parquet, b.parquet)"; empty if all are equal."""
    names = {"added": new.keys() - old.keys(), "removed": old.keys() - new.keys()}
    names["changed"] = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    return ", ".join(f"{len(some)} {kind} ({first_names(some)})" for kind, some in names.items() if some)


def first_names(names: Collection[str]) -> str:
    """The first three of `names` in words, in their order."""
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")


def source_of(folder: Path) -> str | None:
    """What the note in a corpus says that it is prepared from, None if there is no such note."""
    note = folder / NOTE
    return read_json(note, "note of the corpus's source").get("source") if note.exists() else None


def claim(folder: Path, source: str) -> None:
    """Note in `folder` that it is prepared from `source`. Raises UserError if it holds text from elsewhere."""
    present = source_of(folder) or "another source"
    if present != source and any(folder.glob("*.parquet")):
        raise UserError(f"{folder} holds parquet files of {present}; choose another --out for {source}")
    write_json(folder / NOTE, {"source": source})


def link_files(source: Path, names: Sequence[str], folder: Path) -> None:
    """Make links to these files of `source` the parquet files of `folder`; symbolic ones across file systems."""
    for path in folder.glob("*.parquet"):
        if path.name not in names:
            path.unlink()
    for name in names:
        file, link = (source / name).resolve(), folder / name
        if link.exists() and link.samefile(file):
            continue
        link.unlink(missing_ok=True)
        try:
            os.link(file, link)
        except OSError:  # another file system, or somebody else's file
            link.symlink_to(file)
