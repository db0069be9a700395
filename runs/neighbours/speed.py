"""Time and memory of a layer of every method, forward and backward, on sequences of several lengths.

Only a layer that agrees with its own equation in float64 is timed. All take turns in one process; the peak of memory is
of a fresh process each, which may not take more than MEMORY_LIMIT.
"""

import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gka.testing.budget import disagreement
from runs.bench.load import LoadWatch
from runs.neighbours.layers import ABOUT, DIM, by_equation, cost, layer
from trainkit_gka.distributed import keep_freed_memory
from trainkit_gka.progress import console

MEMORY_LIMIT = 8 * 2**30  # bytes
GATE_TOKENS = (63, 211)  # one length is within a causal form's first block
FLOOR = 64 * torch.finfo(torch.float32).eps
WARM_UP_TO = 8192  # tokens; a longer pass takes so long that the first one is timed
PEAK = """
import json, sys
from runs.neighbours.speed import peak_of_pass
print(json.dumps(peak_of_pass(sys.argv[1], int(sys.argv[2]))))
"""
Times = dict[str, list[tuple[float, float]]]


def inputs(tokens: int, seed: int = 0) -> torch.Tensor:
    """Normalised tokens as a block hands them on, (1, N, C)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, DIM, generator=generator)


def pass_through(built: nn.Module, x: torch.Tensor, causal: bool = False) -> dict[str, torch.Tensor]:
    """y, and the gradients of x and of every parameter that a fixed gradient of y gives."""
    x = x.detach().clone().requires_grad_()
    y = built(x, is_causal=causal)
    y.backward(inputs(x.shape[1], seed=1).to(x.dtype))
    return {"y": y.detach(), "dx": x.grad, **{f"d {name}": p.grad for name, p in built.named_parameters()}}


def gate(name: str, lengths: Sequence[int] = GATE_TOKENS) -> str | None:
    """Why a layer is not its equation, or None: y and all gradients, without a mask and in the causal form where there
    is one, may be off by twice the error of the equation in float32.
    """
    for tokens, causal in itertools.product(lengths, (False, True)[: 1 + ABOUT[name].causal]):
        torch.manual_seed(0)
        built, x = layer(name, tokens, causal=causal), inputs(tokens)
        exact, plain = by_equation(built), by_equation(built, torch.float32)
        results = [pass_through(*pair, causal) for pair in ((built, x), (exact, x.double()), (plain, x))]
        if reason := disagreement(*results, dict.fromkeys(results[0], FLOOR)):
            return f"{reason} ({tokens} tokens{', causal' * causal})"
    return None


def timed_pass(built: nn.Module, x: torch.Tensor, grad_y: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of a forward pass that keeps what backward needs, and of both passes."""
    started = time.perf_counter()
    y = built(x)
    forward = time.perf_counter()
    y.backward(grad_y)
    return 1e3 * (forward - started), 1e3 * (time.perf_counter() - started)


def time_layers(names: list[str], tokens: int, rounds: int) -> tuple[dict[str, dict[str, Any]], float | None]:
    """Numbers or the reason of every method, in turns; and how many cores others used meanwhile."""
    keep_freed_memory()
    results: dict[str, dict[str, Any]] = {name: {"failed": reason} for name in names if (reason := gate(name))}
    torch.manual_seed(0)
    layers = {name: layer(name, tokens) for name in names if name not in results}
    x, grad_y, taken = inputs(tokens).requires_grad_(), inputs(tokens, seed=1), {name: [] for name in layers}
    load = LoadWatch()
    for turn in range(-1 if tokens <= WARM_UP_TO else 0, rounds):
        if turn == 0:
            load = LoadWatch()
        order = list(layers)[max(turn, 0) % len(layers) :] + list(layers)[: max(turn, 0) % len(layers)]
        for name in order:
            times = timed_pass(layers[name], x, grad_y)
            if turn >= 0:
                taken[name].append(times)
    for name, times in taken.items():
        forward, both = zip(*times)
        results[name] = {
            "forward_ms": statistics.median(forward),
            "both_ms": statistics.median(both),
            "both_low_ms": min(both),
            "both_high_ms": max(both),
            "samples": len(times),
            **cost(name, tokens),
        }
    return results, load.elsewhere()


def peak_of_pass(name: str, tokens: int) -> dict[str, Any]:
    """MiB that a forward and backward pass takes beyond layer and input; or the reason that it could not.

    Call it in a process of its own; on Linux.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    torch.manual_seed(0)
    pass_through(layer(name, 64), inputs(64))  # loads the kernels
    built, x = layer(name, tokens), inputs(tokens)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at what is held now (Linux, proc(5))
    before = peak_rss_mib()
    try:
        pass_through(built, x)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower():
            raise
        return {"failed": f"needs more than {MEMORY_LIMIT // 2**30} GiB"}
    return {"peak_mib": peak_rss_mib() - before}


def peak_rss_mib() -> float:
    """The most that this process has held in memory since its peak was set back. (A child's ru_maxrss begins with its
    parent's.)
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 2**10


def measure_peak(name: str, tokens: int) -> dict[str, Any]:
    """`peak_of_pass` in a fresh process."""
    console.print(f"memory of {name} at {tokens:,} tokens", highlight=False)
    done = subprocess.run([sys.executable, "-c", PEAK, name, str(tokens)], stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout) if not done.returncode else {"failed": f"ended with code {done.returncode}"}
