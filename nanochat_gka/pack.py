"""Tokenise a corpus and pack it into training rows on disk: in parallel, resumable, checksummed.

python -m nanochat_gka.pack --corpus out/corpus/fineweb --tokenizer out/tokenizer --out out/packed
python -m nanochat_gka.pack ... --part 2/8        # on the second of eight machines; then once without --part
"""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from nanochat_gka.data import shards
from nanochat_gka.data.corpora import ParquetCorpus, fingerprint, source_of
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.data.units import PackJob, pack_units, plan_units
from trainkit_gka.cli import Bounds, UserError, reason_of, run
from trainkit_gka.files import locked, remove_stale_temporaries, write_json
from trainkit_gka.progress import rate

MUCH_CROPPED = 0.2


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
    corpus.print_remarks()
    number, count = _parse_part(config.part) if config.part else (1, 1)
    # No file in the folder of a part is another machine's.
    out = config.out / f"part-{number}-of-{count}" if config.part else config.out
    job = PackJob(config.corpus, out, config.sequence_len, _splits_documents(config, out))
    identity = {
        "format": shards.FORMAT,
        "sequence_len": config.sequence_len,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        **fingerprint(corpus.paths()),
        "split_documents": job.split_documents,
    }
    if config.part:
        shards.check_plan(config.out, identity)
        if _is_packed(config.out, config.corpus):
            return
    with locked(out, "packing"):
        remove_stale_temporaries(out)
        shards.check_plan(out, identity)
        tokenizer.save(out)
        if _is_packed(out, config.corpus):
            return
        (out / shards.MANIFEST).unlink(missing_ok=True)  # the folder is incomplete from now on
        write_json(out / shards.PLAN, identity)
        if not config.part:
            _join(out, identity)
        units = plan_units(corpus, job.split_documents)
        started = time.perf_counter()
        # Units of a part follow each other, so that a machine reads few of the files.
        first = (number - 1) * len(units) // count
        last = number * len(units) // count
        records, speed = pack_units(units[first:last], job, config.workers)
        took = f"{time.perf_counter() - started:.1f} s"
        if speed:  # joining packs nothing
            took = f"{rate(speed, 'MB/s of text per worker')}, {took}"
        if config.part:
            joins = "when all parts are packed, the same command without --part joins them"
            print(f"{out}: {len(records):,} of {len(units):,} units; {took}; {joins}")
            return
        manifest = {**identity, "corpus": str(config.corpus), "shards": records}
        shards.finish(out, manifest)
        _report(f"{out}: packed in {took}", manifest, config.corpus)


def _parse_part(text: str) -> tuple[int, int]:
    """Number, from 1, and count of the part that `text` names, such as 2/8. Raises UserError if it names none."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"--part must be NUMBER/COUNT with a number from 1 to the count, such as 2/8, got {text!r}")
    return int(number), int(count)


def _splits_documents(config: PackConfig, out: Path) -> bool:
    """What --split-documents means for this corpus and what is in `out` or, of a part, in --out."""
    if config.split_documents != "auto":
        return config.split_documents == "yes"
    plan = shards.read_plan(config.out) or shards.read_plan(out)
    return source_of(config.corpus) != "fineweb" if plan is None else shards.splits_documents(plan)


def _is_packed(folder: Path, corpus: Path) -> bool:
    """Whether `folder` has a manifest and no shard is missing or truncated; then prints so."""
    try:
        manifest = shards.read_manifest(folder)
    except UserError:
        return False
    if shards.find_damage(folder, manifest):
        return False
    _report(f"{folder}: reusing the tokenised data that is there", manifest, corpus)
    return True


def _report(text: str, manifest: dict[str, Any], corpus: Path) -> None:
    """Print what was packed, and what to change if much of the text is in no row, but for FineWeb-Edu in nanochat's."""
    rows, cropped = shards.describe(manifest)
    print(f"{text}: {rows}")
    is_split = shards.splits_documents(manifest)
    if cropped > MUCH_CROPPED and (is_split or source_of(corpus) != "fineweb"):
        why = "what does not fit into a row is dropped; pack with --split-documents yes to another --out to keep it"
        if is_split:
            why = "rows that are not full are dropped; lower --sequence-len, or give more text"
        print(f"warning: {cropped:.0%} of the text is in no row: {why}")


def _join(out: Path, identity: dict[str, Any]) -> None:
    """Move the units of all parts in `out` up into it. A join that is killed is continued by the next one.

    Rows without a record, which may still be on their way from another machine, stay where they are, and their part's
    folder with them. Raises UserError if a part is of another tokenizer, length or corpus than `identity` says, is
    being packed, or is not a folder of `out`'s disk.
    """
    folders = sorted(path for path in out.glob("part-*-of-*") if path.is_dir())
    for folder in folders:
        if folder.is_symlink():
            raise UserError(f"{folder} is a link; put the part's folder itself into {out}")
        if not (folder / shards.PLAN).exists() and any(folder.glob("*_*.json")):
            raise UserError(f"{folder} has no {shards.PLAN}; copy the whole folder of the part again")
        shards.check_plan(folder, identity)
    for folder in folders:
        try:
            with locked(folder, "packing"):
                for record in folder.glob("*_*.json"):
                    rows = record.with_suffix(".bin")
                    if rows.exists():  # otherwise a killed join has moved them
                        os.replace(rows, out / rows.name)
                    os.replace(record, out / record.name)
                unknown = sorted(folder.glob("*_*.bin"))
            if unknown:
                print(f"{folder} stays: {unknown[0].name} has no record; delete the folder if nothing is copied there")
            else:
                shutil.rmtree(folder)
        except OSError as error:
            advice = f"it must be an ordinary folder on the disk of {out}: copy it there"
            raise UserError(f"{folder} cannot be joined ({reason_of(error)}); {advice}") from None


if __name__ == "__main__":
    run(main, PackConfig)
