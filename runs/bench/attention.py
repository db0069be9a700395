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
from nanochat_gka.model.config import GPTConfig
from runs.bench.operators import FULL, Case, Operator, gate, inputs, operators
from runs.bench.program import Comparison, ComparisonConfig, time_cases
from runs.bench.timing import Measurement, Plan, buffers_for, interleave
from trainkit_gka.cli import UserError, run
from trainkit_gka.distributed import setup

D20 = GPTConfig.from_depth(20)
CPU_WINDOW = 256  # earlier tokens in reach
SLOW = ("vit-s", "vit-b", "lm-window", "lm-short-window")  # --quick leaves them out
ONE_DTYPE = ("sweep-", "decode-")  # cases in the device's usual dtype alone
PLANS = {"cuda": Plan(rounds=50, seconds=10, sample_ms=1.0, graph=True), "cpu": Plan(rounds=25, warmup=2, seconds=1.5)}


@dataclass
class AttentionConfig(ComparisonConfig):
    """Time Gaussian kernel attention beside softmax attention, the operator alone.

    Appends to RESULTS/bench_attention_<hardware>.jsonl.
    """

    shapes: list[str] = field(default_factory=list)
    """Time these instead of the standard cases: BxTxHxD, then pN (padded, lengths N to T), or c (causal), wN (window
    N), n (RMS-normalised heads), d (decode), dk (decode, keys derived from the cache), v (separate values), vk
    (separate keys too): 16x2048x10x128cw1024nvk."""
    switch: list[Literal[configs.PATHS]] = field(default_factory=list)
    """Optional paths of the Triton kernels: each is timed beside them, on where it is off, and off where it is on."""


def standard_cases(device_type: str, quick: bool) -> list[Case]:
    """The cases, in sizes that the device can do; `quick` keeps one of each kind."""
    cuda = device_type == "cuda"
    cases = [Case(f"vit-{size}", 256 if cuda else 8, 197, h, 64) for size, h in {"ti": 3, "s": 6, "b": 12}.items()]
    causal = {"lm-full": (1, 2048, 8, 64), "lm-short-full": (4, 512, 4, 32)}
    if cuda:
        causal = {"lm-full": (16, D20.sequence_len, D20.n_head, D20.head_dim)}
    for name, shape in causal.items():
        full = Case(name, *shape, causal=True, constant_norm=True)
        window = D20.window(0) if cuda else CPU_WINDOW
        cases += [full, replace(full, name=name.replace("full", "window"), window=window)]
    total, longest, heads = (65536, 16384, 6) if cuda else (1024, 1024, 3)
    lengths = [64 * 2**k for k in range(9) if 64 * 2**k <= longest][:: 4 if quick else 1]
    cases += [Case(f"sweep-{length}", total // length, length, heads, 64) for length in lengths]
    caches = [(1, 1024), (1, 2048), (1, 8192), (32, 1024), (32, 2048), (32, 8192)] if cuda else [(1, 1024), (8, 1024)]
    for name, derived in (("decode", False), ("decode-derived", True)):
        for b, n in caches[:: 3 if quick else 1]:
            shape = b, n, D20.n_head, D20.head_dim
            cases.append(Case(f"{name}-b{b}-{n}", *shape, constant_norm=True, queries=1, derived=derived))
    padded = Case("padded", 64 if cuda else 8, 512, 12 if cuda else 4, 64, shortest=64)
    cases += [padded, replace(padded, name="padded-full", shortest=512)]
    return [case for case in cases if case.name not in SLOW] if quick else cases


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
