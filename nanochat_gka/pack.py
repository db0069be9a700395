"""Tokenise a corpus and pack it into training rows on disk: in parallel, resumable, checksummed.

python -m nanochat_gka.pack --corpus out/corpus/fineweb --tokenizer out/tokenizer --out out/packed
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from nanochat_gka.data import shards
from nanochat_gka.data.corpora import ParquetCorpus
from nanochat_gka.data.pool import pack_units
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.data.units import plan_units
from trainkit.cli import Bounds, run
from trainkit.files import locked, remove_stale_temporaries


@dataclass
class PackConfig:
    """Tokenise a corpus and pack it into training rows. Continues where it stopped; does nothing if all is packed."""

    corpus: Path = Path("out/corpus/builtin")
    """Folder of parquet files."""
    tokenizer: Path = Path("out/tokenizer")
    """Folder of tokenizer.json."""
    out: Path = Path("out/packed")
    """Folder for the packed rows."""
    sequence_len: Annotated[int, Bounds(1, 2**20)] = 2048
    """Context length T; rows hold T + 1 ids."""
    workers: Annotated[int, Bounds(0)] = 0
    """Processes. 0 = one per core."""


def main(config: PackConfig) -> None:
    corpus, tokenizer, out = ParquetCorpus(config.corpus), Tokenizer.load(config.tokenizer), config.out
    identity = {
        "format": shards.FORMAT,
        "sequence_len": config.sequence_len,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "source": [[path.name, path.stat().st_size] for path in corpus.paths()],
    }
    with locked(out, "packing"):
        remove_stale_temporaries(out)
        shards.check_plan(out, identity)
        tokenizer.save(out)
        if manifest := shards.read_intact(out):
            print(f"{out}: reusing the tokenised data that is there ({shards.describe(manifest)})")
            return
        shards.begin(out, identity)
        started = time.perf_counter()
        records = pack_units(plan_units(corpus), config.corpus, config.sequence_len, out, config.workers)
        seconds = time.perf_counter() - started
        manifest = {**identity, "corpus": str(config.corpus), "shards": records}
        shards.finish(out, manifest)
        new = [record for record in records if record["new"]]
        speed = sum(record["bytes"] for record in new) / 1e6 / (sum(record["seconds"] for record in new) or 1.0)
        print(f"{out}: {shards.describe(manifest)}; {speed:.1f} MB/s of text per worker, {seconds:.1f} s")


if __name__ == "__main__":
    run(main, PackConfig)
