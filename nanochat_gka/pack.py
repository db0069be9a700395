"""Tokenise a corpus and pack it into training rows on disk: in parallel, resumable, checksummed.

python -m nanochat_gka.pack --corpus out/corpus/fineweb --tokenizer out/tokenizer --out out/packed
python -m nanochat_gka.pack ... --part 2/8        # on the second of eight machines; then once without --part
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from nanochat_gka.data import shards
from nanochat_gka.data.corpora import NOTE, ParquetCorpus, file_changes, fingerprint
from nanochat_gka.data.parts import Part, join
from nanochat_gka.data.pool import pack_units
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.data.units import plan_units
from trainkit_gka.cli import Bounds, UserError, run
from trainkit_gka.files import locked, read_json, remove_stale_temporaries
from trainkit_gka.progress import rate


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
    split_documents: Literal["auto", "yes", "no"] = "auto"
    """Whether a document goes on in another row where one ends; no = nanochat's rows, which crop long documents. auto =
    as the rows in --out, else no for FineWeb-Edu as nanochat_gka.corpus fetches it, and yes for any other text."""
    workers: Annotated[int, Bounds(0)] = 0
    """Processes. 0 = one for each core that may be used."""
    part: str = ""
    """Pack one part of several, such as 2/8, on each of as many machines; a last call without --part joins them."""


def main(config: PackConfig) -> None:
    corpus, tokenizer = ParquetCorpus(config.corpus), Tokenizer.load(config.tokenizer)
    for remark in corpus.remarks():
        print(remark)
    part = Part.parse(config.part) if config.part else None
    out = part.folder(config.out) if part else config.out
    split_documents = chosen_split(config, out)
    identity = {
        "format": shards.FORMAT,
        "sequence_len": config.sequence_len,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        **fingerprint(corpus.paths()),
        "split_documents": split_documents,
    }
    _check_files(out, identity)
    if part:
        shards.check_plan(config.out, identity)
        if _reused(config.out, config):
            return
    with locked(out, "packing"):
        remove_stale_temporaries(out)
        shards.check_plan(out, identity)
        tokenizer.save(out)
        if _reused(out, config):
            return
        shards.begin(out, identity)
        if not part:
            join(out, identity)
        units = plan_units(corpus, cut=split_documents)
        if split_documents:  # nanochat's first rows are of documents that are not split
            units = [unit for unit in units if unit.split != shards.TRAIN_FIRST]
        started = time.perf_counter()
        packed = pack_units(
            part.of(units) if part else units, config.corpus, config.sequence_len, out, config.workers, split_documents
        )
        speed = rate(packed.speed(), "MB/s of text per worker")  # joining packs nothing
        took = ", ".join(filter(None, (speed, f"{time.perf_counter() - started:.1f} s")))
        if part:
            joins = "when all parts are packed, the same command without --part joins them"
            print(f"{out}: {len(packed.records):,} of {len(units):,} units; {took}; {joins}")
            return
        manifest = {**identity, "corpus": str(config.corpus), "shards": packed.records}
        shards.finish(out, manifest)
        print(f"{out}: {shards.describe(manifest)}; {took}")
        _warn_of_cropping(manifest, config.corpus)


def _check_files(folder: Path, identity: dict) -> None:
    """Raise UserError, saying what changed, if `folder` is packed from other files than `identity` says."""
    if not (folder / shards.PLAN).exists():
        return
    if changes := file_changes(read_json(folder / shards.PLAN, "packing plan"), identity):
        raise UserError(f"{folder} was packed with other corpus files: {changes}; {shards.start_anew(folder)}")


def chosen_split(config: PackConfig, out: Path) -> bool:
    """What --split-documents means for this corpus and what is in `out` or, of a part, in --out."""
    if config.split_documents != "auto":
        return config.split_documents == "yes"
    plan = shards.read_plan(config.out) or shards.read_plan(out)
    return not is_fineweb(config.corpus) if plan is None else shards.splits_documents(plan)


def is_fineweb(folder: Path) -> bool:
    """Whether this is FineWeb-Edu as nanochat_gka.corpus fetches it, of which the folder has a note."""
    note = folder / NOTE
    return note.exists() and read_json(note, "note of the corpus's source").get("source") == "fineweb"


def _reused(folder: Path, config: PackConfig) -> bool:
    """Whether `folder` holds everything; then says so."""
    manifest = shards.read_intact(folder)
    if manifest:
        print(f"{folder}: reusing the tokenised data that is there ({shards.describe(manifest)})")
        _warn_of_cropping(manifest, config.corpus)
    return manifest is not None


def _warn_of_cropping(manifest: dict, corpus: Path) -> None:
    """Say what to change if much of the text is in no row, but for FineWeb-Edu in nanochat's rows, as it is meant."""
    share, split_documents = shards.cropped(manifest), shards.splits_documents(manifest)
    if share > shards.MUCH_CROPPED and (split_documents or not is_fineweb(corpus)):
        why = "what does not fit into a row is dropped; pack with --split-documents yes to another --out to keep it"
        if split_documents:
            why = "rows that are not full are dropped; lower --sequence-len, or give more text"
        print(f"warning: {share:.0%} of the text is in no row: {why}")


if __name__ == "__main__":
    run(main, PackConfig)
