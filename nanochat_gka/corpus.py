"""Where documents come from. Everything downstream reads one form: a folder of parquet files with a `text` column.

    python -m nanochat_gka.corpus --source builtin                     # CPython's own documentation, no network; into out/corpus/builtin
    python -m nanochat_gka.corpus --source fineweb --num-shards 170    # FineWeb-Edu from the Hugging Face hub; into out/corpus/fineweb

Your own text: put parquet files with a string column `text` in a folder and pass the folder wherever `--corpus` is asked for.
Files are taken in name order; the last one is the validation split and the others are training, as in nanochat.
"""

import ast
import hashlib
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from trainkit.cli import Bounds, UserError, reason_of, run
from trainkit.files import atomic, locked, read_json, remove_stale_temporaries, sha256, write_json
from trainkit.progress import progress_bar

SPLITS = ("train", "val")
ROW_GROUP = 1024  # documents, as in nanochat's shards
DOCUMENT_BATCH = 128  # documents that nanochat's loader tokenises at once
FINEWEB_REPO = "karpathy/fineweb-edu-100b-shuffle"
SHARDS = Bounds(2, 1823)  # the last one is the validation split
VAL_FRACTION = 16  # one text in 16 of the built-in corpus is held out
MIN_PARAGRAPH = 40  # characters
DOCUMENT_CHARS = 400  # keeps cropping near a tenth at T = 256


@dataclass(frozen=True)
class ParquetCorpus:
    """A folder of parquet files. Raises UserError if it cannot serve: absent, fewer than two files, unreadable, no `text` column."""

    folder: Path

    def __post_init__(self):
        if not self.folder.is_dir():
            raise UserError(f"corpus folder not found: {self.folder} (make data creates one, or pass --corpus DIR)")
        if len(self.paths()) < 2:
            raise UserError(
                f"{self.folder} needs at least two .parquet files (the last by name is the validation split), found {len(self.paths())}"
            )
        for path in self.paths():
            open_parquet(path)

    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.parquet"))

    def files(self, split: str) -> list[Path]:
        """The files of "train" or "val"."""
        return self.paths()[:-1] if split == "train" else self.paths()[-1:]

    def documents(self, split: str) -> Iterator[str]:
        """The split's documents in order; empty ones are left out."""
        for path in self.files(split):
            yield from read_documents(path)


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open one file and check its column. Raises UserError naming the file."""
    try:
        file = pq.ParquetFile(path)
        column = file.schema_arrow.field("text") if "text" in file.schema_arrow.names else None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({reason_of(error)})") from None
    if column is None:
        raise UserError(f"{path} needs a string column named text, it has: {', '.join(file.schema_arrow.names)}")
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise UserError(f"{path} needs a string column named text, its text is of type {column.type}")
    return file


def read_documents(path: Path) -> Iterator[str]:
    """A file's documents; empty ones are left out. Raises as `document_batches`."""
    for batch in document_batches(path):
        yield from filter(None, batch)


def document_batches(path: Path, groups: range | None = None, size: int = DOCUMENT_BATCH) -> Iterator[list[str]]:
    """Documents of a file's row groups (default: all) in lists of `size`, as nanochat reads them: the last list of a row group may be
    shorter, an empty text is a document, a null is none. Raises UserError naming the file if it is damaged.
    """
    file = open_parquet(path)
    for group in groups or range(file.num_row_groups):
        try:
            texts = file.read_row_group(group, columns=["text"]).column("text").to_pylist()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{path} is damaged in row group {group} ({reason_of(error)}); delete it and fetch it again"
            ) from None
        for first in range(0, len(texts), size):
            yield [text for text in texts[first : first + size] if text is not None]


def builtin_texts() -> list[str]:
    """CPython's language reference (pydoc_data.topics, a text per topic) and the standard library's docstrings (a text per module), in a
    fixed order and without repeated paragraphs: the reference repeats whole sections under several topics."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    texts = [_new_paragraphs(topics[name], seen) for name in sorted(topics)]
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"test", "tests", "idlelib", "site-packages", "lib2to3", "__pycache__", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        if excluded.isdisjoint(path.relative_to(root).parts):
            texts.append(_new_paragraphs("\n\n".join(_docstrings(path)), seen))
    return [text for text in texts if text]


def _new_paragraphs(text: str, seen: set[str]) -> str:
    kept = []
    for paragraph in text.split("\n\n"):
        key = " ".join(paragraph.split())
        if len(key) >= MIN_PARAGRAPH and key not in seen:
            seen.add(key)
            kept.append(paragraph.rstrip())
    return "\n\n".join(kept)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def _pieces(text: str) -> Iterator[str]:
    """`text` cut at paragraphs into documents of about DOCUMENT_CHARS: short rows would crop most of a long one."""
    piece = ""
    for paragraph in text.split("\n\n"):
        if piece and len(piece) + len(paragraph) > DOCUMENT_CHARS:
            yield piece
            piece = ""
        piece += ("\n\n" if piece else "") + paragraph
    yield piece


def write_builtin(folder: Path) -> None:
    """Write the built-in corpus as two parquet files, training and validation; whole texts are dealt by hash, so no text is in both."""
    splits: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text in builtin_texts():
        held_out = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % VAL_FRACTION == 0
        splits["val" if held_out else "train"] += _pieces(text)
    for index, split in enumerate(SPLITS):
        with atomic(folder / f"shard_{index:05d}.parquet") as temporary:
            pq.write_table(pa.table({"text": splits[split]}), temporary, row_group_size=ROW_GROUP, compression="zstd")
        size = sum(len(document.encode()) for document in splits[split])
        print(f"{split}: {len(splits[split])} documents, {size / 1e6:.2f} MB")


def download_fineweb(folder: Path, num_shards: int) -> None:
    """Fetch FineWeb-Edu in nanochat's shards: each appears when its sha256 is the hub's, existing ones are skipped."""
    SHARDS.check("--num-shards", num_shards)
    names = [f"shard_{index:05d}.parquet" for index in range(num_shards)]
    missing = [name for name in names if not (folder / name).exists()]
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()  # ours counts shards
    logging.set_verbosity_error()  # of its retries
    with progress_bar() as bar:
        task = bar.add_task("FineWeb-Edu shards", total=num_shards, completed=num_shards - len(missing), status="")
        for name in missing:
            bar.update(task, status=name)
            try:
                _fetch(name, folder)
            except Exception as error:  # the client raises its own and its transport's kinds: all mean "not fetched"
                raise UserError(
                    f"could not download {name} of {FINEWEB_REPO}: {reason_of(error)}. Check the network and run the same command again (it continues "
                    f"where it stopped), or use your own text: CORPUS=DIR with parquet files, or CORPUS=builtin"
                ) from None
            bar.advance(task)
    print(f"{folder}: {num_shards} shards ({len(missing)} fetched now)")


def _fetch(name: str, folder: Path) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    incoming = folder / ".incoming"
    shutil.rmtree(incoming, ignore_errors=True)  # of a killed process
    try:
        hf_hub_download(FINEWEB_REPO, name, repo_type="dataset", local_dir=incoming)
        etag = get_hf_file_metadata(hf_hub_url(FINEWEB_REPO, name, repo_type="dataset")).etag or ""
        if re.fullmatch("[0-9a-f]{64}", etag) and sha256(incoming / name) != etag:
            raise OSError("it arrived damaged, its sha256 is not the hub's")
        with atomic(folder / name) as temporary:
            os.replace(incoming / name, temporary)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def claim(folder: Path, source: str) -> None:
    """Note in `folder` that it is prepared from `source`. Raises UserError if it holds other text."""
    marker = folder / "source.json"
    there = read_json(marker, "note of the corpus's source")["source"] if marker.exists() else "another source"
    if there != source and any(folder.glob("*.parquet")):
        raise UserError(f"{folder} holds parquet files of {there}; choose another --out for {source}")
    write_json(marker, {"source": source})


@dataclass
class CorpusConfig:
    """Prepare a corpus folder: the built-in documentation of CPython, or FineWeb-Edu from the Hugging Face hub."""

    source: Literal["builtin", "fineweb"] = "builtin"
    """what to prepare"""
    out: Path | None = None
    """folder for the parquet files; None = out/corpus/SOURCE"""
    num_shards: Annotated[int, SHARDS] = 170
    """fineweb: how many shards of about 100 MB (d20 trains on some 160; the last is the validation split)"""


def main(config: CorpusConfig) -> None:
    out = config.out or Path("out/corpus") / config.source
    with locked(out, "writing"):
        remove_stale_temporaries(out)
        claim(out, config.source)
        if config.source == "fineweb":
            download_fineweb(out, config.num_shards)
        elif len(list(out.glob("*.parquet"))) == len(SPLITS):
            print(f"{out}: already there")
        else:
            write_builtin(out)


if __name__ == "__main__":
    run(main, CorpusConfig)
