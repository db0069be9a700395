"""The processes that pack: units are dealt to them, and their records collected."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import active_children
from pathlib import Path

from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.data.units import Unit, pack_unit, read_record
from trainkit_gka.cli import UserError
from trainkit_gka.progress import progress_bar, rate
from trainkit_gka.workers import begin, context, cores, interrupt_held_back

AHEAD = 2  # units per process that wait or run, so that the queue does not grow with the corpus


@dataclass
class Packed:
    """The units' records in order, and of those packed now: how many, bytes of text, and seconds over all workers."""

    records: list[dict] = field(default_factory=list)
    new: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, record: dict, new: bool) -> None:
        # Records are the same wherever and however often a unit is packed; their keys are one string each.
        self.records.append({sys.intern(key): value for key, value in record.items() if key != "seconds"})
        if new:
            self.new, self.bytes = self.new + 1, self.bytes + record["bytes"]
            self.seconds += record["seconds"]

    def speed(self) -> float | None:
        """MB of text that a worker packs in a second; None if nothing was packed, or in no time."""
        return self.bytes / 1e6 / self.seconds if self.seconds else None


def pack_units(
    units: list[Unit], corpus: Path, sequence_len: int, out: Path, workers: int, split_documents: bool = False
) -> Packed:
    """Pack the units that `out` lacks, with the tokenizer in it. Those that it holds are checked and kept.

    workers: processes; 0 = one for each core that this process may use. split_documents: as in `pack_unit`. Raises
    UserError if a process is killed.
    """
    processes = max(1, min(workers or cores(), len(units)))
    where = (corpus, sequence_len, out, split_documents)
    packed, started = Packed(), time.perf_counter()
    with (
        ProcessPoolExecutor(processes, context("nanochat_gka"), _start_worker, (out,)) as pool,
        progress_bar() as bar,
    ):
        task = bar.add_task("packing", total=len(units), status="")
        try:
            for record, new in _in_any_order(pool, units, processes * AHEAD, where):
                packed.add(record, new)
                speed = packed.bytes / 1e6 / (time.perf_counter() - started)
                bar.update(task, advance=1, status=rate(speed, "MB/s") if packed.new else "checking")
        except BrokenProcessPool:
            advice = "run the same command again, perhaps with fewer --workers"
            raise UserError(f"a worker process was killed (out of memory?); {advice}") from None
        except BaseException:
            for worker in active_children():
                worker.kill()
            raise
    order = {unit.name: place for place, unit in enumerate(units)}
    packed.records.sort(key=lambda record: order[record["name"]])
    if reused := len(units) - packed.new:
        print(f"{out}: {reused} of {len(units)} units were packed before")
    return packed


def _in_any_order(pool: ProcessPoolExecutor, units: list[Unit], most: int, where: tuple) -> Iterator[tuple[dict, bool]]:
    """What `_pack` returns for every unit; at most `most` units are with the processes."""
    waiting, running = iter(units), set()
    while True:
        with interrupt_held_back():  # processes start here
            running |= {pool.submit(_pack, unit, *where) for unit in islice(waiting, most - len(running))}
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


_worker: dict[str, Tokenizer] = {}


def _start_worker(tokenizer_folder: Path) -> None:
    """Load the tokenizer once per process."""
    begin()
    _worker["tokenizer"] = Tokenizer.load(tokenizer_folder)


def _pack(unit: Unit, corpus: Path, sequence_len: int, out: Path, split_documents: bool) -> tuple[dict, bool]:
    """The unit's record, and whether it had to be packed."""
    if record := read_record(unit, out):
        return record, False
    return pack_unit(unit, corpus, _worker["tokenizer"], sequence_len, out, split_documents), True
