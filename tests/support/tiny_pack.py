"""Packing a small corpus, and what it leaves on disk."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_gka import pack


def write_parquet(folder: Path, **files: pa.Table | list) -> Path:
    """A corpus of a file for each name: a table, or texts."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        table = content if isinstance(content, pa.Table) else pa.table({"text": content})
        pq.write_table(table, folder / f"{name}.parquet")
    return folder


def config(root: Path, out: Path, **changes) -> pack.PackConfig:
    """To pack `root`/corpus with `root`/tokenizer into nanochat's rows, by one process."""
    inputs = {"corpus": root / "corpus", "tokenizer": root / "tokenizer", "split_documents": "no"}
    return pack.PackConfig(**{**inputs, "out": out, "sequence_len": 32, "workers": 1, **changes})


def rewrite_json(path: Path, **changes) -> None:
    """Change values of a JSON object in a file; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def bins(out: Path) -> dict[str, bytes]:
    """The contents of all shards."""
    return {path.name: path.read_bytes() for path in out.glob("*.bin")}
