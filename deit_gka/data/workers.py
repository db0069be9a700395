"""The processes that make batches, in training and in evaluation: how many, how they start, and how they end."""

import itertools
import os
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from typing import Annotated

import torch
from torch.utils.data import DataLoader

from deit_gka.data.batch import ImageBatch, Images, join
from deit_gka.data.order import UNIT, ImageKey
from deit_gka.data.sources import ImageSource, ImageStream
from trainkit_gka import workers
from trainkit_gka.cli import Bounds, PassingFault, UserError
from trainkit_gka.command import command_line
from trainkit_gka.distributed import Runtime, keep_freed_memory

MAX_WORKERS = 16
WorkerCount = Annotated[int, Bounds(0, 1024, other=(-1, "automatic"))]  # of a flag
# A unit takes seconds, and a network disk that stalls may come back after minutes; other processes wait for an hour.
BATCH_TIMEOUT = 600.0  # seconds
CHECK_INTERVAL = 5.0  # seconds without a batch after which to see whether the workers live
PREFETCHED = 2  # batches that a worker makes ahead
LOST_BATCH = os.EX_IOERR  # exit code of a worker that could not send a batch
NO_SHARED_MEMORY = (LOST_BATCH, -signal.SIGBUS)
MORE_SHARED_MEMORY = f"give {workers.SHARED_MEMORY} more, in Docker with --shm-size=8g, or lower --num-workers"


class BatchLoader(Iterator[ImageBatch]):
    """The batches of `loader`, in order. Its workers start here and end with `end`."""

    def __init__(self, loader: DataLoader, timeout: float):
        self._loader, self._timeout = iter(loader), timeout
        self._workers = getattr(self._loader, "_workers", [])
        self._checks = round(timeout / loader.timeout) if loader.timeout else 1
        self._receiver = getattr(self._loader, "_pin_memory_thread", None)  # of images for a GPU

    def __next__(self) -> ImageBatch:
        """Raises PassingFault if the workers have sent nothing for too long, or one has died."""
        for _ in range(self._checks):  # counted, not timed: a machine may have slept
            try:
                return next(self._loader)
            except (RuntimeError, ConnectionError, EOFError) as error:
                if not str(error).startswith("DataLoader timed out"):
                    # A worker that dies shows as any of these errors, perhaps before the server reports it.
                    if not self._workers or not wait([worker.sentinel for worker in self._workers], CHECK_INTERVAL):
                        raise
                    break
            if self._receiver is not None and not self._receiver.is_alive():
                break
        # Not within `except`: the traceback would keep the workers' semaphores, and the process's end would complain.
        raise PassingFault(f"{self._failure()}; continue with: {command_line()}")

    def _failure(self) -> str:
        codes = [worker.exitcode for worker in self._workers if worker.exitcode is not None]
        _kill(self._workers)
        if codes and codes[0] in NO_SHARED_MEMORY:
            free = f"{workers.SHARED_MEMORY} has {workers.shared_memory() / 1e6:,.0f} MB free"
            return f"a loading worker could not send its images, {free}; {MORE_SHARED_MEMORY}"
        if codes:
            ended = f"signal {-codes[0]}" if codes[0] < 0 else f"exit code {codes[0]}"
            return f"a loading worker ended with {ended} (out of memory?); it may help to lower --num-workers"
        if self._receiver is not None and not self._receiver.is_alive():
            return "the thread that receives images from the loading workers has ended"
        minutes = f"{self._timeout / 60:.3g} minutes"
        return f"no loading worker has sent images for {minutes}; does the disk that they are on still answer?"

    def end(self) -> None:
        """Shut the workers down now, whoever still refers to them, as a traceback may; kill those that do not react."""
        shutdown = getattr(self._loader, "_shutdown_workers", None)
        killer = threading.Timer(CHECK_INTERVAL, _kill, [self._workers])
        self._loader, self._workers = iter(()), []
        if shutdown is not None:
            killer.start()
            shutdown()
            killer.cancel()


def _kill(processes: list) -> None:
    """End workers that react to nothing else, as one that waits for a disk: at its end this process would wait too."""
    for process in processes:
        if process.is_alive():
            process.kill()


def worker_context(data: str = ""):
    """The multiprocessing context of workers that load `data`.

    Call it early: the first call starts importing what they need.
    """
    return workers.context("deit_gka", *(["datasets"] if data.startswith("hf:") else []))


def check_shared_memory(
    num_workers: int, size: int | tuple[int, int], batch_size: int, *sources: ImageSource | ImageStream
) -> None:
    """Raises UserError if shared memory cannot hold the images that all workers of this machine may have ready.

    size: of an image in pixels. batch_size: images per process at once. sources: those that are read at the same time.
    """
    height, width = (size, size) if isinstance(size, int) else size
    ready = (PREFETCHED * num_workers + 1) * (batch_size // -(-batch_size // UNIT))
    images = sum(min(ready, len(source)) for source in sources)
    lists = sum(part.nbytes for source in sources if isinstance(source, ImageSource) for part in source.index())
    needed = (images * 3 * height * width * 4 + lists) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_workers and needed > (free := workers.shared_memory()):
        room = f"{needed / 1e6:,.0f} MB in {workers.SHARED_MEMORY}, which has {free / 1e6:,.0f} MB free"
        raise UserError(f"{num_workers} loading workers need {room}; {MORE_SHARED_MEMORY} (0 reads without workers)")


def batches(images: Images, keys: Iterable[list[ImageKey]], num_workers: int, device: torch.device) -> BatchLoader:
    """Run `images` over `keys` in worker processes (0: in this one); batches come in order."""
    options = dict(batch_sampler=keys, collate_fn=_as_it_is, pin_memory=device.type == "cuda")
    if num_workers:
        options |= dict(num_workers=num_workers, prefetch_factor=PREFETCHED, worker_init_fn=_start_worker)
        options |= dict(multiprocessing_context=worker_context(), timeout=min(BATCH_TIMEOUT, CHECK_INTERVAL))
    with warnings.catch_warnings():
        # torch would warn of more workers than cores, whose number was chosen.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        return BatchLoader(DataLoader(images, **options), BATCH_TIMEOUT)


def evaluation_batches(
    source: ImageSource | ImageStream,
    transform,
    runtime: Runtime,
    batch_size: int,
    num_workers: int,
    numbers: Sequence[int] | None = None,
) -> Iterator[ImageBatch]:
    """This process's part of the images, in order: every image is in exactly one process's part, once.

    numbers: see `Images`.
    """
    if isinstance(source, ImageStream):
        items: Iterable = source.records(0, runtime.rank, runtime.world_size)
    else:
        items = range(runtime.rank, len(source), runtime.world_size)
    count = -(-batch_size // UNIT)
    keys = _groups_of((ImageKey(item, 0) for item in items), batch_size // count)
    loader = batches(Images(source, transform, False, numbers), keys, num_workers, runtime.device)
    try:
        yield from map(join, _groups_of(loader, count))
    finally:
        loader.end()


def _groups_of(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` items, and last of those that remain."""
    items = iter(items)
    while group := list(itertools.islice(items, size)):
        yield group


def default_workers() -> int:
    """Worker processes for this process: its share of the machine's cores, at most 16."""
    return max(1, min(MAX_WORKERS, workers.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _as_it_is(batch: ImageBatch) -> ImageBatch:
    return batch


def _start_worker(number: int) -> None:
    # Signals reach the whole process group, and the trainer still wants batches to finish its update and save; it ends
    # its workers itself.
    signals: list[int] = []

    def on_sigterm(*_):
        signals.append(1)
        if len(signals) > 1:
            os._exit(1)

    workers.begin(on_sigterm)
    Queue._on_queue_feeder_error = staticmethod(lambda *_: os._exit(LOST_BATCH))  # by default it is lost
    keep_freed_memory()
