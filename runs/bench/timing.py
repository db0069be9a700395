"""Fair timing: candidates take turns in one process, after the same warm-up, and only what is correct is timed.

Their random inputs rotate through more memory than the cache holds, and CUDA graphs are for all of them or none. A
candidate that is wrong, or fails, is a line with its reason.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from runs.bench.device import elapsed_ms, own_stream, peak_mib
from runs.bench.load import LoadWatch
from runs.bench.measurement import MIN_ROUNDS, Measurement, Plan, failing, one_line

LOW, HIGH = 0.2, 0.8  # the quantiles that stand for the spread
MAX_REPEATS = 1000
Gate = Callable[[], str | None]


def interleave(
    candidates: dict[str, Callable[[int], Any]],
    device: torch.device,
    plan: Plan | None = None,
    gates: dict[str, Gate] | None = None,
) -> dict[str, Measurement]:
    """Time the candidates in turns: a sample of each, then again, every round starting with another one.

    candidates: name -> call(n), which does the work once on buffer n. gates: name -> why the candidate is wrong, or
    None; asked after the first call, whose latency is measured apart. Wrong and failing candidates get their reason,
    the others median and quantiles.
    """
    plan, gates = plan or Plan(), gates or {}
    measured = {name: Measurement() for name in candidates}
    samplers: dict[str, Sampler] = {}
    taken: dict[str, list[float]] = {}
    with own_stream(device):
        for name, call in candidates.items():
            with failing(measured[name]):
                first_call(call, device, measured[name], gates.get(name))
                if measured[name].status == "ok":
                    samplers[name] = Sampler(call, device, plan, measured[name])
        deadline, load = math.inf, LoadWatch()
        for turn in itertools.count(-plan.warmup):
            names = [name for name in samplers if measured[name].status == "ok"]
            done = turn >= plan.rounds or (turn >= MIN_ROUNDS and time.perf_counter() > deadline)
            if done or not names:
                break
            if turn == 0:
                deadline, load = time.perf_counter() + plan.seconds, LoadWatch()
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                with failing(measured[name]):
                    milliseconds = samplers[name].sample()
                    if turn >= 0:
                        taken.setdefault(name, []).append(milliseconds)
    elsewhere = load.elsewhere() if device.type == "cpu" else None
    for name, times in taken.items():
        if measured[name].status == "ok":
            low, median, high = np.quantile(times, (LOW, 0.5, HIGH)).tolist()
            measured[name] = replace(
                measured[name], median_ms=median, low_ms=low, high_ms=high, samples=len(times), elsewhere=elsewhere
            )
    return measured


def first_call(call: Callable, device: torch.device, measurement: Measurement, gate: Gate | None) -> None:
    """Make a candidate's first call, then ask its gate."""
    measurement.first_ms = elapsed_ms(lambda: call(0), device)
    wrong = gate() if gate else None
    if wrong:
        measurement.status, measurement.reason = "wrong", wrong


class Sampler:
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
        if plan.sample_ms:
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

        return elapsed_ms(work, self.device) / (self.repeats * self.plan.buffers)
