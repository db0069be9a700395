"""Time the attention operator: Gaussian kernel attention against softmax attention's fastest kernels.

    python -m runs.bench.attention                           every case for the device present
    python -m runs.bench.attention --only vit lm-full        the cases whose names begin so
    python -m runs.bench.attention --shapes 16x2048x10x128cw1024n
    python -m runs.bench.attention --only vit --switch short  an optional path of the kernels on and off, in turns

Cases: vit-{ti,s,b} (DeiT's 197 tokens), lm-full and lm-window (causal, and with a window; on CUDA nanochat's depth 20,
on a CPU 2,048 tokens, and 512 as lm-short-*), sweep-N (equal tokens in all, N = 64 ...), decode-bB-N (one query for
each of B sequences against N cached tokens: GKA's one cache, of keys that are values, against keys and values),
decode-derived-bB-N (the same, with GKA's keys computed from the cache), padded (512 tokens, lengths uniform in 64 to
512) and padded-full (lengths that are all 512, and no lengths). Forward, and forward + backward. On CUDA
bfloat16. On a CPU float32, then bfloat16 (-bf16, beside the faster of both dtypes of softmax attention); with one
thread, then with all. `python -m runs.bench.report` prints the tables.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from gka.impl.triton import configs
from runs.bench.operators import FULL, Case, Operator, gate, inputs, operators
from runs.bench.program import Comparison, ComparisonConfig, time_cases
from runs.bench.timing import Measurement, Plan, buffers_for, interleave
from trainkit_gka.cli import UserError, run
from trainkit_gka.distributed import setup

# The standard cases by name, as --shapes has them.
SHAPES = {
    "cuda": {
        **{"vit-ti": "256x197x3x64", "vit-s": "256x197x6x64", "vit-b": "256x197x12x64"},
        **{"lm-full": "16x2048x10x128cn", "lm-window": "16x2048x10x128cw1024n"},
        **{f"sweep-{n}": f"{65536 // n}x{n}x6x64" for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)},
        **{f"decode-b{b}-{n}": f"{b}x{n}x10x128nd" for b in (1, 32) for n in (1024, 2048, 8192)},
        **{f"decode-derived-b{b}-{n}": f"{b}x{n}x10x128ndk" for b in (1, 32) for n in (1024, 2048, 8192)},
        **{"padded": "64x512x12x64p64", "padded-full": "64x512x12x64p512"},
    },
    "cpu": {
        **{"vit-ti": "8x197x3x64", "vit-s": "8x197x6x64", "vit-b": "8x197x12x64"},
        **{"lm-full": "1x2048x8x64cn", "lm-window": "1x2048x8x64cw256n"},
        **{"lm-short-full": "4x512x4x32cn", "lm-short-window": "4x512x4x32cw256n"},
        **{f"sweep-{n}": f"{1024 // n}x{n}x3x64" for n in (64, 128, 256, 512, 1024)},
        **{f"decode-b{b}-1024": f"{b}x1024x10x128nd" for b in (1, 8)},
        **{f"decode-derived-b{b}-1024": f"{b}x1024x10x128ndk" for b in (1, 8)},
        **{"padded": "8x512x4x64p64", "padded-full": "8x512x4x64p512"},
    },
}
QUICK = ("vit-ti", "lm-full", "sweep-64", "sweep-1024", "decode-b1-1024", "decode-derived-b1-1024", "padded")
ONE_DTYPE = ("sweep-", "decode-")  # cases in the device's usual dtype alone
PLANS = {"cuda": Plan(rounds=50, seconds=10, sample_ms=1.0, graph=True), "cpu": Plan(rounds=25, warmup=2, seconds=1.5)}


@dataclass
class AttentionConfig(ComparisonConfig):
    """Time Gaussian kernel attention beside softmax attention, the operator alone.

    Appends to RESULTS/bench_attention_<hardware>.jsonl. A shape is BxTxHxD, then pN (padded, lengths N to T), or c
    (causal), wN (window N), n (RMS-normalised heads), d (decode), dk (decode, keys derived from the cache), v (separate
    values), vk (separate keys too): 16x2048x10x128cw1024nvk.
    """

    switch: list[Literal[configs.PATHS]] = field(default_factory=list)
    """Optional paths of the Triton kernels: each is timed beside them, on where it is off, and off where it is on."""


def standard_cases(device_type: str, quick: bool) -> list[Case]:
    shapes = {name: shape for name, shape in SHAPES[device_type].items() if not quick or name in QUICK}
    return [replace(Case.parse(shape), name=name) for name, shape in shapes.items()]


def make_calls(case: Case, phase: str, candidates: dict[str, Operator], buffers: int, device: torch.device):
    """name -> call(n): the operator, forward or forward and backward, on the n-th set of inputs."""
    sets = {}
    for family, dtype in {(operator.family, operator.dtype) for operator in candidates.values()}:
        drawn = (inputs(case, family, device, dtype, 10 + n, phase == FULL).behind_front() for n in range(buffers))
        sets[family, dtype] = [problem.map(lambda t: t.requires_grad_(phase == FULL)) for problem in drawn]

    def work(operator: Operator, n: int) -> None:
        p = sets[operator.family, operator.dtype][n]
        y = operator.function(p.x, p.log_sigma, keys=p.keys, values=p.values)
        if phase == FULL:  # softmax attention has no log_sigma
            leaves = [t for t in (p.x, p.keys, p.values, p.log_sigma) if t is not None]
            torch.autograd.grad(y, leaves, p.grad_y, allow_unused=True)

    return {name: partial(work, operator) for name, operator in candidates.items()}


def switched(path: str, device: torch.device) -> tuple[str, Callable[[Callable], Callable]]:
    """What our kernels are called with this path on, or without it if it is on, and what makes a call such a one."""
    generation = configs.generation(device)
    taken = configs.TABLES[generation].takes(path)
    switch = configs.override(generation, paths={path: () if taken else ("",)})
    return f"gka triton {'without' if taken else 'with'} {path}", switch


def measure(config: AttentionConfig, plan: Plan, device: torch.device, case: Case, phase: str) -> Iterator[Comparison]:
    """A comparison in each dtype."""
    for name in config.dtypes_on(device.type)[: 1 if case.name.startswith(ONE_DTYPE) else None]:
        torch._dynamo.reset()  # FlexAttention compiles for each shape, and torch stops at eight
        dtype = getattr(torch, name)
        candidates = {n: one for n, one in operators(case, device, dtype, phase).items() if not config.skips(n)}
        paths = config.switch if "gka triton" in candidates else []
        switches = dict(switched(path, device) for path in paths)
        candidates |= {name: replace(candidates["gka triton"], role="variant") for name in switches}
        buffers = buffers_for(device, case.batch * case.tokens * case.heads * case.head_dim * dtype.itemsize)
        try:
            calls = make_calls(case, phase, candidates, buffers, device)
        except torch.OutOfMemoryError as error:
            measured = {name: Measurement().fail(error) for name in candidates}
        else:
            gates = {name: partial(gate, operator, case, phase, device) for name, operator in candidates.items()}
            for candidate, switch in switches.items():
                calls[candidate], gates[candidate] = switch(calls[candidate]), switch(gates[candidate])
            measured = interleave(calls, device, replace(plan, buffers=buffers), gates)
        roles = {name: operator.role for name, operator in candidates.items()}
        yield Comparison({**case.settings(), "dtype": name}, measured, roles)


def main(config: AttentionConfig) -> None:
    device = setup(config.device_type).device
    if config.switch and device.type != "cuda":
        raise UserError("--switch needs a CUDA device: it is about the Triton kernels")
    chosen = config.choose(Case.parse, standard_cases, device.type)
    timed = partial(measure, config, config.adjust(PLANS[device.type]), device)
    threads = sorted({1, torch.get_num_threads()}) if device.type == "cpu" else ()
    time_cases("attention", config, chosen, device, timed, threads)


if __name__ == "__main__":
    run(main, AttentionConfig)
