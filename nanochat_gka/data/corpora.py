"""Corpora: folders of parquet files with a string column `text`, read document by document.

Where file names say which are for training and which for validation, they decide; otherwise files are taken in name
order, the last one is the validation split and the others are training, as in nanochat, unless its name says train.
"""

import hashlib
import io
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_gka.data import SPLITS
from trainkit_gka.cli import UserError, reason_of
from trainkit_gka.files import read_json, write_json

COLUMN = "text"
NOTE = "source.json"  # of what a corpus that we made is made of
ROW_GROUP = 1024  # documents, as in nanochat's shards
DOCUMENT_BATCH = 128  # documents that nanochat's loader tokenises at once
BUFFER = 2**20  # bytes of a file that are read at once
SAMPLES, SAMPLE = 16, 2**16  # blocks and their bytes, in a checksum that is quick for any file
MUCH_HELD_OUT = 0.05
ENDINGS = re.compile(r"(\.(txt|md|jsonl|json|parquet|gz|zst))+$")
SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLIT_NAMES.update(dict.fromkeys(("val", "valid", "validation", "dev"), "val"))


@dataclass(frozen=True)
class ParquetCorpus:
    """A folder of parquet files.

    Raises UserError if the folder is absent or has fewer than two files, if a file is unreadable or has no text in its
    column, or if a split has none.
    """

    folder: Path

    def __post_init__(self):
        if not self.folder.exists():
            raise UserError(f"corpus folder not found: {self.folder} (python -m nanochat_gka.corpus makes one)")
        if len(top_parquet(self.folder)) < 2:
            rule = "needs at least two .parquet files (the last by name is the validation split)"
            command = f"python -m nanochat_gka.corpus --source {shlex.quote(str(self.folder))} --out FOLDER"
            advice = f"other files of text become such a folder by: {command}"
            raise UserError(f"{self.folder} {rule}, found {len(top_parquet(self.folder))}; {advice}")
        last = self.files("val")[-1].name
        if _named_split(PurePosixPath(last)) == "train":
            rule = f"{last} is the last file and would be held out, but its name says train"
            command = f"python -m nanochat_gka.corpus --source {shlex.quote(str(self.folder))} --out FOLDER"
            raise UserError(f"{self.folder}: {rule}; 1 % of the text is held out by: {command}")
        for path in self.paths():
            open_parquet(path)
        for split in SPLITS:
            if not any(self.documents(split)):
                names = ", ".join(path.name for path in self.files(split))
                raise UserError(f"{self.folder} has no text for the {split} split: column {COLUMN} of {names} is empty")

    def paths(self) -> list[Path]:
        """The files of both splits in name order."""
        return sorted(path for split in SPLITS for path in self.files(split))

    def files(self, split: str) -> list[Path]:
        """The files of "train" or "val"."""
        return [self.folder / name for name in deal(top_parquet(self.folder))[split]]

    def documents(self, split: str) -> Iterator[str]:
        """The split's documents in order, without empty ones."""
        for path in self.files(split):
            for batch in document_batches(path):
                yield from filter(None, batch)

    def remarks(self) -> list[str]:
        """Notes for the commands that read it: files that are not read, and how much is held out, if it is much."""
        names, notes = top_parquet(self.folder), []
        if ignored := len(names) - len(self.paths()):
            notes.append(f"{self.folder}: {ignored} parquet files are in no split, by their names, and are not read")
        sizes = [(self.folder / name).stat().st_size for name in names]
        if not named_splits(names) and sizes[-1] > MUCH_HELD_OUT * sum(sizes):
            share = f"{sizes[-1] / sum(sizes):.0%} of the bytes"
            notes.append(f"{self.folder}: the last file is held out, {names[-1]}: {share}")
        return notes


def suffixes(names: Iterable[str]) -> Counter[str]:
    """How often each suffix is among the names of files."""
    return Counter(Path(name).suffix.lower() or "without suffix" for name in names)


def counted(number: Counter[str]) -> str:
    """In words: "1 .md, 2 .pdf"."""
    return ", ".join(f"{count:,} {name}" for name, count in sorted(number.items()))


def top_parquet(folder: Path) -> list[str]:
    """Names of the parquet files directly in a folder, in name order."""
    return sorted(path.name for path in folder.glob("[!.]*.parquet"))


def deal(names: Sequence[str]) -> dict[str, list[str]]:
    """The files of the train and val splits: as their names say, or else the last for validation.

    names: paths within the corpus, in order. Where names say train and test, test stands in for a val that is absent.
    """
    return named_splits(names) or {"train": list(names[:-1]), "val": list(names[-1:])}


def named_splits(names: Sequence[str]) -> dict[str, list[str]] | None:
    """The files of the train and val splits, if names of files or folders say both; what says neither is left out."""
    split_of = {name: _named_split(PurePosixPath(name)) for name in names}
    return splits_of(split_of)


def splits_of(split_of: dict[str, str | None]) -> dict[str, list[str]] | None:
    """The files of the train and val splits, if there are both. split_of: train, val, test or None by path."""
    named = {split: [name for name in split_of if split_of[name] == split] for split in ("train", "val", "test")}
    held_out = named["val"] or named["test"]
    return {"train": named["train"], "val": held_out} if named["train"] and held_out else None


def _named_split(path: PurePosixPath) -> str | None:
    """The split that a folder's name is, or a file's first or last word: `val/a.txt`, `wiki.train-0-of-2.txt`."""
    stem = re.sub(r"\d+-of-\d+$", "", ENDINGS.sub("", path.name.lower()))
    words = re.findall(r"[^-._ \d]+", stem)
    candidates = [*map(str.lower, path.parts[:-1]), *words[:1], *words[-1:]]
    return next((SPLIT_NAMES[word] for word in candidates if word in SPLIT_NAMES), None)


def footer(path: Path) -> bytes:
    """The end of a parquet file, which says where everything is and what the least and greatest values are.

    Raises OSError if it cannot be read.
    """
    with open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little") + 8
        file.seek(max(0, size - length))
        return file.read()


def open_parquet(path: Path, column: str = COLUMN) -> pq.ParquetFile:
    """Open one file and check its column. Raises UserError naming the file.

    Its footer is read without the note on how the writer held columns in memory. A large_string, a string_view and a
    dictionary of strings are then the strings that they are on disk; a dictionary would be kept whole, batch by batch.
    """
    try:
        metadata = pq.read_metadata(io.BytesIO(b"PAR1" + footer(path).replace(b"ARROW:schema", b"arrow.schema")))
        file = pq.ParquetFile(path, metadata=metadata, pre_buffer=False, buffer_size=BUFFER)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({reason_of(error)})") from None
    if names.count(column) != 1:
        has = f"it has: {', '.join(names)}" if column not in names else f"it has {names.count(column)} of that name"
        raise UserError(f"{path} needs a string column named {column}, {has}")
    kind = file.schema_arrow.field(column).type
    if not pa.types.is_string(kind):
        raise UserError(f"{path} needs a string column named {column}, its {column} is of type {kind}")
    if file.metadata.num_rows and _only_nulls(file, column):
        raise UserError(f"{path} has nothing but nulls in its column {column}")
    return file


def _only_nulls(file: pq.ParquetFile, column: str) -> bool:
    """Whether the file's statistics say so."""
    place = next(i for i in range(len(file.schema)) if file.schema.column(i).path == column)
    chunks = (file.metadata.row_group(group).column(place) for group in range(file.num_row_groups))
    return all(chunk.statistics is not None and chunk.statistics.null_count == chunk.num_values for chunk in chunks)


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
    old, new = ({e[0][0]: e for e in zip(note[source], note["checksums"])} for note in (before, now))
    return describe_changes(old, new)


def describe_changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What became of named things: "1 added (c.parquet), 2 changed (a.parquet, b.parquet)"; empty if all are equal."""
    names = {"added": new.keys() - old.keys(), "removed": old.keys() - new.keys()}
    names["changed"] = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    listed = {kind: ", ".join(sorted(some)[:3]) + (", ..." if len(some) > 3 else "") for kind, some in names.items()}
    return ", ".join(f"{len(names[kind])} {kind} ({listed[kind]})" for kind in names if names[kind])


def source_of(folder: Path) -> str:
    """What the note in a corpus says that it is prepared from. Raises UserError if there is no such note."""
    return read_json(folder / NOTE, "note of the corpus's source")["source"]


def claim(folder: Path, source: str) -> None:
    """Note in `folder` that it is prepared from `source`. Raises UserError if it holds text from elsewhere."""
    present = source_of(folder) if (folder / NOTE).exists() else "another source"
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
