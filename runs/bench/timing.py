"""What the benchmarks share: flags, fair timing, memory, and the gate before the clock.

Fair means: the candidates of a comparison take turns in one process, after the same warm-up, on random inputs that rotate through more memory
than the cache holds, with CUDA graphs for all; and a candidate that is wrong, or fails, is a line with its reason and is not timed.
Times are in milliseconds, memory in MiB.
"""

import contextlib
import gc
import itertools
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch

from trainkit.cli import UserError

LOW, HIGH = 0.2, 0.8  # the quantiles that stand for the spread
MIN_ROUNDS = 3
MAX_REPEATS = 1000
SHORTEST_LOOK = 0.3  # seconds; the kernel counts in hundredths
REASON_LENGTH = 240


@dataclass
class BenchConfig:
    """The flags every benchmark has."""

    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes CUDA if there is one"""
    quick: bool = False
    """fewer cases and rounds: to try things out, not to report"""
    results: Path = Path("runs/results")
    """folder of the JSON lines: one file for each benchmark and hardware, appended to case by case"""


@dataclass
class CaseConfig(BenchConfig):
    """The flags of a benchmark that runs cases."""

    only: list[str] = field(default_factory=list)
    """the cases to run, by how their names begin; empty = all"""
    rounds: int = 0
    """timed turns of every candidate; 0 = the benchmark's own number"""
    seconds: float = 0.0
    """stop the turns of a comparison after this time (three are made in any case); 0 = the benchmark's own limit"""

    def check(self) -> None:
        """Raises UserError for values that make no sense."""
        for key in ("rounds", "seconds"):
            if not (math.isfinite(getattr(self, key)) and getattr(self, key) >= 0):
                raise UserError(f"--{key} must not be negative, got {getattr(self, key)}")

    def select(self, names: list[str]) -> list[str]:
        """The names that --only asks for, in order. Raises UserError for a beginning that no name has."""
        for beginning in self.only:
            if not any(name.startswith(beginning) for name in names):
                raise UserError(f"--only {beginning}: no such case; there are {', '.join(names)}")
        return [name for name in names if not self.only or name.startswith(tuple(self.only))]


@dataclass(frozen=True)
class Plan:
    """How to time. A sample is `buffers` consecutive calls (call n works on buffer n), repeated until it lasts `sample_ms`."""

    rounds: int = 50
    warmup: int = 3  # calls of each candidate, then untimed rounds
    seconds: float = math.inf  # of timed rounds
    buffers: int = 1
    sample_ms: float = 0.0
    graph: bool = False  # CUDA graphs, where there is CUDA

    def adjust(self, config: CaseConfig) -> "Plan":
        """The plan with the user's --rounds, --seconds and --quick."""
        quick = (
            replace(self, rounds=max(MIN_ROUNDS, self.rounds // 5), seconds=self.seconds / 5) if config.quick else self
        )
        return replace(quick, rounds=config.rounds or quick.rounds, seconds=config.seconds or quick.seconds)


@dataclass
class Measurement:
    """What one candidate gave. Times are of one call; None is what was not measured."""

    status: Literal["ok", "wrong", "failed"] = "ok"
    reason: str = ""
    note: str = ""
    first_ms: float | None = None  # compilation and autotuning included, as far as no cache on disk had them
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    samples: int = 0
    graphed: bool = False
    peak_mib: float | None = None  # what one call allocates on top of what was there; None on a CPU
    elsewhere: float | None = (
        None  # cores that other processes used while a CPU was timed: above zero, the times are not the machine's
    )

    def fail(self, error: BaseException) -> None:
        """Out of memory, unsupported, anything: the row says why, and the memory is given back."""
        self.status, self.reason = "failed", one_line(error)
        release_memory()


def interleave(candidates: dict[str, Callable[[int], Any]], device: torch.device, plan: Plan | None = None,
               gates: dict[str, Callable[[], str | None]] | None = None) -> dict[str, Measurement]:  # fmt: skip
    """Time the candidates in turns: a sample of each, then again, every round starting with another one.

    candidates: name -> call(n), which does the work once on buffer n. gates: name -> why the candidate is wrong, or None; asked after the
    first call, whose latency is measured apart. Wrong and failing candidates get their reason, the others median and quantiles.
    """
    plan, gates = plan or Plan(), gates or {}
    measured = {name: Measurement() for name in candidates}
    samplers: dict[str, _Sampler] = {}
    taken: dict[str, list[float]] = {}
    with _own_stream(device):
        for name, call in candidates.items():
            with _failing(measured[name]):
                _first_call(call, device, measured[name], gates.get(name))
                if measured[name].status == "ok":
                    samplers[name] = _Sampler(call, device, plan, measured[name])
        deadline, quiet = math.inf, _Quiet()
        for turn in itertools.count(-plan.warmup):
            names = [name for name in samplers if measured[name].status == "ok"]
            done = turn >= plan.rounds or (turn >= MIN_ROUNDS and time.perf_counter() > deadline)
            if done or not names:
                break
            if turn == 0:
                deadline, quiet = time.perf_counter() + plan.seconds, _Quiet()
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                with _failing(measured[name]):
                    milliseconds = samplers[name].sample()
                    if turn >= 0:
                        taken.setdefault(name, []).append(milliseconds)
    elsewhere = quiet.elsewhere() if device.type == "cpu" else None
    for name, times in taken.items():
        if measured[name].status == "ok":
            low, median, high = np.quantile(times, (LOW, 0.5, HIGH)).tolist()
            measured[name] = replace(
                measured[name], median_ms=median, low_ms=low, high_ms=high, samples=len(times), elsewhere=elsewhere
            )
    return measured


class _Quiet:
    """Looks how much other processes work on this process's cores, from its creation on."""

    def __init__(self):
        self.wall, self.own, self.all = time.perf_counter(), time.process_time(), self._busy()

    @staticmethod
    def _busy() -> float | None:
        """Seconds of work done on these cores since the machine started; None where only Linux would say."""
        if not hasattr(os, "sched_getaffinity"):
            return None
        busy = [sum(core[:3]) + core.irq + core.softirq + core.steal for core in psutil.cpu_times(percpu=True)]
        return sum(busy[core] for core in os.sched_getaffinity(0))

    def elsewhere(self) -> float | None:
        """The cores others kept busy; None if unknown or too short to tell."""
        wall, busy = time.perf_counter() - self.wall, self._busy()
        if busy is None or self.all is None or wall < SHORTEST_LOOK:
            return None
        return max(0.0, (busy - self.all - (time.process_time() - self.own)) / wall)


def _first_call(call, device, measurement: Measurement, gate) -> None:
    measurement.first_ms = _elapsed_ms(lambda: call(0), device)
    wrong = gate() if gate else None
    if wrong:
        measurement.status, measurement.reason = "wrong", wrong


class _Sampler:
    """A warm candidate: `sample()` is its time for one call."""

    def __init__(self, call, device: torch.device, plan: Plan, measurement: Measurement):
        self.device, self.plan = device, plan
        for n in range(max(plan.warmup, 1)):
            call(n % plan.buffers)
        measurement.peak_mib = peak_mib(lambda: call(0), device)

        def sweep():
            for n in range(plan.buffers):
                call(n)

        graph = self._capture(sweep, measurement) if plan.graph and device.type == "cuda" else None
        measurement.graphed = graph is not None
        self.sweep, self.repeats = graph.replay if graph else sweep, 1
        self.sample()
        sweep_ms = self.sample() * plan.buffers
        self.repeats = max(1, min(MAX_REPEATS, math.ceil(plan.sample_ms / max(sweep_ms, 1e-3))))

    def _capture(self, sweep, measurement: Measurement):
        """The sweep as one CUDA graph, so that small kernels wait for nothing; None, with a note, if it cannot be."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(self.device)):
                sweep()
        except Exception as error:
            torch.cuda.synchronize(self.device)
            measurement.note = f"timed without a CUDA graph: {one_line(error)}"
            return None
        return graph

    def sample(self) -> float:
        """Milliseconds of one call."""

        def work():
            for _ in range(self.repeats):
                self.sweep()

        return _elapsed_ms(work, self.device) / (self.repeats * self.plan.buffers)


def _elapsed_ms(work: Callable[[], Any], device: torch.device) -> float:
    """Between events on the device, by the clock on the wall elsewhere."""
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
    """What `work` allocates at its peak beyond what was allocated before it, MiB; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def release_memory() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _own_stream(device: torch.device):
    """Everything on one side stream: what is captured must have been warmed up where it is captured."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
    with contextlib.suppress(RuntimeError):  # a device that is lost has told the candidates already
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _failing(measurement: Measurement):
    """An error inside becomes the candidate's reason."""
    try:
        yield
    except Exception as error:
        measurement.fail(error)


def one_line(error: BaseException) -> str:
    """The error as the reason of a row."""
    while isinstance(error.__context__, Exception) and not error.__suppress_context__:
        error = error.__context__  # what leaving a failed capture says hides what happened in it
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."


def buffers_for(device: torch.device, bytes_each: int) -> int:
    """How many inputs of this size exceed twice the L2 cache of the device; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return max(2, 2 * torch.cuda.get_device_properties(device).L2_cache_size // bytes_each + 1)
