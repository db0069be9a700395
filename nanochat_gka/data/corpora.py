"""Corpora: folders of parquet files with a string column `text`, read document by document.

Files are taken in name order; the last one is the validation split and the others are training, as in nanochat.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trainkit.cli import UserError, reason_of
from trainkit.files import read_json, write_json

ROW_GROUP = 1024  # documents, as in nanochat's shards
DOCUMENT_BATCH = 128  # documents that nanochat's loader tokenises at once


@dataclass(frozen=True)
class ParquetCorpus:
    """A folder of parquet files.

    Raises UserError if the folder is absent or has fewer than two files, or if a file is unreadable or lacks `text`.
    """

    folder: Path

    def __post_init__(self):
        if not self.folder.is_dir():
            raise UserError(f"corpus folder not found: {self.folder} (make data creates one, or pass --corpus DIR)")
        count = len(self.paths())
        if count < 2:
            rule = "needs at least two .parquet files (the last by name is the validation split)"
            raise UserError(f"{self.folder} {rule}, found {count}")
        for path in self.paths():
            open_parquet(path)

    def paths(self) -> list[Path]:
        """All files in name order."""
        return sorted(self.folder.glob("*.parquet"))

    def files(self, split: str) -> list[Path]:
        """The files of "train" or "val"."""
        return self.paths()[:-1] if split == "train" else self.paths()[-1:]

    def documents(self, split: str) -> Iterator[str]:
        """The split's documents in order, without empty ones."""
        for path in self.files(split):
            for batch in document_batches(path):
                yield from filter(None, batch)


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


def document_batches(path: Path, groups: range | None = None, size: int = DOCUMENT_BATCH) -> Iterator[list[str]]:
    """Documents of a file's row groups (default: all) in lists of `size`, as nanochat reads them.

    The last list of a row group may be shorter. An empty text counts as a document, a null does not.
    Raises UserError naming the file if it is damaged.
    """
    file = open_parquet(path)
    for group in groups or range(file.num_row_groups):
        try:
            texts = file.read_row_group(group, columns=["text"]).column("text").to_pylist()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            damage = f"{path} is damaged in row group {group} ({reason_of(error)})"
            raise UserError(f"{damage}; delete it and fetch it again") from None
        for first in range(0, len(texts), size):
            yield [text for text in texts[first : first + size] if text is not None]


def claim(folder: Path, source: str) -> None:
    """Note in `folder` that it is prepared from `source`. Raises UserError if it holds text from elsewhere."""
    marker = folder / "source.json"
    present = read_json(marker, "note of the corpus's source")["source"] if marker.exists() else "another source"
    if present != source and any(folder.glob("*.parquet")):
        raise UserError(f"{folder} holds parquet files of {present}; choose another --out for {source}")
    write_json(marker, {"source": source})
