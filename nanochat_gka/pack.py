"""Tokenise a corpus and pack it into training rows on disk: in parallel, resumable, checksummed.

python -m nanochat_gka.pack --corpus out/corpus/fineweb --tokenizer out/tokenizer --out out/packed
python -m nanochat_gka.pack ... --part 2/8        # on the second of eight machines; then once without --part
"""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from nanochat_gka.data import shards
from nanochat_gka.data.corpora import ParquetCorpus, file_changes, fingerprint
from nanochat_gka.data.parts import Part, join
from nanochat_gka.data.pool import pack_units
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.data.units import plan_units
from trainkit.cli import Bounds, UserError, run
from trainkit.files import locked, read_json, remove_stale_temporaries


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
    """Processes. 0 = one for each core that may be used."""
    part: str = ""
    """Pack one part of several, such as 2/8, on each of as many machines; a last call without --part joins them."""


def main(config: PackConfig) -> None:
    corpus, tokenizer = ParquetCorpus(config.corpus), Tokenizer.load(config.tokenizer)
    part = Part.parse(config.part) if config.part else None
    out = part.folder(config.out) if part else config.out
    identity = {
        "format": shards.FORMAT,
        "sequence_len": config.sequence_len,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        **fingerprint(corpus.paths()),
    }
    _check_files(out, identity)
    if part:
        shards.check_plan(config.out, identity)
        if _reused(config.out):
            return
    with locked(out, "packing"):
        remove_stale_temporaries(out)
        shards.check_plan(out, identity)
        tokenizer.save(out)
        if _reused(out):
            return
        shards.begin(out, identity)
        if not part:
            join(out, identity)
        units = plan_units(corpus)
        started = time.perf_counter()
        packed = pack_units(part.of(units) if part else units, config.corpus, config.sequence_len, out, config.workers)
        speed = f"{packed.speed():.1f} MB/s of text per worker, " if packed.new else ""  # joining packs nothing
        took = f"{speed}{time.perf_counter() - started:.1f} s"
        if part:
            joins = "when all parts are packed, the same command without --part joins them"
            print(f"{out}: {len(packed.records):,} of {len(units):,} units; {took}; {joins}")
            return
        manifest = {**identity, "corpus": str(config.corpus), "shards": packed.records}
        shards.finish(out, manifest)
        print(f"{out}: {shards.describe(manifest)}; {took}")


def _check_files(folder: Path, identity: dict) -> None:
    """Raise UserError, saying what changed, if `folder` is packed from other files than `identity` says."""
    if not (folder / shards.PLAN).exists():
        return
    if changes := file_changes(read_json(folder / shards.PLAN, "packing plan"), identity):
        again = f"choose another --out or delete it (rm -r {shlex.quote(str(folder))}) and run the same command again"
        raise UserError(f"{folder} was packed with other corpus files: {changes}; {again}")


def _reused(folder: Path) -> bool:
    """Whether `folder` holds everything; then says so."""
    manifest = shards.read_intact(folder)
    if manifest:
        print(f"{folder}: reusing the tokenised data that is there ({shards.describe(manifest)})")
    return manifest is not None


if __name__ == "__main__":
    run(main, PackConfig)
