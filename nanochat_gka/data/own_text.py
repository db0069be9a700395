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
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_gka.data import SPLITS
from nanochat_gka.data.corpora import (
    COLUMN,
    ENDINGS,
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
    top_parquet,
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
RULES = 2  # of what is read and held out; a corpus written by other rules is written again
SHARD = re.compile(r"shard_\d{5}\.parquet")
READMES = ("readme.md", "readme.txt")


@dataclass
class TextSource:
    """What to read of a file or folder.

    files: by path within `root`, in order. unread: the number of other files, by suffix. splits: the files of train and
    val if names or the layout say so, as `held_out` describes.
    """

    root: Path
    files: dict[str, Path]
    unread: Counter[str]
    splits: dict[str, list[str]] | None
    held_out: str


def is_corpus(root: Path) -> bool:
    """Whether a folder is a corpus already: nanochat's shards, or written by nanochat_gka.corpus."""
    names = top_parquet(root)
    return len(names) > 1 and ((root / NOTE).exists() or all(map(SHARD.fullmatch, names)))


def find(root: Path, out: Path) -> TextSource:
    """The files of `root`, a file or a folder. Links are followed, but no folder is entered twice.

    Raises UserError if there is nothing to read or `out` is inside `root`.
    """
    if not root.exists():
        raise UserError(f"--source {root} is neither builtin nor fineweb nor a file or folder")
    if out.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{out} is inside {root} and would be read as text; choose another --out")
    files = dict(sorted(_walk(root)))
    readable = [name for name in files if _kind(name)[0] in KINDS]
    parquet = [name for name in readable if "/" not in name and _kind(name)[0] == ".parquet"]
    held_out = "as the files are named"
    if is_corpus(root):
        splits = deal(parquet)
        held_out = held_out if named_splits(parquet) else "the last file by name"
    else:
        splits = _named_splits(root, readable)
    chosen = set(chain(*splits.values()) if splits else readable)
    unread = suffixes(name for name in files if name not in chosen)
    if not chosen:
        raise UserError(f"{root} has no text to read ({counted(unread) or 'it is empty'}); what is read: {READ}")
    return TextSource(root, {name: path for name, path in files.items() if name in chosen}, unread, splits, held_out)


def _named_splits(root: Path, names: list[str]) -> dict[str, list[str]] | None:
    """The files of the train and val splits, if names put every file but a README in a split."""
    paths = {name: PurePosixPath(name.lower()) for name in names}
    split_of = {name: _named_split(path) for name, path in paths.items() if path.name not in READMES}
    splits, unnamed = splits_of(split_of), [name for name, split in split_of.items() if split is None]
    if splits and unnamed:
        print(f"{root}: names do not decide what is held out, for some are in no split: {counted(suffixes(unnamed))}")
    return None if unnamed else splits


def _named_split(path: PurePosixPath) -> str | None:
    """The split that the name of a folder is, or that of a file: `val/a.txt`, `train-00000-of-00002.parquet`."""
    word = re.sub(r"[-_.]?\d+(-of-\d+)?$", "", ENDINGS.sub("", path.name)).split(".")[-1]
    return next((SPLIT_NAMES[name] for name in (*path.parts[:-1], word) if name in SPLIT_NAMES), None)


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Every file below `root` that is not hidden, after its path from there; `root` itself if it is a file."""
    if root.is_file():
        yield root.name, root
        return

    def stop(error: OSError) -> None:
        raise error

    entered = set()
    for folder, folders, names in os.walk(root, onerror=stop, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and real not in entered)
        if real not in entered:
            yield from ((Path(folder, n).relative_to(root).as_posix(), Path(folder, n)) for n in names if n[0] != ".")
        entered.add(real)


def _kind(name: str) -> tuple[str, str | None]:
    """The suffix that says what a file is, and what it is packed with: (".txt", "gzip")."""
    path = Path(name.lower())
    codec = CODECS.get(path.suffix)
    kind = Path(path.stem).suffix if codec else path.suffix
    return ("" if codec and kind == ".parquet" else kind), codec


def write(source: TextSource, out: Path, column: str = COLUMN) -> None:
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
    files = {name: [*states[name], sha256(source.files[name])] for name in states}
    (out / RECORD).unlink(missing_ok=True)
    with atomic(out / "val.parquet") as val, atomic(out / "train.parquet") as train:
        _Writer(source, column, {"train": train, "val": val}).write()
    write_json(out / RECORD, {"rules": RULES, "column": column, "files": files})


def _changes(source: TextSource, states: dict[str, tuple[int, int]], out: Path, column: str) -> str | None:
    """What changed since `out` was written, None if it was not. A copy has another time, and the same content."""
    if not all((out / name).exists() for name in ("train.parquet", "val.parquet", RECORD)):
        return None
    record = read_json(out / RECORD, "note of the corpus's files")
    if record.get("rules") != RULES:
        return "it was read by other rules"
    if record["column"] != column:
        return f"it was column {record['column']}"
    now: dict[str, Any] = dict(states)
    for name, (size, changed, digest) in record["files"].items():
        if name in states and (states[name] == (size, changed) or sha256(source.files[name]) == digest):
            now[name] = [size, changed, digest]
    return describe_changes(record["files"], now)


class _Writer:
    """Reads the documents of a source and writes each to the file of its split."""

    def __init__(self, source: TextSource, column: str, paths: dict[str, Path]):
        self.source, self.column, self.paths = source, column, paths
        self.empty = 0  # documents of white space, which are left out
        self.textless: set[str] = set()  # files of JSON without the field, which are left out among other text
        self.may_skip = not source.splits and any(_kind(name)[0] != ".json" for name in source.files)

    def write(self) -> None:
        splits, held_out = self.source.splits, self.source.held_out
        if splits:
            written = self._deal((split, text) for split in SPLITS for text in self._documents(splits[split]))
        else:
            held_out = f"one document in {ONE_IN}, by checksum"
            written = self._deal((_split_of(text), text) for text in self._documents(self.source.files))
            train, val = (written[name] for name in SPLITS)
            chars = train.chars + val.chars
            too_few = train.documents + val.documents < ONE_IN or not train.documents
            if too_few or val.chars < min(END_CHARS, chars // 10):
                held_out = "the end of the text"
                self.empty = 0
                written = self._deal(_cut_end(self._documents(self.source.files), chars))
        for name in SPLITS:
            if not written[name].documents:
                where = f": nothing in {', '.join(splits[name])}" if splits else ""
                raise UserError(f"{self.source.root} has too little text for the {name} split{where}")
        self._report(written, held_out)

    def _documents(self, names: Collection[str]) -> Iterator[str]:
        with progress_bar() as bar:
            task = bar.add_task("reading files", total=len(names), status="")
            for name in names:
                begun = False
                try:
                    for text in _documents(self.source.files[name], self.column):
                        begun = True
                        if text.strip():
                            yield text
                        else:
                            self.empty += 1
                except _NoField:
                    if begun or not self.may_skip or _kind(name)[0] != ".json":
                        raise
                    self.textless.add(name)
                bar.advance(task)

    def _deal(self, documents: Iterable[tuple[str, str]]) -> dict[str, "_Split"]:
        with contextlib.ExitStack() as stack:
            splits = {name: stack.enter_context(contextlib.closing(_Split(p))) for name, p in self.paths.items()}
            for name, text in documents:
                splits[name].add(text)
        return splits

    def _report(self, written: dict[str, "_Split"], held_out: str) -> None:
        for name, split in written.items():
            print(f"{name}: {split.documents:,} documents, {split.bytes / 1e6:.2f} MB")
        if self.textless:
            named = ", ".join(sorted(self.textless)[:3]) + (", ..." if len(self.textless) > 3 else "")
            files = f"{len(self.textless):,} files without a field {self.column} that is a string ({named})"
            print(f"{self.source.root}: not read: {files}; if one has text, name it by --text-column")
        read = [name for name in self.source.files if name not in self.textless]
        kinds = Counter("".join(Path(name.lower()).suffixes[-2 if _kind(name)[1] else -1 :]) for name in read)
        share = written["val"].chars / sum(split.chars for split in written.values())
        how = f"{held_out}, {share:.0%} of the text" if share > MUCH_HELD_OUT and "last file" in held_out else held_out
        empty = f"; {self.empty:,} empty documents left out" if self.empty else ""
        print(f"from {counted(kinds)}; held out: {how}{empty}")


def _split_of(text: str) -> str:
    digest = hashlib.sha256(text.encode(errors="replace")).digest()
    return "val" if int.from_bytes(digest[:4], "big") % ONE_IN == 0 else "train"


def _cut_end(documents: Iterator[str], chars: int) -> Iterator[tuple[str, str]]:
    """The documents by split. One that reaches into the end of all `chars` is cut there."""
    end = min(max(chars // ONE_IN, END_CHARS), chars // 10)
    remaining = chars - end  # of the training split
    for text in documents:
        cut = len(text) if len(text) <= remaining else _cut_before(text, max(0, remaining), end)
        remaining -= len(text)
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
            self._flush()

    def _flush(self) -> None:
        if self.waiting:
            self.file.write_table(pa.table([pa.array(self.waiting, pa.string())], self.file.schema))
        self.waiting, self.waiting_bytes = [], 0

    def close(self) -> None:
        self._flush()
        self.file.close()


def _documents(path: Path, column: str) -> Iterator[str]:
    """The documents of a file. Raises UserError naming it, and the place in it."""
    kind, codec = _kind(path.name)
    if kind == ".parquet":
        yield from chain.from_iterable(document_batches(path, column=column))
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
    """A text as one document; one of more than LONGEST characters comes in several."""
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

    def parse(place: str, content: str) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            reason = reason_of(error).split(": line")[0]
            raise UserError(f"{path} is not JSON {place} ({reason}); mend it or move it away") from None

    lines = ((number, line) for number, line in enumerate(text, 1) if line.strip())
    first = next(lines, None)
    if first and kind == ".json" and not _is_object(first[1]):
        value = parse("as a whole", first[1] + text.read())
        records = value if isinstance(value, list) else [value]
        yield from ((f"record {number}", record) for number, record in enumerate(records, 1))
    elif first:
        yield from ((f"line {number}", parse(f"in line {number}", line)) for number, line in chain([first], lines))


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class _NoField(UserError):
    """A record of JSON has no text."""


def _field(path: Path, place: str, record: Any, column: str) -> str | None:
    """The text of a record, or None for a null."""
    if not isinstance(record, dict):
        has = f"is {type(record).__name__}"
    elif column in record and isinstance(record[column], str | None):
        return record[column]
    else:
        has = "has " + ", ".join(f"{name} ({type(value).__name__})" for name, value in record.items())
    advice = "name the one that is by --text-column, or move the file away"
    raise _NoField(f"{path} needs a field {column} that is a string; {place} {has}; {advice}")
