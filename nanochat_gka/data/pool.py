"""The processes that pack: units are dealt to them, and their records collected."""

import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children
from pathlib import Path

from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.data.units import Unit, pack_unit, read_record
from trainkit.cli import UserError
from trainkit.progress import progress_bar
from trainkit.workers import begin, context, interrupt_held_back


def pack_units(units: list[Unit], corpus: Path, sequence_len: int, out: Path, workers: int) -> list[dict]:
    """Pack the units that `out` lacks, with the tokenizer in it. Returns all records in order, `new` if packed now.

    workers: processes; 0 = one per core. Raises UserError if one of them is killed.
    """
    records = {unit.name: {"new": False, **record} for unit in units if (record := read_record(unit, out))}
    missing = [unit for unit in units if unit.name not in records]
    if records:
        print(f"{out}: continuing, {len(records)} of {len(units)} units are packed")
    processes = max(1, min(workers or os.cpu_count() or 1, len(missing)))
    started, packed_bytes = time.perf_counter(), 0
    with (
        ProcessPoolExecutor(processes, context("nanochat_gka"), _start_worker, (out,)) as pool,
        progress_bar() as bar,
    ):
        task = bar.add_task("packing", total=len(units), completed=len(records), status="")
        try:
            with interrupt_held_back():
                futures = [pool.submit(_pack, unit, corpus, sequence_len, out) for unit in missing]
            for future in as_completed(futures):
                record = future.result()
                records[record["name"]] = {"new": True, **record}
                packed_bytes += record["bytes"]
                speed = packed_bytes / 1e6 / (time.perf_counter() - started)
                bar.update(task, advance=1, status=f"{speed:.1f} MB/s")
        except BrokenProcessPool:
            advice = "run the same command again, perhaps with fewer --workers"
            raise UserError(f"a worker process was killed (out of memory?); {advice}") from None
        except BaseException:
            for worker in active_children():
                worker.kill()
            raise
    return [records[unit.name] for unit in units]


_worker: dict[str, Tokenizer] = {}


def _start_worker(tokenizer_folder: Path) -> None:
    """Load the tokenizer once per process."""
    begin()
    _worker["tokenizer"] = Tokenizer.load(tokenizer_folder)


def _pack(unit: Unit, corpus: Path, sequence_len: int, out: Path) -> dict:
    return pack_unit(unit, corpus, _worker["tokenizer"], sequence_len, out)
