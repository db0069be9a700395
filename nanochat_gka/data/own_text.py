"""People's own text: a file or a folder of text, JSON and parquet, made into the parquet files of a corpus.

A .txt or .md file is a document (several if it has more than 4 million characters), and so is every record of .jsonl,
.json and .parquet, of which one column is the text. All but parquet may be packed as .gz or .zst. Folders are read to
any depth, in the order of names, without hidden files.

Names decide what is held out if they put every file in a split, and there is train and val (or test): the name of a
folder, or of a file without its number and what stands before a dot (train-00000-of-00002, wiki.val_1). Only a README
may be beside them. Of nanochat's shards, and of a corpus that we made, the last file is held out. Otherwise it is one
document in a hundred, by checksum, and where that is too little the end of the text.

pyarrow unpacks, and the standard library reads JSON, a record at a time: `datasets` takes the type of every column from
the first 10 MB of the first file and fails at another, reads dates as times, and leaves out files with [ in their name.
"""

import contextlib
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_gka.data import SPLITS
from nanochat_gka.data.corpora import (
    COLUMN,
    MUCH_HELD_OUT,
    NOTE,
    ROW_GROUP,
    SPLIT_NAMES,
    counted,
    deal,
    describe_changes,
    document_batches,
    named_splits,
    splits_of,
    suffixes,
)
from trainkit_gka.cli import UserError, reason_of
from trainkit_gka.files import atomic, read_json, sha256, write_json
from trainkit_gka.progress import progress_bar

KINDS = (".txt", ".md", ".jsonl", ".json", ".parquet")
CODECS = {".gz": "gzip", ".zst": "zstd"}
READ = ".txt, .md, .jsonl, .json (each also as .gz or .zst) and .parquet"
ONE_IN = 100  # documents, or characters at the end of the text, are held out
END_CHARS = 10_000  # at least so many of them, but no more than a tenth of the text
LONGEST = 2**22  # characters of a document of a text file
GROUP_BYTES = 2**24  # of documents that are held in memory until they are written
RECORD = "files.json"
RULES = 2  # of what is read and held out; a corpus that was written by others is written again
SHARD = re.compile(r"shard_\d{5}\.parquet")  # runs/make.py has it too
NAMED, LAST = "as the files are named", "the last file by name"


@dataclass
class Source:
    """What there is to read. files: by path within `root`, in order. unread: how many other files, by suffix.

    held_out: in words, what is held out if names or the layout say so.
    """

    root: Path
    files: dict[str, Path] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)
    held_out: str = ""

    def keep(self, names: Iterable[str]) -> None:
        """Count the other files as unread."""
        kept = set(names)
        self.unread.update(suffixes(name for name in self.files if name not in kept))
        self.files = {name: path for name, path in self.files.items() if name in kept}


def find(root: Path, out: Path) -> tuple[Source, dict[str, list[str]] | None]:
    """The files of `root`, a file or a folder, and those of each split if names or the layout say so.

    Links are followed, but no folder is entered twice. Raises UserError if there is nothing to read or `out` is inside.
    """
    if not root.exists():
        raise UserError(f"--source {root} is neither builtin nor fineweb nor a file or folder")
    if out.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{out} is inside {root} and would be read as text; choose another --out (with make, BASE)")
    source = Source(root, dict(sorted(_walk(root))))
    readable = [name for name in source.files if _kind(name)[0] in KINDS]
    beside = [name for name in readable if "/" not in name and _kind(name)[0] == ".parquet"]
    if len(beside) > 1 and ((root / NOTE).exists() or all(map(SHARD.fullmatch, beside))):
        splits, source.held_out = deal(beside), NAMED if named_splits(beside) else LAST
    else:
        splits, source.held_out = _named_splits(root, readable), NAMED
    source.keep(chain(*splits.values()) if splits else readable)
    if not source.files:
        raise UserError(f"{root} has no text to read ({counted(source.unread) or 'it is empty'}); what is read: {READ}")
    return source, splits


def _named_splits(root: Path, names: list[str]) -> dict[str, list[str]] | None:
    """The files of the train and val splits, if names put every file but a README in a split."""
    split_of = {name: _named_split(PurePosixPath(name.lower())) for name in names if not _is_readme(name)}
    splits, others = splits_of(split_of), [name for name, split in split_of.items() if split is None]
    if splits and others:
        print(f"{root}: names do not decide what is held out, for some are in no split: {counted(suffixes(others))}")
    return None if others else splits


def _named_split(path: PurePosixPath) -> str | None:
    """The split that the name of a folder is, or that of a file: `val/a.txt`, `train-00000-of-00002.parquet`."""
    stem = re.sub(r"(\.(txt|md|jsonl|json|parquet|gz|zst))+$", "", path.name)
    word = re.sub(r"[-_.]?\d+(-of-\d+)?$", "", stem).split(".")[-1]
    return next((SPLIT_NAMES[name] for name in (*path.parts[:-1], word) if name in SPLIT_NAMES), None)


def _is_readme(name: str) -> bool:
    return PurePosixPath(name.lower()).name in ("readme.md", "readme.txt")


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Every file below `root` that is not hidden, after its path from there; `root` itself if it is a file."""
    if root.is_file():
        yield root.name, root
        return
    entered = set()
    for folder, folders, names in os.walk(root, onerror=_raise, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and real not in entered)
        if real not in entered:
            yield from ((Path(folder, n).relative_to(root).as_posix(), Path(folder, n)) for n in names if n[0] != ".")
        entered.add(real)


def _raise(error: OSError) -> None:
    raise error


def _kind(name: str) -> tuple[str, str | None]:
    """The suffix that says what a file is, and what it is packed with: (".txt", "gzip")."""
    path = Path(name.lower())
    codec = CODECS.get(path.suffix)
    kind = Path(path.stem).suffix if codec else path.suffix
    return ("" if codec and kind == ".parquet" else kind), codec


def write(source: Source, splits: dict[str, list[str]] | None, out: Path, column: str = COLUMN) -> None:
    """Write `out`/train.parquet and `out`/val.parquet, unless they are there and no file has changed since.

    Raises UserError, in one line, for a file that is not what its name says or has no text in `column`, and if a split
    would be empty.
    """
    if source.unread:
        print(f"{source.root}: not read: {counted(source.unread)}")
    states = {name: (path.stat().st_size, path.stat().st_mtime_ns) for name, path in source.files.items()}
    changes = _changes(source, states, out, column)
    if changes == "":
        print(f"{out}: already there, made of {len(states):,} files")
        return
    if changes:
        print(f"{source.root} has changed since {out} was written: {changes}")
    record = {
        "rules": RULES,
        "column": column,
        "files": {name: [*states[name], sha256(source.files[name])] for name in states},
    }
    (out / RECORD).unlink(missing_ok=True)
    with atomic(out / "val.parquet") as val, atomic(out / "train.parquet") as train:
        _write_splits(source, splits, column, {"train": train, "val": val})
    write_json(out / RECORD, record)


def _changes(source: Source, states: dict[str, tuple[int, int]], out: Path, column: str) -> str | None:
    """What changed since `out` was written, None if it was not. A copy has another time, and the same content."""
    if not all((out / name).exists() for name in ("train.parquet", "val.parquet", RECORD)):
        return None
    record = read_json(out / RECORD, "note of the corpus's files")
    if record.get("rules") != RULES:
        return "it was read by the rules of an earlier version"
    if record["column"] != column:
        return f"it was column {record['column']}"
    now: dict[str, Any] = dict(states)
    for name, (size, changed, digest) in record["files"].items():
        if name in states and (states[name] == (size, changed) or sha256(source.files[name]) == digest):
            now[name] = [size, changed, digest]
    return describe_changes(record["files"], now)


def _write_splits(source: Source, splits: dict[str, list[str]] | None, column: str, paths: dict[str, Path]) -> None:
    empty: Counter[str] = Counter()
    not_text: set[str] = set()  # files of JSON
    mixed = not splits and any(_kind(name)[0] != ".json" for name in source.files)

    def documents(names: Collection[str]) -> Iterator[str]:
        with progress_bar() as bar:
            task = bar.add_task("reading files", total=len(names), status="")
            for name in names:
                begun = False
                try:
                    for text in _documents(source.files[name], column):
                        begun = True
                        empty[name] += not text.strip()
                        if text.strip():
                            yield text
                except _NoField:
                    if begun or not mixed or _kind(name)[0] != ".json":
                        raise
                    not_text.add(name)
                bar.advance(task)

    if splits:
        how = source.held_out
        written = _deal(((split, text) for split in SPLITS for text in documents(splits[split])), paths)
    else:
        how = f"one document in {ONE_IN}, by checksum"
        written = _deal(((_split_of(text), text) for text in documents(source.files)), paths)
        train, val = (written[name] for name in SPLITS)
        chars = train.chars + val.chars
        too_few = train.documents + val.documents < ONE_IN or not train.documents
        if too_few or val.chars < min(END_CHARS, chars // 10):
            how = "the end of the text"
            empty.clear()
            written = _deal(_cut_end(documents(source.files), chars), paths)
    for name in SPLITS:
        if not written[name].documents:
            where = f": nothing in {', '.join(splits[name])}" if splits else ""
            raise UserError(f"{source.root} has too little text for the {name} split{where}")
    for name, split in written.items():
        print(f"{name}: {split.documents:,} documents, {split.bytes / 1e6:.2f} MB")
    if not_text:
        named = ", ".join(sorted(not_text)[:3]) + (", ..." if len(not_text) > 3 else "")
        what = f"{len(not_text):,} files without a field {column} that is a string ({named})"
        print(f"{source.root}: not read: {what}; if one has text, name it by --text-column (with make, COLUMN)")
    read = [name for name in source.files if name not in not_text]
    kinds = Counter("".join(Path(name.lower()).suffixes[-2 if _kind(name)[1] else -1 :]) for name in read)
    share = written["val"].chars / sum(split.chars for split in written.values())
    how += f", {share:.0%} of the text" if how == LAST and share > MUCH_HELD_OUT else ""
    print(
        f"from {counted(kinds)}; held out: {how}"
        + (f"; {empty.total():,} empty documents left out" if empty.total() else "")
    )


def _split_of(text: str) -> str:
    digest = hashlib.sha256(text.encode(errors="replace")).digest()
    return "val" if int.from_bytes(digest[:4], "big") % ONE_IN == 0 else "train"


def _cut_end(documents: Iterator[str], chars: int) -> Iterator[tuple[str, str]]:
    """The documents by split. One that reaches into the end of all `chars` is cut there."""
    end = min(max(chars // ONE_IN, END_CHARS), chars // 10)
    left = chars - end
    for text in documents:
        cut = len(text) if len(text) <= left else _cut_before(text, max(0, left), end)
        left -= len(text)
        yield from ((split, part) for split, part in zip(SPLITS, (text[:cut], text[cut:])) if part.strip())


def _cut_before(text: str, end: int, reach: int) -> int:
    """Where a paragraph, or else a line or a word, ends in the last `reach` characters before `end`; else `end`."""
    places = ((text.rfind(mark, max(0, end - reach), end), len(mark)) for mark in ("\n\n", "\n", " "))
    return next((place + length for place, length in places if place >= 0), end)


class _Split:
    """A parquet file that is written in row groups of ROW_GROUP documents, or of fewer if these are long."""

    def __init__(self, path: Path):
        self.file = pq.ParquetWriter(path, pa.schema([(COLUMN, pa.string())]), compression="zstd")
        self.documents = self.chars = self.bytes = self.waiting_bytes = 0
        self.waiting: list[bytes] = []

    def add(self, text: str) -> None:
        """Half of a character, which JSON can hold, becomes a question mark."""
        data = text.encode(errors="replace")
        self.waiting.append(data)
        self.documents, self.chars, self.bytes = self.documents + 1, self.chars + len(text), self.bytes + len(data)
        self.waiting_bytes += len(data)
        if len(self.waiting) == ROW_GROUP or self.waiting_bytes >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            self.file.write_table(pa.table([pa.array(self.waiting, pa.string())], self.file.schema))
        self.waiting, self.waiting_bytes = [], 0

    def close(self) -> None:
        self.flush()
        self.file.close()


def _deal(documents: Iterator[tuple[str, str]], paths: dict[str, Path]) -> dict[str, _Split]:
    """Write every document to the file of its split."""
    with contextlib.ExitStack() as stack:
        splits = {name: stack.enter_context(contextlib.closing(_Split(path))) for name, path in paths.items()}
        for name, text in documents:
            splits[name].add(text)
    return splits


def _documents(path: Path, column: str) -> Iterator[str]:
    """The documents of a file. Raises UserError naming it, and the place in it."""
    kind, codec = _kind(path.name)
    if kind == ".parquet":
        for batch in document_batches(path, column=column):
            yield from batch
        return
    try:
        with open(path, "rb") as file:
            data = pa.CompressedInputStream(file, codec) if codec else file
            with io.TextIOWrapper(data, encoding="utf-8-sig") as text:
                if kind in (".txt", ".md"):
                    yield from _pieces(text)
                else:
                    fields = (_field(path, place, record, column) for place, record in _records(path, text, kind))
                    yield from (field for field in fields if field is not None)
    except UnicodeDecodeError:
        advice = "convert it (such as by iconv -f LATIN1 -t UTF-8) or move it away"
        raise UserError(f"{path} is not text in UTF-8; {advice}") from None
    except OSError as error:
        if error.filename is not None:
            raise
        raise UserError(f"{path} is damaged, or is not what its name says ({reason_of(error)})") from None


def _pieces(stream: io.TextIOWrapper) -> Iterator[str]:
    """A text as one document; one that is longer than any row comes in several."""
    text = ""
    while more := stream.read(LONGEST - len(text)):
        text += more
        if len(text) == LONGEST:
            cut = _cut_before(text, LONGEST, LONGEST // 2)
            yield text[:cut]
            text = text[cut:]
    yield text


def _records(path: Path, text: io.TextIOWrapper, kind: str) -> Iterator[tuple[str, Any]]:
    """The records of a file of JSON, and where they are: lines, or an array or an object over several lines."""
    lines = ((number, line) for number, line in enumerate(text, 1) if line.strip())
    first = next(lines, None)
    if first and kind == ".json" and not _is_object(first[1]):
        whole = _parse(path, "as a whole", first[1] + text.read())
        records = whole if isinstance(whole, list) else [whole]
        yield from ((f"record {number}", record) for number, record in enumerate(records, 1))
    elif first:
        yield from ((f"line {n}", _parse(path, f"in line {n}", line)) for n, line in chain([first], lines))


class _NoField(UserError):
    """A record of JSON has no text."""


def _field(path: Path, place: str, record: Any, column: str) -> str | None:
    """The text of a record, or None for a null."""
    if isinstance(record, dict) and column in record and isinstance(record[column], str | None):
        return record[column]
    if not isinstance(record, dict):
        has = f"is {type(record).__name__}"
    else:
        has = "has " + ", ".join(f"{name} ({type(value).__name__})" for name, value in record.items())
    advice = "name the one that is by --text-column (with make, COLUMN), or move the file away"
    raise _NoField(f"{path} needs a field {column} that is a string; {place} {has}; {advice}")


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parse(path: Path, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not JSON {place} ({reason_of(error).split(': line')[0]}); mend it or move it away"
        ) from None
