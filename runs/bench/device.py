"""What timing needs of a device: its clock, its memory, its cache and its streams."""

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import torch


def elapsed_ms(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds that `work` takes: between events on a GPU, by the wall clock elsewhere."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def peak_mib(work: Callable[[], Any], device: torch.device) -> float | None:
    """MiB that `work` allocates at its peak beyond what was allocated before it; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def release_memory() -> None:
    """Give back the memory that nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def buffers_for(device: torch.device, bytes_each: int) -> int:
    """How many inputs of this size exceed twice the L2 cache of the device; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return max(2, 2 * torch.cuda.get_device_properties(device).L2_cache_size // bytes_each + 1)


@contextlib.contextmanager
def own_stream(device: torch.device):
    """Run everything on one side stream: a capture needs work that was warmed up on the stream it is captured on."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
    with contextlib.suppress(RuntimeError):  # the candidates have the reason already if the device is lost
        torch.cuda.synchronize(device)
