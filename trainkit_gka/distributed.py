"""Processes, devices and signals: torchrun's ranks (or a single process), the device, seeds and the process group."""

import contextlib
import ctypes
import datetime
import os
import random
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
from trainkit_gka.cli import STORE_SWITCH, PassingFault, UserError
from trainkit_gka.workers import cores

# How long a process waits for the others: one may compile, or read ahead in a stream, much longer than another.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=1)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt
T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """Where this process runs. `world_size` 1 means that there is no process group."""

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
        """Run `prepare` on every rank, and end on every rank if it raises UserError on any.

        That rank raises its error, the others leave quietly with its exit code. Without this, ranks that saw nothing
        wrong would wait in their next collective for the failed one.
        """
        result = error = None
        try:
            result = prepare()
        except UserError as caught:
            error = caught
        # A mistake comes before a passing fault: trying again does not mend it.
        codes = [kind.code for kind in (UserError, PassingFault) if self.any(getattr(error, "code", 0) == kind.code)]
        if error is not None:
            raise error
        if codes:
            time.sleep(6)  # torchrun ends everyone with the first to leave; the failed rank must print its error first
            sys.exit(codes[0])
        return result

    def check_same(self, describe: Callable[[], dict[str, str]]) -> None:
        """Raises UserError, on every rank, unless every rank's description of its files is the same.

        On one machine they do, unless files change meanwhile; on several each may have its own.
        """
        if self.world_size == 1:
            return
        said: list = [None] * self.world_size
        dist.all_gather_object(said, describe())
        for key, value in said[0].items():
            others = [str(rank) for rank, other in enumerate(said) if other[key] != value]
            if others:
                raise UserError(
                    f"process 0 has {key}: {value}; processes {', '.join(others)} have "
                    f"{said[int(others[0])][key]}. Give every machine the same files, by a shared folder or copies"
                )

    def rounds(self, items: Iterable[T], stop: "Stop | None" = None) -> Iterator[T]:
        """`items`, of which every rank may have another number, until a signal to any rank ends them on all.

        The ranks meet after each item is made, so an item should take seconds at most; a rank that has no more goes on
        meeting the others. Raises Interrupted on every rank. Without `stop` the ranks do not meet.
        """
        items, none_left = iter(items), object()
        while True:
            item = next(items, none_left)
            flags = [int(stop is not None and stop.requested), int(item is not none_left)]
            if stop is not None and self.world_size > 1:
                flags = self.sum(torch.tensor(flags, device=self.device)).tolist()
            asked, busy = flags
            if asked:
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
    """A signal to some rank has ended, on all of them, what they did between two steps."""


class Stop:
    """Set by SIGTERM, SIGHUP or SIGINT from its creation on: a training loop finishes its step, saves and leaves.

    SIGHUP, of a closed terminal, stays ignored where it was, as under nohup. Another Ctrl-C some seconds later ends the
    process at once. Not sooner: torchrun passes a signal on to processes that had it from the terminal already.
    """

    SAME_SIGNAL_WITHIN = 3.0  # seconds

    def __init__(self):
        self._requested_at: float | None = None
        for number in (*signals.ending(), signal.SIGINT):
            signal.signal(number, self._request)

    @property
    def requested(self) -> bool:
        return self._requested_at is not None

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
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"this is process {local_rank + 1} on this machine but it has {torch.cuda.device_count()} GPUs; "
                "lower NGPU (torchrun --nproc-per-node)"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    else:
        device = torch.device("cpu")
        keep_freed_memory()
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        # torch does not know of a container's quota, above which its threads wait for one another.
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
    """Have glibc reuse large blocks; without glibc nothing happens.

    By default it gives them back to the kernel at every free, and the page faults of asking again cost element-wise
    operations on a CPU several times their own work.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for parameter, value in ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
            libc.mallopt(parameter, value)


@contextmanager
def running(device_type: str = "auto", seed: int = 42) -> Iterator[Runtime]:
    """`setup`, and at the end leave the process group. Raises as `setup`.

    When all went well the ranks wait for one another first: gloo aborts a process whose peers are gone before it has
    finished with them. After an error the group is left as it is: taking it down waits for peers that may be waiting
    for this process, and its message would come after that.
    """
    runtime = setup(device_type, seed)
    yield runtime
    runtime.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
