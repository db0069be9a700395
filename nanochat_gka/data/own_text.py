"""People's own text: a file or a folder of text, JSON and parquet, made into the parquet files of a corpus.

A .txt or .md file is a document (several if it has more than 4 million characters), and so is every record of .jsonl,
.json and .parquet, of which one column is the text (`text.content`: a field inside another). All but parquet may be
packed as .gz or .zst. Folders are read to any depth, in the order of names, without hidden files. Records of JSON in
which the column is no string are skipped while they are fewer than one in a hundred.

Names decide what is held out if they put every file in a split, and there is train and val (or test): the name of a
folder, or of a file without its number and what stands before a dot (train-00000-of-00002, wiki.val_1). Only a README
may be beside them. Of nanochat's shards, and of a corpus that we made, the last file is held out. Otherwise it is one
document in a hundred, by checksum, and where that is too little the end of the text.
"""

import contextlib
import io
import json
import re
import reprlib
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from nanochat_gka.data import SPLITS, corpora
from trainkit_gka.cli import UserError, reason_of
from trainkit_gka.files import atomic, read_json, sha256, write_json
from trainkit_gka.progress import progress_bar

KINDS = (".txt", ".md", ".jsonl", ".json", ".parquet")
CODECS = {".gz": "gzip", ".zst": "zstd"}
READ = ".txt, .md, .jsonl, .json (each also as .gz or .zst) and .parquet"
ONE_IN = 100  # documents, or characters at the end of the text, are held out
END_CHARS = 10_000  # at least so many of them, but no more than a tenth of the text
LONGEST = 2**22  # characters of a document of a text file
REFUSED_FROM = 0.01  # part of the records of JSON that have no text
CERTAIN = 1000  # records, and none has a text: the column is another
NAMED = 10  # of the records that are skipped
RECORD = "files.json"
RULES = 2  # of what is read and held out; a corpus written by other rules is written again
SHARD = re.compile(r"shard_\d{5}\.parquet")


def is_corpus(root: Path) -> bool:
    """Whether a folder is a corpus already: nanochat's shards, or written by nanochat_gka.corpus."""
    names = corpora.top_parquet(root)
    return len(names) > 1 and (corpora.source_of(root) is not None or all(map(SHARD.fullmatch, names)))


class TextSource:
    """A file or folder of text, to be made into a corpus in the folder `out`.

    column: which one of JSON and parquet is the text. strict: no record of JSON without it is skipped. Links are
    followed, but no folder is entered twice. Raises UserError if there is nothing to read or `out` is inside `root`.
    """

    def __init__(self, root: Path, out: Path, column: str = corpora.COLUMN, strict: bool = False):
        if not root.exists():
            raise UserError(f"--source {root} is neither builtin nor fineweb nor a file or folder")
        if out.resolve().is_relative_to(root.resolve()):
            raise UserError(f"{out} is inside {root} and would be read as text; choose another --out")
        self.root, self.out, self.column, self.strict = root, out, column, strict
        base = root if root.is_dir() else root.parent
        paths = dict(sorted((path.relative_to(base).as_posix(), path) for path in _walk(root, set())))
        readable = [name for name in paths if _kind(name)[0] in KINDS]
        # The files of train and val, if names or the layout decide.
        self.splits = corpora.deal(corpora.top_parquet(root)) if is_corpus(root) else _named_splits(root, readable)
        chosen = set(chain(*self.splits.values()) if self.splits else readable)
        self.files = {name: path for name, path in paths.items() if name in chosen}
        suffixes = Counter(Path(name).suffix.lower() or "without suffix" for name in paths if name not in chosen)
        unread = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(suffixes.items()))
        if not chosen:
            raise UserError(f"{root} has no text to read ({unread or 'it is empty'}); what is read: {READ}")
        if unread:
            print(f"{root}: not read: {unread}")
        self.counts: Counter[str] = Counter()  # of records of JSON, those that are skipped, and empty documents
        self.skipped: list[str] = []  # the places of the first
        self.without_text: set[str] = set()  # files of JSON without the field, which are left out among other text
        self.may_skip = not (strict or self.splits) and any(_kind(name)[0] != ".json" for name in chosen)

    def write(self) -> None:
        """Write train.parquet and val.parquet, unless they are there and no file has changed since.

        Raises UserError, in one line, for a file that is not what its name says, for a column that is not text or that
        too many records lack, and if a split would be empty.
        """
        before = _read_record(self.out)
        record: dict[str, Any] = {"rules": RULES, "column": self.column, "files": {}}
        for name, path in self.files.items():
            state = [path.stat().st_size, path.stat().st_mtime_ns]
            known = before["files"].get(name, []) if before else []
            record["files"][name] = known if known[:2] == state else [*state, sha256(path)]
        if before and not (self.strict and before.get("skipped")):
            changes = corpora.describe_changes(_contents(before), _contents(record))
            if not changes:
                print(f"{self.out}: already there, made of {len(self.files):,} files")
                return
            print(f"{self.root} has changed since {self.out} was written: {changes}")
        with atomic(self.out / "val.parquet") as val, atomic(self.out / "train.parquet") as train:
            self._write({"train": train, "val": val})
            (self.out / RECORD).unlink(missing_ok=True)  # it is of the files that go now
        if self.skipped:
            record["skipped"] = self.counts["skipped"]
        write_json(self.out / RECORD, record)

    def _write(self, paths: dict[str, Path]) -> None:
        if self.splits:
            held_out = corpora.first_names(self.splits["val"])
            documents = ((split, text) for split in SPLITS for text in self._documents(self.splits[split]))
        else:
            held_out = f"one document in {ONE_IN}, by checksum"
            documents = ((corpora.split_by_checksum(text, ONE_IN), text) for text in self._documents(self.files))
        written = corpora.write_documents(documents, paths)
        if self.skipped and self.counts["skipped"] >= REFUSED_FROM * self.counts["records"]:
            raise self._refusal()
        number, chars = (sum(counts[key] for counts in written.values()) for key in ("documents", "chars"))
        least = min(END_CHARS, chars // 10)
        too_few = number < ONE_IN or not written["train"]["documents"] or written["val"]["chars"] < least
        if too_few and not self.splits:
            held_out, self.counts, self.skipped = "the end of the text", Counter(), []
            written = corpora.write_documents(_cut_end(self._documents(self.files), chars), paths)
        for name, counts in written.items():
            if not counts["documents"]:
                raise UserError(f"{self.root} has too little text for the {name} split")
            print(f"{name}: {counts['documents']:,} documents, {counts['chars']:,} characters")
        if self.without_text:
            problem = f"JSON without a field {self.column} that is a string ({corpora.first_names(self.without_text)})"
            print(f"{self.root}: not read: {problem}; if one has text, name it by --text-column")
        if self.skipped:
            print(f"{self.root}: skipped: {self._describe_skipped()}")
        if self.counts["empty"]:
            print(f"{self.counts['empty']:,} empty documents are left out")
        print(f"from {len(self.files) - len(self.without_text):,} files; held out: {held_out}")

    def _documents(self, names: Collection[str]) -> Iterator[str]:
        """The documents of these files that are not white space."""
        with progress_bar() as bar:
            for name in bar.track(names, task_id=bar.add_task("reading files", total=len(names), status="")):
                for text in self._read(name):
                    if text.strip():
                        yield text
                    else:
                        self.counts["empty"] += 1

    def _read(self, name: str) -> Iterator[str]:
        """The documents of a file. Raises UserError naming it, and the place in it."""
        path, (kind, codec) = self.files[name], _kind(name)
        if kind == ".parquet":
            yield from chain.from_iterable(corpora.document_batches(path, column=self.column))
            return
        try:
            with open(path, "rb") as file:
                data = pa.CompressedInputStream(file, codec) if codec else file
                with io.TextIOWrapper(data, encoding="utf-8-sig") as text:
                    yield from _pieces(text) if kind in (".txt", ".md") else self._texts(name, text)
        except UnicodeDecodeError:
            advice = "convert it (such as by iconv -f LATIN1 -t UTF-8) or move it away"
            raise UserError(f"{path} is not text in UTF-8; {advice}") from None
        except OSError as error:
            if error.filename is not None:
                raise
            raise UserError(f"{path} is damaged, or is not what its name says ({reason_of(error)})") from None

    def _texts(self, name: str, stream: io.TextIOWrapper) -> Iterator[str]:
        """The texts of a file of JSON that are not null. A .json file without any is left out among other text.

        Raises UserError for a record without text if none may be skipped, or if none of CERTAIN records has one.
        """
        before, places = self.counts.copy(), len(self.skipped)
        is_other = self.may_skip and _kind(name)[0] == ".json"
        for place, record in _records(self.files[name], stream):
            text = _text_in(record, self.column)
            has_none = not isinstance(text, str | None)
            is_other = is_other and has_none
            self.counts.update(records=1, skipped=has_none)
            if isinstance(text, str):
                yield text
            if has_none and len(self.skipped) < NAMED:
                self.skipped.append(f"{name} {place}" if self.skipped else f"{name} {place} is {reprlib.repr(record)}")
            is_refused = self.strict or self.counts["skipped"] == self.counts["records"] == CERTAIN
            if has_none and is_refused and not is_other:
                raise self._refusal()
        if is_other and self.counts != before:
            self.without_text.add(name)
            self.counts, self.skipped = before, self.skipped[:places]

    def _describe_skipped(self) -> str:
        """How many records have no text, and where the first of them are."""
        number, records = self.counts["skipped"], self.counts["records"]
        places = ", ".join(self.skipped) + (", ..." if number > NAMED else "")
        return f"{number:,} of {records:,} records, without a field {self.column} that is a string: {places}"

    def _refusal(self) -> UserError:
        """The error that names the first records without a text."""
        advice = "name the field that is the text by --text-column, or mend or delete these records"
        return UserError(f"{self.root} is refused for {self._describe_skipped()}; {advice}")


def _read_record(folder: Path) -> dict[str, Any] | None:
    """What the corpus in `folder` is made of; None if it is not complete, or if the note that says so is damaged."""
    if not all((folder / name).exists() for name in ("train.parquet", "val.parquet", RECORD)):
        return None
    with contextlib.suppress(UserError, KeyError, AttributeError, TypeError):
        record = read_json(folder / RECORD, "note of the corpus's files")
        if all(len(about) == 3 for about in record["files"].values()):
            return record
    return None


def _contents(record: dict[str, Any]) -> dict[str, Any]:
    """What a corpus is made of, by name. A copy of a file has another time, and the same content."""
    checksums = {name: about[2] for name, about in record["files"].items()}
    return {"rules of reading": record.get("rules"), "--text-column": record.get("column"), **checksums}


def _walk(path: Path, entered: set[Path]) -> Iterator[Path]:
    """`path`, if it is a file, or the files below it that are not hidden. No folder in `entered` is entered."""
    if not path.is_dir():
        yield path
    elif path.resolve() not in entered:
        entered.add(path.resolve())
        for inner in sorted(path.iterdir()):
            if not inner.name.startswith("."):
                yield from _walk(inner, entered)


def _kind(name: str) -> tuple[str, str | None]:
    """The suffix that says what a file is, and what it is packed with: (".txt", "gzip")."""
    *_, kind, last = ("", "", *Path(name.lower()).suffixes)
    if last not in CODECS:
        return last, None
    return ("" if kind == ".parquet" else kind), CODECS[last]


def _named_splits(root: Path, names: list[str]) -> dict[str, list[str]] | None:
    """The files of the train and val splits, if names put every file but a README in a split."""
    paths = {name: PurePosixPath(name.lower()) for name in names}
    paths = {name: path for name, path in paths.items() if path.name not in ("readme.md", "readme.txt")}
    split_of = {name: _split_in_name(path) for name, path in paths.items()}
    splits = corpora.splits_of(split_of)
    unnamed = [name for name, split in split_of.items() if split is None]
    if splits and unnamed:
        print(f"{root}: names do not decide what is held out, for some are in no split: {corpora.first_names(unnamed)}")
    return None if unnamed else splits


def _split_in_name(path: PurePosixPath) -> str | None:
    """The split that the name of a folder is, or that of a file: `val/a.txt`, `train-00000-of-00002.parquet`."""
    word = re.sub(r"[-_.]?\d+(-of-\d+)?$", "", corpora.ENDINGS.sub("", path.name)).split(".")[-1]
    return next((corpora.SPLIT_NAMES[name] for name in (*path.parts[:-1], word) if name in corpora.SPLIT_NAMES), None)


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


def _text_in(record: Any, column: str) -> Any:
    """The field of that name, or the one inside fields that the parts of a dotted name lead to; False if it lacks."""
    for name in (column,) if isinstance(record, dict) and column in record else column.split("."):
        record = record.get(name, False) if isinstance(record, dict) else False
    return record


def _records(path: Path, text: io.TextIOWrapper) -> Iterator[tuple[str, Any]]:
    """The records of a file of JSON, and where they are: lines, or an array or an object over several lines."""

    def parse(place: str, content: str) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            reason = reason_of(error).split(": line")[0]
            raise UserError(f"{path} is not JSON {place} ({reason}); mend it or move it away") from None

    lines = ((number, line) for number, line in enumerate(text, 1) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    in_lines = _kind(path.name)[0] == ".jsonl"
    with contextlib.suppress(UserError):
        in_lines = in_lines or isinstance(parse("", first[1]), dict)
    if in_lines:
        yield from ((f"line {n}", parse(f"in line {n}", line)) for n, line in chain([first], lines))
    else:
        value = parse("as a whole", first[1] + text.read())
        records = value if isinstance(value, list) else [value]
        yield from ((f"record {n}", record) for n, record in enumerate(records, 1))
