"""Fair timing: turns, the gate before the clock, a reason for every candidate without a time, and the load watch."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from runs.bench import timing
from runs.bench.timing import MIN_ROUNDS, Plan, interleave

CPU = torch.device("cpu")


def test_candidates_take_turns():
    seen = []
    calls = {name: lambda n, name=name: seen.append((name, n)) for name in "abc"}
    measured = interleave(calls, CPU, Plan(rounds=6, warmup=0, buffers=2))
    assert all((m.samples, m.status, m.peak_mib, m.graphed) == (6, "ok", None, False) for m in measured.values())
    rounds = [seen[-12 * 3 :][k : k + 6] for k in range(0, 36, 6)]
    assert ["".join(name for name, _ in turn) for turn in rounds] == ["aabbcc", "bbccaa", "ccaabb"] * 2
    assert all([n for _, n in turn] == [0, 1] * 3 for turn in rounds)


def test_median_and_spread_are_quantiles_of_one_call(monkeypatch):
    clock = iter([7.0, *[60.0] * 2, *range(10, 31)])  # first call; warm-up; 21 samples, of 2 calls each

    def elapsed(work, device):
        work()
        return float(next(clock))

    monkeypatch.setattr(timing, "elapsed_ms", elapsed)
    measured = interleave({"a": lambda n: None}, CPU, Plan(rounds=21, warmup=2, buffers=2))["a"]
    assert (measured.first_ms, measured.samples) == (7.0, 21)
    assert (measured.low_ms, measured.median_ms, measured.high_ms) == (7.0, 10.0, 13.0)


def test_short_calls_are_repeated(monkeypatch):
    calls = []

    def elapsed(work, device):  # every call takes a millisecond
        before = len(calls)
        work()
        return float(len(calls) - before)

    monkeypatch.setattr(timing, "elapsed_ms", elapsed)
    measured = interleave({"a": calls.append}, CPU, Plan(rounds=2, warmup=1, sample_ms=10))["a"]
    assert measured.samples == 2 and measured.median_ms == 1 and len(calls) >= 2 * 10


def test_a_comparison_takes_its_time_or_three_rounds():
    plan = Plan(rounds=1000, seconds=1e-4)
    assert interleave({"a": lambda n: time.sleep(1e-3)}, CPU, plan)["a"].samples == MIN_ROUNDS


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_a_busy_machine_shows():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        measured = interleave({"a": lambda n: time.sleep(0.05)}, CPU, Plan(rounds=20))["a"]
    finally:
        busy.kill()
        busy.wait()
    assert measured.elsewhere > 0.3


def test_wrong_and_failing_candidates_give_a_reason():
    counts = dict.fromkeys(("right", "wrong", "unsupported", "unjudged", "breaks later"), 0)

    def calls(name):
        def call(n):
            counts[name] += 1
            if name == "unsupported":
                raise ValueError("no kernel\n   for this")
            if name == "breaks later" and counts[name] == 6:
                raise torch.OutOfMemoryError("out of memory")

        return call

    def cannot_judge():
        raise RuntimeError("no float64 here")

    gates = {"right": lambda: None, "wrong": lambda: "y is off by 1.0e-01", "unjudged": cannot_judge}
    measured = interleave({name: calls(name) for name in counts}, CPU, Plan(rounds=5, warmup=1), gates)
    assert {name: (m.status, m.reason) for name, m in measured.items()} == {
        "right": ("ok", ""),
        "wrong": ("wrong", "y is off by 1.0e-01"),
        "unsupported": ("failed", "no kernel for this"),
        "unjudged": ("failed", "no float64 here"),
        "breaks later": ("failed", "out of memory"),
    }
    assert counts["wrong"] == counts["unjudged"] == 1 and measured["right"].samples == 5
    assert measured["wrong"].median_ms is None and measured["breaks later"].median_ms is None


def test_a_graph_that_cannot_be_captured_is_noted(monkeypatch):
    """A stand-in for torch's graphs, as there is no GPU: it records the calls made inside, and counts replays."""
    replayed, made = [], []

    class Graph:
        def replay(self):
            replayed.append(self)

    @contextlib.contextmanager
    def capture(graph, stream):
        try:
            yield
        except RuntimeError:
            raise RuntimeError("operation failed during capture")  # noqa: B904 (what torch does)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    for name in ("current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(timing, "side_stream", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(timing, "elapsed_ms", lambda work, device: work() or 1.0)
    monkeypatch.setattr(timing, "peak_mib", lambda work, device: 3.0)

    def stubborn(n):
        made.append(n)
        if len(made) == 1 + 2 + 2:  # first call, warm-up, and the second call of the capture
            raise RuntimeError("not while capturing")

    plan = Plan(rounds=4, warmup=2, buffers=2, graph=True)
    measured = interleave({"a": lambda n: None, "b": stubborn}, torch.device("cuda"), plan)
    assert measured["a"].graphed and not measured["a"].note and len(replayed) == 2 + 4
    assert measured["b"].status == "ok" and not measured["b"].graphed
    assert "without a CUDA graph: not while capturing" in measured["b"].note
    assert {m.peak_mib for m in measured.values()} == {3.0} and {m.samples for m in measured.values()} == {4}
