"""The processes that make batches, in training and in evaluation: how many, where they come from, and what becomes of one that dies or is silent."""

import os
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from typing import Annotated

import torch
from torch.utils.data import DataLoader

from deit_gka.data.loader import UNIT, Batch, Images, Key, join
from deit_gka.data.sources import Source, Stream
from trainkit import workers
from trainkit.cli import Bounds, UserError, command_line
from trainkit.distributed import Runtime, keep_freed_memory

MAX_WORKERS = 16
WorkerCount = Annotated[int, Bounds(0, 1024, other=(-1, "automatic"))]  # of a flag
# Seconds without a batch. A unit takes seconds, a network disk that stalls may come back after minutes; other
# processes would wait for an hour.
PATIENCE = 600.0
GLANCE = 5.0  # seconds after which to see whether the workers live


class Loaded(Iterator[Batch]):
    """The batches of `loader`, in order. Its workers start here and end with `end`."""

    def __init__(self, loader: DataLoader, patience: float):
        self._loader, self._patience = iter(loader), patience
        self._workers = getattr(self._loader, "_workers", [])
        self._glances = round(patience / loader.timeout) if loader.timeout else 1

    def __next__(self) -> Batch:
        """Raises UserError if the workers are silent, or dead."""
        for _ in range(self._glances):  # counted, not timed: a machine may have slept
            try:
                return next(self._loader)
            except (RuntimeError, ConnectionError, EOFError) as error:
                if not str(error).startswith("DataLoader timed out"):
                    if not (self._workers and wait([worker.sentinel for worker in self._workers], GLANCE)):
                        raise
                    break  # one died, which shows as any of these errors, perhaps before the server reports it
        # Not within `except`: the traceback would keep the workers' semaphores, and the process's end would complain.
        raise UserError(f"{self._trouble()}; continue with: {command_line()}")

    def _trouble(self) -> str:
        codes = [worker.exitcode for worker in self._workers if worker.exitcode is not None]
        _kill(self._workers)
        if not codes:
            minutes = f"{self._patience / 60:.3g} minutes"
            return f"no loading worker has sent images for {minutes}; does the disk that they are on still answer?"
        ended = f"signal {-codes[0]}" if codes[0] < 0 else f"exit code {codes[0]}"
        reasons = "out of memory, or of shared memory in /dev/shm?"
        return f"a loading worker ended with {ended} ({reasons}); it may help to lower --num-workers"

    def end(self) -> None:
        """Shut the workers down now, whoever still refers to them (a traceback may), and kill those that do not hear."""
        shutdown, late = (
            getattr(self._loader, "_shutdown_workers", None),
            threading.Timer(GLANCE, _kill, [self._workers]),
        )
        self._loader, self._workers = iter(()), []
        if shutdown is not None:
            late.start()
            shutdown()
            late.cancel()


def _kill(processes: list) -> None:
    """End what hears nothing else, as a worker that waits for a disk: the process's own end would wait for it."""
    for process in processes:
        if process.is_alive():
            process.kill()


def worker_context(data: str = ""):
    """Where the workers come from that load `data`. Call it early: the first call starts importing what they need."""
    return workers.context("deit_gka", *(["datasets"] if data.startswith("hf:") else []))


def batches(images: Images, keys: Iterable[list[Key]], num_workers: int, device: torch.device) -> Loaded:
    """Run `images` over `keys` in worker processes (0: in this one); batches come in order."""
    how = dict(batch_sampler=keys, collate_fn=_whole, pin_memory=device.type == "cuda")
    if num_workers:
        how |= dict(num_workers=num_workers, prefetch_factor=2, worker_init_fn=_start_worker)
        how |= dict(multiprocessing_context=worker_context(), timeout=min(PATIENCE, GLANCE))
    return Loaded(DataLoader(images, **how), PATIENCE)


def evaluation_batches(
    source: Source | Stream, transform, runtime: Runtime, batch_size: int, num_workers: int
) -> Iterator[Batch]:
    """This process's part of the images, in order: every image is in exactly one process's part, once."""
    if isinstance(source, Stream):
        items: Iterable = source.records(0, runtime.rank, runtime.world_size)
    else:
        items = range(runtime.rank, len(source), runtime.world_size)
    count = -(-batch_size // UNIT)
    units = _groups_of(items, batch_size // count)
    loaded = batches(Images(source, transform, training=False), units, num_workers, runtime.device)
    try:
        parts: list[Batch] = []
        for unit in loaded:
            parts.append(unit)
            if len(parts) == count:
                yield join(parts)
                parts = []
        if parts:
            yield join(parts)
    finally:
        loaded.end()


def _groups_of(items: Iterable, size: int) -> Iterator[list[Key]]:
    group = []
    for item in items:
        group.append(Key(item, 0))
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def default_workers() -> int:
    """Worker processes for this process: its share of the machine's cores, at most 16."""
    return max(1, min(MAX_WORKERS, workers.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _whole(batch: Batch) -> Batch:
    return batch


def _start_worker(number: int) -> None:
    # Signals reach the whole process group, and the trainer still wants batches to finish its update and save; it ends its workers itself.
    signals: list[int] = []

    def on_sigterm(*_):
        signals.append(1)
        if len(signals) > 1:
            os._exit(1)

    workers.begin(on_sigterm)
    keep_freed_memory()
