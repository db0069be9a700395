"""Prepare the documents that everything downstream reads: a folder of parquet files with a `text` column.

    python -m nanochat_gka.corpus --source builtin                     # CPython's own documentation, without network
    python -m nanochat_gka.corpus --source fineweb --num-shards 170    # FineWeb-Edu from the Hugging Face hub

To train on your own text, put parquet files with a string column `text` in a folder and give the folder as `--corpus`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from nanochat_gka.data import SPLITS, builtin, fineweb
from nanochat_gka.data.corpora import claim
from trainkit.cli import run
from trainkit.files import locked, remove_stale_temporaries


@dataclass
class CorpusConfig:
    """Prepare a corpus folder: the built-in documentation of CPython, or FineWeb-Edu from the Hugging Face hub."""

    source: Literal["builtin", "fineweb"] = "builtin"
    """What to prepare."""
    out: Path | None = None
    """Folder for the parquet files. None = out/corpus/SOURCE."""
    num_shards: Annotated[int, fineweb.SHARDS] = 170
    """Shards of FineWeb-Edu, about 100 MB each; d20 trains on about 160, and the last is the validation split."""


def main(config: CorpusConfig) -> None:
    out = config.out or Path("out/corpus") / config.source
    with locked(out, "writing"):
        remove_stale_temporaries(out)
        claim(out, config.source)
        if config.source == "fineweb":
            fineweb.download(out, config.num_shards)
        elif len(list(out.glob("*.parquet"))) == len(SPLITS):
            print(f"{out}: already there")
        else:
            builtin.write(out)


if __name__ == "__main__":
    run(main, CorpusConfig)
