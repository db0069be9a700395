"""Where documents come from. Everything downstream reads one form: a folder of parquet files with a `text` column.

    python -m nanochat_gka.corpus --source builtin  --out out/corpus/builtin     # CPython's own documentation, no network
    python -m nanochat_gka.corpus --source fineweb  --out out/corpus/fineweb --num-shards 170

Your own text: put parquet files with a string column `text` in a folder and pass the folder wherever `--corpus` is asked for.
Files are taken in name order; the last one is the validation split and the others are training, as in nanochat.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from gka.runtime.cli import UserError, run
from gka.runtime.files import atomic, locked, remove_stale_temporaries
from gka.runtime.progress import progress_bar

SPLITS = ("train", "val")
ROW_GROUP = 1024  # documents, as in nanochat's shards
FINEWEB_REPO = "karpathy/fineweb-edu-100b-shuffle"
FINEWEB_SHARDS = 1823
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
            raise UserError(f"{self.folder} needs at least two .parquet files (the last by name is the validation split), found {len(self.paths())}")
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
            file = open_parquet(path)
            for group in range(file.num_row_groups):
                yield from read_documents(file, group)


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open one file and check its column. Raises UserError naming the file."""
    try:
        file = pq.ParquetFile(path)
        column = file.schema_arrow.field("text") if "text" in file.schema_arrow.names else None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({str(error).splitlines()[0]})") from None
    if column is None or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise UserError(f"{path} needs a string column named text, it has: {', '.join(map(str, file.schema_arrow.names))}")
    return file


def read_documents(file: pq.ParquetFile, group: int) -> list[str]:
    """Documents of one row group."""
    try:
        column = file.read_row_group(group, columns=["text"]).column("text")
        return [text for text in column.to_pylist() if text]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"a parquet file is damaged in row group {group} ({str(error).splitlines()[0]}); fetch it again") from None


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
    """Fetch FineWeb-Edu in nanochat's shards: resumable, checksummed by the hub's client, existing files are skipped."""
    if not 2 <= num_shards <= FINEWEB_SHARDS:
        raise UserError(f"--num-shards must be between 2 and {FINEWEB_SHARDS} (the last one is the validation split), got {num_shards}")
    names = [f"shard_{index:05d}.parquet" for index in range(num_shards)]
    missing = [name for name in names if not (folder / name).exists()]
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # ours counts shards
    with progress_bar() as bar:
        task = bar.add_task("FineWeb-Edu shards", total=num_shards, completed=num_shards - len(missing), status="")
        for name in missing:
            bar.update(task, status=name)
            try:
                hf_hub_download(FINEWEB_REPO, name, repo_type="dataset", local_dir=folder)
            except Exception as error:  # the client raises its own and its transport's kinds: all mean "not fetched"
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise UserError(
                    f"could not download {name} of {FINEWEB_REPO}: {reason}. Check the network and run the same command again (it continues where it "
                    f"stopped), or use your own text: CORPUS=DIR with parquet files, or CORPUS=builtin"
                ) from None
            bar.advance(task)
    print(f"{folder}: {num_shards} shards ({len(missing)} fetched now)")


@dataclass
class CorpusConfig:
    """Prepare a corpus folder: the built-in documentation of CPython, or FineWeb-Edu from the Hugging Face hub."""

    source: Literal["builtin", "fineweb"] = "builtin"
    """what to prepare"""
    out: Path = Path("out/corpus/builtin")
    """folder for the parquet files"""
    num_shards: int = 170
    """fineweb: how many shards of about 100 MB (d20 trains on some 160; the last is the validation split)"""


def main(config: CorpusConfig) -> None:
    with locked(config.out, "writing"):
        remove_stale_temporaries(config.out)
        if config.source == "fineweb":
            download_fineweb(config.out, config.num_shards)
        elif len(list(config.out.glob("*.parquet"))) == len(SPLITS):
            print(f"{config.out}: already there")
        else:
            write_builtin(config.out)


if __name__ == "__main__":
    run(main, CorpusConfig)
