"""Processes, devices and signals: torchrun's ranks (or a single process), the device, seeds and the process group."""

import contextlib
import ctypes
import datetime
import math
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from trainkit_gka import signals
from trainkit_gka.cli import PassingFault, UserError, of_files
from trainkit_gka.command import STORE_SWITCH
from trainkit_gka.workers import cores

# How long a process waits for the others: one may compile, or read ahead in a stream, much longer than another.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=1)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt
T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """The rank and device of this process. `world_size` 1 means that there is no process group."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this is the first process of its machine."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def print(self, *args) -> None:
        """Print on rank 0."""
        if self.is_main:
            print(*args, flush=True)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of `tensor` over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on any."""
        return self.sum(torch.tensor(int(flag), device=self.device)).item() > 0

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every rank the values of rank 0, in place."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def agree(self, prepare: Callable[[], T]) -> T:
        """Run `prepare` on every rank, and end every rank if it raises UserError or an error of a file on any.

        The failed rank raises UserError, the other ranks exit with its code and print nothing. Without this they would
        wait in their next collective for the failed one.
        """
        result = error = None
        try:
            result = prepare()
        except Exception as caught:
            error = of_files(caught)
            if error is None:
                raise
        # A mistake comes before a passing fault: trying again does not correct it.
        codes = [kind.code for kind in (UserError, PassingFault) if self.any(getattr(error, "code", 0) == kind.code)]
        if error is not None:
            raise error from None
        if codes:
            time.sleep(6)  # torchrun ends all ranks after the first; the failed one must print its error first
            sys.exit(codes[0])
        return result

    def check_same(self, describe: Callable[[], dict[str, str]]) -> None:
        """Raises UserError on every rank unless `describe()` is the same on all: machines may have different files."""
        if self.world_size == 1:
            return
        descriptions: list = [None] * self.world_size
        dist.all_gather_object(descriptions, describe())
        for key, value in descriptions[0].items():
            differing = [rank for rank, description in enumerate(descriptions) if description[key] != value]
            if differing:
                ranks, other = ", ".join(map(str, differing)), descriptions[differing[0]][key]
                problem = f"process 0 has {key}: {value}; processes {ranks} have {other}"
                raise UserError(f"{problem}. Give every machine the same files, by a shared folder or copies")

    def rounds(self, items: Iterable[T], stop: "Stop | None" = None) -> Iterator[T]:
        """Yield `items`, whose number may differ between ranks, until a signal to any rank ends them on all.

        The ranks communicate after each item, so an item should take seconds at most; a rank without further items
        takes part until all have none. Raises Interrupted on every rank. Without `stop` the ranks do not communicate.
        """
        items, none_left = iter(items), object()
        while True:
            item = next(items, none_left)
            flags = [int(stop is not None and stop.requested), int(item is not none_left)]
            if stop is not None and self.world_size > 1:
                flags = self.sum(torch.tensor(flags, device=self.device)).tolist()
            stop_requested, busy = flags
            if stop_requested:
                raise Interrupted
            if not busy:
                return
            if item is not none_left:
                yield item

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read afterwards means something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def share(self, count: int) -> range:
        """This rank's part of `count` items, as even as possible: 512 over 7 ranks is six times 73, then 74."""
        return range(self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size)


class Interrupted(Exception):
    """A signal to some rank has interrupted an evaluation on all ranks."""


class Stop:
    """Set by SIGTERM, SIGHUP or SIGINT from its creation on: a training loop finishes its step, saves and exits.

    SIGHUP, of a closed terminal, stays ignored where it was ignored before, as under nohup. A second Ctrl-C some
    seconds later ends the process at once. Not sooner: torchrun passes a signal on to processes to which the terminal
    has sent it already.
    """

    SAME_SIGNAL_WITHIN = 3.0  # seconds
    LIMIT = 10.0  # seconds after a signal that a block of `limited` may take
    POLL = 1.0  # seconds between looks for a signal to another process
    KEY = "gka/signal"  # of the process group's store: the number of a signal to any process

    def __init__(self):
        self._requested_at: float | None = None
        self._number: int | None = None  # of a signal to any process, and when it was noticed
        self._noticed = math.inf
        self._began, self._limit = math.inf, self.LIMIT  # of the block that runs
        for number in (*signals.ending(), signal.SIGINT):
            signal.signal(number, self._request)

    @property
    def requested(self) -> bool:
        return self._requested_at is not None

    @contextmanager
    def limited(self, usual: float = 0.0) -> Iterator[None]:
        """A block, such as a step, that `watched` ends if a signal comes to any process and it is not done in time.

        The time is LIMIT seconds, twice as long as it takes usually if that is more.
        """
        self._began, self._limit = time.monotonic(), max(self.LIMIT, 2 * usual)
        try:
            yield
        except RuntimeError:  # of a collective: another process was ended first
            if self._number is not None:
                time.sleep(2 * self._limit)
            raise
        finally:
            self._began = math.inf

    @contextmanager
    def watched(self, runtime: Runtime, end: Callable[[int], None]) -> Iterator[None]:
        """Within the block a thread calls `end`, with the signal's number, for a `limited` block that takes too long.

        `end` does not return. It is called on every process, at about the same time.
        """
        store = dist.distributed_c10d._get_default_store().clone() if runtime.world_size > 1 else None
        with signals.watched(lambda numbers: self._watch(numbers, store, end)):
            yield

    def _watch(self, numbers: int, store: dist.Store | None, end: Callable[[int], None]) -> None:
        while True:
            if select.select([numbers], [], [], self.POLL)[0]:
                number = os.read(numbers, 1)
                if not number:
                    break
                if self._number is None and signal.getsignal(number[0]) == self._request:
                    self._number, self._noticed = number[0], time.monotonic()
                    with contextlib.suppress(RuntimeError, AttributeError):  # without a store, or where it is gone
                        store.set(self.KEY, str(number[0]))
            elif self._number is None and self._began < math.inf:
                with contextlib.suppress(RuntimeError, AttributeError):
                    if store.check([self.KEY]):
                        self._number, self._noticed = int(store.get(self.KEY)), time.monotonic()
            if self._number and time.monotonic() - max(self._noticed, self._began) > self._limit:
                end(self._number)
        os.close(numbers)

    def _request(self, number, frame):
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at = now
        elif number == signal.SIGINT and now - self._requested_at > self.SAME_SIGNAL_WITHIN:
            raise KeyboardInterrupt


def setup(device_type: str = "auto", seed: int = 42) -> Runtime:
    """Read RANK, LOCAL_RANK and WORLD_SIZE (torchrun), pick the device, seed the generators, join the process group.

    device_type: cuda, cpu, or auto, which takes CUDA if there is one. Raises UserError for a device that is absent.
    """
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device-type cuda: no CUDA device is visible; use --device-type cpu")
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if device_type != "cpu" and torch.cuda.is_available():
        if local_rank >= (gpus := torch.cuda.device_count()):
            start = f"this is process {local_rank + 1} on this machine but it has {gpus} GPUs"
            raise UserError(f"{start}; lower torchrun's --nproc-per-node")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    else:
        device = torch.device("cpu")
        keep_freed_memory()
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        # torch ignores a container's quota of cores; more threads than that wait for one another.
        torch.set_num_threads(min(torch.get_num_threads(), cores()))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if rank == 0 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and os.environ.get(STORE_SWITCH) != "1":
        print(f"warning: without {STORE_SWITCH}=1 before torchrun, restarted processes may hang", file=sys.stderr)
    if world_size > 1 and not dist.is_initialized():
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device_id)
    return Runtime(rank, world_size, device)


def keep_freed_memory() -> None:
    """Make glibc reuse large blocks of freed memory; does nothing without glibc.

    By default they return to the kernel, and the page faults of the next allocation cost an element-wise operation on a
    CPU several times its work.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for parameter, value in ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
            libc.mallopt(parameter, value)


@contextmanager
def running(device_type: str = "auto", seed: int = 42) -> Iterator[Runtime]:
    """`setup`, and destroy the process group at the end. Raises as `setup`.

    Without an error the ranks wait for one another first: gloo aborts a process that still communicates with a rank
    that has ended. After an error the group stays: destroying it would wait for ranks that may be waiting for this one.
    """
    runtime = setup(device_type, seed)
    yield runtime
    runtime.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
