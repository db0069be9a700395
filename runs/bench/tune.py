"""Time tile sizes of the Triton kernels on the GPU at hand, and print them as configs.py has them.

    python -m runs.bench.tune                        every kernel, half precision
    python -m runs.bench.tune --only queries keys    some of them

A candidate must be within the error budget, and then takes turns with the shipped configuration and the others. The
table in gka/impl/triton/configs.py is edited by hand; `python tests/support/kernel_resources.py --write` lists what its
entries cost.
"""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from gka import gaussian_attention, testing
from gka.impl.triton import configs
from gka.impl.triton.configs import Config
from gka.masking import Mask
from gka.options import EPS
from gka.testing import Problem
from runs.bench.timing import Measurement, Plan, interleave
from trainkit_gka.cli import UserError, run

ROWS, COLUMNS, WARPS, STAGES = (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
MOST_JUDGED = 2**28  # numbers of a float64 matrix W: 2 GiB
PLAN = Plan(rounds=5, warmup=1, buffers=16, sample_ms=20.0, graph=True)  # 16 calls in a CUDA graph
WITH_VALUES = ("forward", "queries", "keys")  # kernels that are tuned causally, with values of their own


@dataclass(frozen=True)
class Workload:
    """What a kernel is tuned on: the sizes it meets in the two trainers."""

    kernel: str  # all but symmetric are causal; decode has one query
    batch: int
    tokens: int
    heads: int
    head_dim: int
    window: int | None = None

    @property
    def name(self) -> str:
        return f"{self.kernel}-d{self.head_dim}"


WORKLOADS = [
    *(Workload(kernel, 16, 2048, 1280 // d, d, window=512) for kernel in WITH_VALUES for d in (32, 64, 128)),
    *(Workload("symmetric", 256, 197, 192 // d, d) for d in (32, 64)),
    Workload("symmetric", 64, 197, 6, 128),
    *(Workload("decode", 32, 2048, 1280 // d, d) for d in (32, 64, 128)),
]


def grid(kernel: str) -> list[Config]:
    """The candidates for a kernel: rows, columns, warps, stages."""
    rows = (16,) if kernel == "decode" else ROWS
    return [Config(*c) for c in itertools.product(rows, COLUMNS, WARPS, STAGES)]


class Work:
    """A workload's inputs on the device: `call` is timed, `judge` says why what it computes is wrong."""

    def __init__(self, workload: Workload, dtype: torch.dtype, device: torch.device):
        self.workload = workload
        self.causal = workload.kernel != "symmetric"
        options = dict(causal=self.causal, window=workload.window, constant_norm=self.causal)
        self.attend = partial(gaussian_attention, impl="triton", **options)
        backward = workload.kernel not in ("forward", "decode")
        problem = Problem.seeded(
            "unit_norm" if self.causal else "normal",
            (workload.batch, workload.tokens, workload.heads, workload.head_dim),
            dtype,
            device=device,
            with_values=workload.kernel in WITH_VALUES,
            with_gradients=backward,
            mask=Mask(self.causal, workload.window),
            log_sigma=torch.full((workload.heads,), 0.25 + 0.25 * math.log(workload.head_dim), device=device),
        )
        if workload.kernel == "decode":
            problem = replace(problem, x=problem.x[:, -1:].clone(), keys=problem.x)
        if backward:
            self.leaves = [t.requires_grad_() for t in (problem.x, problem.values) if t is not None]
        self.problem = problem

    def call(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What is timed: forward for the forward kernels, else forward and backward."""
        p = self.problem
        y = self.attend(p.x, p.log_sigma, keys=p.keys, values=p.values)
        return y if p.grad_y is None else torch.autograd.grad(y, self.leaves, p.grad_y)

    def judge(self) -> str | None:
        """`testing.judge` of as many sequences as float64 has memory for."""
        pairs = self.problem.x.shape[1] * self.workload.tokens * self.workload.heads
        count = max(1, min(self.workload.batch, MOST_JUDGED // pairs))
        few = self.problem.map(lambda t: t[:count] if t.dim() == 4 else t)
        return testing.judge(self.attend, few, slack=EPS, constant_norm=self.causal)


def tune(
    workload: Workload, candidates: list[Config], dtype: torch.dtype, device: torch.device, plan: Plan = PLAN
) -> dict[Config, Measurement]:
    """The shipped configuration and the candidates, fastest first; those that are wrong or fail are last."""
    name, key = configs.generation(device), (workload.kernel, max(32, workload.head_dim), dtype.itemsize)
    shipped = configs.TABLES[name].entries.get(key)
    every = [config for config in dict.fromkeys([shipped, *candidates]) if config is not None]
    work = Work(workload, dtype, device)

    def under(config: Config, function: Callable[[], object]) -> Callable[..., Any]:
        def call(*_: int) -> object:
            with configs.override(name, entries={key: config}):
                return function()

        return call

    calls, gates = ({config: under(config, each) for config in every} for each in (work.call, work.judge))
    measured = interleave(calls, device, plan, gates)
    return dict(sorted(measured.items(), key=lambda item: item[1].median_ms or math.inf))


@dataclass
class TuneConfig:
    """Time tile sizes of the Triton kernels on this GPU."""

    only: list[str] = field(default_factory=list)
    """Beginnings of the workloads to time, such as forward or keys-d64; empty = all."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the features."""
    candidates: list[str] = field(default_factory=list)
    """rows x columns x warps x stages, such as 128x64x8x3, in place of the grid."""


def main(config: TuneConfig) -> None:
    names = [workload.name for workload in WORKLOADS]
    for start in config.only:
        if not any(name.startswith(start) for name in names):
            raise UserError(f"--only {start}: no such workload; there are {', '.join(names)}")
    for text in config.candidates:
        if not re.fullmatch(r"([1-9]\d*x){3}[1-9]\d*", text):
            raise UserError(f"--candidates: {text} is not rows x columns x warps x stages, such as 128x64x8x3")
    if not torch.cuda.is_available():
        raise UserError("tuning needs a CUDA device; without one the shipped table is not used either")
    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, config.dtype)
    candidates = [Config(*map(int, text.split("x"))) for text in config.candidates]
    for workload in WORKLOADS:
        if config.only and not workload.name.startswith(tuple(config.only)):
            continue
        print(f"{workload.name}, {config.dtype}, {torch.cuda.get_device_name(device)}")
        for tiles, timed in tune(workload, candidates or grid(workload.kernel), dtype, device).items():
            print(f"    {tuple(tiles)!s:<20} {timed.reason or f'{timed.median_ms:.4f} ms'}", flush=True)


if __name__ == "__main__":
    run(main, TuneConfig)
