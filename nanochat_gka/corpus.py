"""Prepare the documents that everything downstream reads: a folder of parquet files with a `text` column.

    python -m nanochat_gka.corpus --source builtin                     # CPython's own documentation, without network
    python -m nanochat_gka.corpus --source fineweb --num-shards 170    # FineWeb-Edu from the Hugging Face hub
    python -m nanochat_gka.corpus --source notes --out out/notes       # your own files: text, JSON, parquet

nanochat's shards, shard_00000.parquet and so on with a string column `text`, are a corpus already: --out gets links to
them. If the folder is finished, nothing is done.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from nanochat_gka.data import SPLITS, builtin, fineweb, own_text
from nanochat_gka.data.corpora import COLUMN, claim, link_files, source_of, top_parquet
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
    downloads: Path | None = None
    """Folder for the downloaded shards of FineWeb-Edu, which several corpora can share: each --out gets links
    to its own. None = --out."""
    text_column: str = COLUMN
    """Which column, or field, of your own parquet and JSON is the text; text.content is a field inside another."""
    strict: bool = False
    """Refuse your own JSON for a single record without text; otherwise such records are skipped, counted and named
    while they are below 1 %."""


def main(config: CorpusConfig) -> None:
    path = None if config.source in ("builtin", "fineweb") else Path(config.source)
    out = config.out or Path("out/corpus") / (path.absolute().name if path else config.source)
    source = str(path.absolute()) if path else config.source
    text = None
    is_corpus = path and config.text_column == COLUMN and own_text.is_corpus(path)
    if is_corpus and out.resolve() == path.resolve():
        print(f"{out}: already a corpus")
        return
    if is_corpus:  # the rows of FineWeb-Edu differ from those of other text, wherever its shards are
        source = source_of(path) or source
    elif path:
        text = own_text.TextSource(path, out, config.text_column, config.strict)
    with locked(out, "writing"):
        remove_stale_temporaries(out)
        claim(out, source)
        if is_corpus:
            link_files(path, top_parquet(path), out)
            print(f"{out}: links to the parquet files of {path}")
        elif text:
            text.write()
        elif config.source == "fineweb":
            fineweb.fetch(out, config.num_shards, config.downloads or out)
        elif len(list(out.glob("*.parquet"))) == len(SPLITS):
            print(f"{out}: already there")
        else:
            builtin.write(out)


if __name__ == "__main__":
    run(main, CorpusConfig)
