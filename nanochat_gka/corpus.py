"""Prepare the documents that everything downstream reads: a folder of parquet files with a `text` column.

    python -m nanochat_gka.corpus --source builtin                     # CPython's own documentation, without network
    python -m nanochat_gka.corpus --source fineweb --num-shards 170    # FineWeb-Edu from the Hugging Face hub
    python -m nanochat_gka.corpus --source notes --out out/notes       # your own files: text, JSON, parquet

nanochat's shards, shard_00000.parquet and so on with a string column `text`, are a corpus as they are.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from nanochat_gka.data import SPLITS, builtin, fineweb, own_text
from nanochat_gka.data.corpora import COLUMN, claim
from trainkit_gka.cli import run
from trainkit_gka.files import locked, remove_stale_temporaries


@dataclass
class CorpusConfig:
    """Prepare a corpus folder: CPython's documentation, FineWeb-Edu from the Hugging Face hub, or your own files."""

    source: str = "builtin"
    """builtin, fineweb, or a file or folder of .txt, .md, .jsonl, .json (each also as .gz or .zst) or .parquet."""
    out: Path | None = None
    """Folder for the parquet files. None = out/corpus/NAME of the source."""
    num_shards: Annotated[int, fineweb.SHARDS] = 170
    """Shards of FineWeb-Edu, about 100 MB each; d20 trains on about 160, and the last is the validation split."""
    text_column: str = COLUMN
    """Which column, or field, of your own parquet and JSON is the text."""


def main(config: CorpusConfig) -> None:
    path = None if config.source in ("builtin", "fineweb") else Path(config.source)
    out = config.out or Path("out/corpus") / (path.absolute().name if path else config.source)
    text = own_text.find(path, out) if path else None
    with locked(out, "writing"):
        remove_stale_temporaries(out)
        claim(out, str(path.absolute()) if path else config.source)
        if text:
            own_text.write(text, out, config.text_column)
        elif config.source == "fineweb":
            fineweb.download(out, config.num_shards)
        elif len(list(out.glob("*.parquet"))) == len(SPLITS):
            print(f"{out}: already there")
        else:
            builtin.write(out)


if __name__ == "__main__":
    run(main, CorpusConfig)
