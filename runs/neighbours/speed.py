"""Time and memory of a layer of every method, forward and backward, on sequences of several lengths.

Only a layer that agrees with its own equation in float64 is timed. All take turns in one process; the peak of memory is
of a fresh process each, which may not take more than MEMORY_LIMIT.
"""

import contextlib
import ctypes
import gc
import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gka.testing.budget import disagreement
from runs.bench.measurement import Plan
from runs.bench.timing import interleave
from runs.neighbours.cases import CPU
from runs.neighbours.layers import ABOUT, DIM, by_equation, cost, layer
from trainkit_gka.distributed import keep_freed_memory

MEMORY_LIMIT = 8 * 2**30  # bytes
GATE_TOKENS = (63, 211)  # one length is within a causal form's first block
FLOOR = 64 * torch.finfo(torch.float32).eps
WARM_UP_TO = 8192  # tokens; a longer pass takes so long that the first round is timed
PEAK = """
import json, sys
from runs.neighbours.speed import peak_of_pass
print(json.dumps(peak_of_pass(sys.argv[1], int(sys.argv[2]))))
"""


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


def time_layers(names: list[str], tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Name -> milliseconds of a forward pass that keeps what backward needs, and of both, and the layer's cost; or why
    there are none. All take turns.
    """
    keep_freed_memory()
    results: dict[str, dict[str, Any]] = {name: {"failed": reason} for name in names if (reason := gate(name))}
    torch.manual_seed(0)
    layers = {name: layer(name, tokens) for name in names if name not in results}
    x, grad_y = inputs(tokens).requires_grad_(), inputs(tokens, seed=1)
    passes: dict[str, Callable[[int], Any]] = {}
    for name, built in layers.items():
        passes[f"{name} forward"] = lambda call, built=built: built(x)
        passes[f"{name} both"] = lambda call, built=built: built(x).backward(grad_y)
    timed = interleave(passes, CPU, Plan(rounds=rounds, warmup=int(tokens <= WARM_UP_TO)))
    for name in layers:
        forward, both = timed[f"{name} forward"], timed[f"{name} both"]
        if reason := forward.reason or both.reason:
            results[name] = {"failed": reason}
            continue
        times = {"forward_ms": forward.median_ms, "both_ms": both.median_ms}
        times |= {"both_low_ms": both.low_ms, "both_high_ms": both.high_ms, "samples": both.samples}
        results[name] = {**times, **cost(name, tokens), "elsewhere": both.elsewhere}
    return results


def peak_mib(work: Callable[[], Any]) -> float | None:
    """MiB of resident memory that `work` adds at its peak; None where Linux's counters are missing (proc(5))."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not os.access(reset, os.W_OK):
        return None

    def peak() -> int:  # KiB; a child's ru_maxrss begins with its parent's
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))

    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)  # memory that is kept for later would hide what is used again
    reset.write_text("5")  # the peak is now what is resident
    before = peak()
    work()
    return (peak() - before) / 2**10


def peak_of_pass(name: str, tokens: int) -> dict[str, Any]:
    """MiB that a forward and backward pass takes beyond layer and input; or the reason that it could not.

    Call it in a process of its own.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    torch.manual_seed(0)
    pass_through(layer(name, 64), inputs(64))  # loads the kernels
    built, x = layer(name, tokens), inputs(tokens)
    try:
        return {"peak_mib": peak_mib(lambda: pass_through(built, x))}
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower():
            raise
        return {"failed": f"needs more than {MEMORY_LIMIT // 2**30} GiB"}


def measure_peak(method: str, tokens: int) -> dict[str, Any]:
    """`peak_of_pass` in a fresh process."""
    done = subprocess.run([sys.executable, "-c", PEAK, method, str(tokens)], stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout) if not done.returncode else {"failed": f"ended with code {done.returncode}"}
