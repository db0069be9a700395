"""How fast a corpus is tokenised and packed into rows, by one process and by several.

    python -m runs.bench.packing --corpus out/corpus/builtin --tokenizer out/tokenizer

The corpus is packed as often as --copies says, as if it were so many training files: more than enough units for every
process. Processes start anew in every turn; that time is in the text packed per second, not in the text per second and
process. Appends one line for each number of processes: the median of the turns.
"""

import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import torch

from nanochat_gka.data.corpora import ParquetCorpus
from nanochat_gka.data.pool import pack_units
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.data.units import plan_units
from trainkit_gka.cli import Bounds, Count, run
from trainkit_gka.results import append_result
from trainkit_gka.workers import cores

FILE = "packing.jsonl"


@dataclass
class PackingConfig:
    """Measure how fast a corpus is tokenised and packed, by one process and by several."""

    corpus: Path = Path("out/corpus/builtin")
    """Folder of parquet files."""
    tokenizer: Path = Path("out/tokenizer")
    """Folder of tokenizer.json."""
    copies: Count = 24
    """How often every training file is packed."""
    processes: Annotated[list[int], Bounds(1)] = field(default_factory=lambda: sorted({1, cores()}))
    """Numbers of processes, timed in turns."""
    rounds: Count = 3
    """Turns; the median counts."""
    sequence_len: Annotated[int, Bounds(1, 2**20)] = 2048
    """Context length T; rows hold T + 1 ids."""
    results: Path = Path("runs/results") / FILE
    """File of the JSON lines."""


def main(config: PackingConfig) -> None:
    tokenizer, turns = Tokenizer.load(config.tokenizer), {count: [] for count in config.processes}
    with tempfile.TemporaryDirectory() as folder:
        corpus = copied(ParquetCorpus(config.corpus), Path(folder) / "corpus", config.copies)
        for _ in range(config.rounds):
            for count, measured in turns.items():
                out = Path(folder) / "packed"
                out.mkdir()
                tokenizer.save(out)
                started = time.perf_counter()
                packed = pack_units(plan_units(corpus), corpus.folder, config.sequence_len, out, count)
                measured.append((packed.bytes / 1e6 / (time.perf_counter() - started), packed.speed()))
                tokens = sum(record["tokens"] for record in packed.records)
                shutil.rmtree(out)
    shared = {"sequence_len": config.sequence_len, "vocab_size": tokenizer.vocab_size, "cores": cores()}
    for count, measured in turns.items():
        text = {"corpus": config.corpus.name, "megabytes": round(packed.bytes / 1e6, 1), "tokens": tokens}
        together, each = (median(values) for values in zip(*measured))
        metrics = {"mb_per_second": together, "mb_per_second_and_process": each, "turns": config.rounds}
        setting = {**shared, **text, "packing_processes": count}
        append_result(config.results, "packing", setting, metrics, torch.device("cpu"))
        print(f"{count} processes: {together:.1f} MB/s of text, {each:.1f} MB/s and process")


def copied(corpus: ParquetCorpus, folder: Path, copies: int) -> ParquetCorpus:
    """The corpus in `folder`, with every training file as often as `copies` says."""
    folder.mkdir()
    for number in range(copies):
        for path in corpus.files("train"):
            os.symlink(path.absolute(), folder / f"a-{number:04d}-{path.name}")
    for path in corpus.files("val"):
        os.symlink(path.absolute(), folder / f"b-{path.name}")
    return ParquetCorpus(folder)


if __name__ == "__main__":
    run(main, PackingConfig)
