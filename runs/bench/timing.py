"""Fair timing: candidates take turns in one process, after the same warm-up, and only what is correct is timed.

Their random inputs rotate through more memory than the cache holds, and CUDA graphs are for all of them or none. A
candidate that is wrong, or fails, is a row with its reason. Times are in milliseconds, memory in MiB.
"""

import contextlib
import gc
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import psutil
import torch

MIN_ROUNDS = 3
LOW, HIGH = 0.2, 0.8  # the quantiles that stand for the spread
MAX_REPEATS = 1000
REASON_LENGTH = 240
SHORTEST_WATCH = 0.3  # seconds: the kernel counts in hundredths of a second
Name = TypeVar("Name")  # of a candidate


@dataclass(frozen=True)
class Plan:
    """A sample is `buffers` consecutive calls (call n works on buffer n), repeated until it lasts `sample_ms`."""

    rounds: int = 50
    warmup: int = 3  # calls of each candidate, then untimed rounds
    seconds: float = math.inf  # of timed rounds
    buffers: int = 1
    sample_ms: float = 0.0
    graph: bool = False  # CUDA graphs, where there is CUDA


@dataclass
class Measurement:
    """What one candidate gave, as the metrics of its row. Times are of one call; None is what was not measured."""

    status: Literal["ok", "wrong", "failed"] = "ok"
    reason: str = ""
    note: str = ""
    first_ms: float | None = None  # with compilation and autotuning, unless a cache on disk had them
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    samples: int = 0
    graphed: bool = False
    peak_mib: float | None = None  # what one call allocates beyond what was allocated before; None on a CPU
    elsewhere: float | None = None  # cores that other processes used meanwhile; if above 0, times are too long

    def fail(self, error: BaseException) -> "Measurement":
        """Take the error, such as out of memory or unsupported, as the row's reason, and give the memory back."""
        self.status, self.reason = "failed", one_line(error)
        release_memory()
        return self

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """An error inside becomes the candidate's reason."""
        try:
            yield
        except Exception as error:
            self.fail(error)


def interleave(
    candidates: dict[Name, Callable[[int], Any]],
    device: torch.device,
    plan: Plan,
    gates: dict[Name, Callable[[], str | None]] | None = None,
) -> dict[Name, Measurement]:
    """Time the candidates in turns: a sample of each, then again, every round starting with another one.

    candidates: name -> call(n), which does the work once on buffer n. gates: name -> why the candidate is wrong, or
    None; asked after the first call, whose latency is measured apart. Wrong and failing candidates get their reason,
    the others median and quantiles.
    """
    gates = gates or {}
    measured = {name: Measurement() for name in candidates}
    timers: dict[Name, Timer] = {}
    taken: dict[Name, list[float]] = {}
    with side_stream(device):
        for name, call in candidates.items():
            with measured[name].failing():
                measured[name].first_ms = elapsed_ms(partial(call, 0), device)
                if reason := name in gates and gates[name]():
                    measured[name].status, measured[name].reason = "wrong", reason
                else:
                    timers[name] = Timer(call, device, plan, measured[name])
        began = deadline = math.inf
        for turn in itertools.count(-plan.warmup):
            names = [name for name in timers if measured[name].status == "ok"]
            done = turn >= plan.rounds or (turn >= MIN_ROUNDS and time.perf_counter() > deadline)
            if done or not names:
                break
            if turn == 0:
                began, others = time.perf_counter(), work_of_others()
                deadline = began + plan.seconds
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                with measured[name].failing():
                    milliseconds = timers[name].sample()
                    if turn >= 0:
                        taken.setdefault(name, []).append(milliseconds)
    elsewhere = None
    if device.type == "cpu" and (wall := time.perf_counter() - began) >= SHORTEST_WATCH:
        elsewhere = float(np.maximum(0.0, (work_of_others() - others) / wall))  # may be NaN
    for name, times in taken.items():
        if (one := measured[name]).status == "ok":
            one.low_ms, one.median_ms, one.high_ms = np.quantile(times, (LOW, 0.5, HIGH)).tolist()
            one.samples, one.elsewhere = len(times), elsewhere
    return measured


class Timer:
    """A warm candidate: `sample()` is its time for one call."""

    def __init__(self, call, device: torch.device, plan: Plan, measurement: Measurement):
        self.device, self.plan = device, plan
        for n in range(max(plan.warmup, 1)):
            call(n % plan.buffers)
        measurement.peak_mib = peak_mib(partial(call, 0), device)

        def sweep():
            for n in range(plan.buffers):
                call(n)

        self.sweep, self.repeats = sweep, 1
        if plan.graph and device.type == "cuda":
            self._capture(measurement)
        if plan.sample_ms:
            self.sample()
            sweep_ms = self.sample() * plan.buffers
            self.repeats = max(1, min(MAX_REPEATS, math.ceil(plan.sample_ms / max(sweep_ms, 1e-3))))

    def _capture(self, measurement: Measurement) -> None:
        """Make the sweep one CUDA graph, so that small kernels wait for nothing; a note if it cannot be."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(self.device)):
                self.sweep()
        except Exception as error:
            torch.cuda.synchronize(self.device)
            measurement.note = f"timed without a CUDA graph: {one_line(error)}"
        else:
            self.sweep, measurement.graphed = graph.replay, True

    def sample(self) -> float:
        """Milliseconds of one call."""

        def work():
            for _ in range(self.repeats):
                self.sweep()

        return elapsed_ms(work, self.device) / (self.repeats * self.plan.buffers)


def work_of_others() -> float:
    """Seconds that other processes have worked on this process's cores, up to a constant; NaN where only Linux says."""
    if not hasattr(os, "sched_getaffinity"):
        return math.nan
    busy = [sum(core[:3]) + core.irq + core.softirq + core.steal for core in psutil.cpu_times(percpu=True)]
    return sum(busy[core] for core in os.sched_getaffinity(0)) - time.process_time()


def one_line(error: BaseException) -> str:
    """The error as the reason of a row."""
    while isinstance(error.__context__, Exception) and not error.__suppress_context__:
        error = error.__context__  # the error of a failed capture hides the one that made it fail
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."


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
def side_stream(device: torch.device):
    """Run everything on one side stream: a capture needs work that was warmed up on the stream it is captured on."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
    with contextlib.suppress(RuntimeError):  # the candidates have the reason already if the device is lost
        torch.cuda.synchronize(device)
