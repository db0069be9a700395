"""Time tile sizes of the Triton kernels on the GPU at hand, and print the lines that belong in
gka/impl/triton/configs.py.

    python -m runs.bench.tune                          every kernel, half precision
    python -m runs.bench.tune --only queries keys      some of them

A candidate must be within the error budget, and then takes turns with the shipped configuration. Every measurement is a
line of RESULTS/bench_tune_<hardware>.jsonl; the table is edited by hand, and `python -m runs.bench.kernel_resources
--write` says what an entry costs.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from gka import gaussian_attention, testing
from gka.api import EPS
from gka.impl.triton import configs as triton_configs
from gka.impl.triton.configs import Config
from gka.masking import Mask
from gka.testing import Problem
from runs.bench.config import CaseConfig
from runs.bench.device import release_memory
from runs.bench.measurement import Measurement, Plan
from runs.bench.results import Recorder
from runs.bench.timing import interleave
from trainkit_gka.cli import UserError, run
from trainkit_gka.distributed import setup
from trainkit_gka.progress import console, progress_bar

ROWS, COLUMNS, WARPS, STAGES = (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
MOST_JUDGED = 2**28  # numbers of a float64 matrix W: 2 GiB
PLAN = Plan(rounds=20, seconds=3, sample_ms=1.0, graph=True)


@dataclass(frozen=True)
class Workload:
    """What a kernel is tuned on: the sizes it meets in the two trainers."""

    kernel: str
    batch: int
    tokens: int
    heads: int
    head_dim: int
    causal: bool = False
    window: int | None = None
    with_values: bool = False
    queries: int = 0  # 0: all tokens

    @property
    def name(self) -> str:
        return f"{self.kernel}-d{self.head_dim}"


WORKLOADS = [
    *(Workload("forward", 16, 2048, 1280 // d, d, causal=True, window=512, with_values=True) for d in (32, 64, 128)),
    *(Workload("symmetric", 256, 197, 192 // d, d) for d in (32, 64)),
    Workload("symmetric", 64, 197, 6, 128),
    *(Workload("queries", 16, 2048, 1280 // d, d, causal=True, window=512, with_values=True) for d in (32, 64, 128)),
    *(Workload("keys", 16, 2048, 1280 // d, d, causal=True, window=512, with_values=True) for d in (32, 64, 128)),
    *(Workload("decode", 32, 2048, 1280 // d, d, causal=True, queries=1) for d in (32, 64, 128)),
]


@dataclass
class TuneConfig(CaseConfig):
    """Time tile sizes of the Triton kernels on this GPU."""

    dtype: str = "bfloat16"
    """Type of the features: bfloat16, float16 or float32."""
    candidates: list[str] = field(default_factory=list)
    """Time these instead of the built-in grid: rows x columns x warps x stages, such as 128x64x8x3."""

    def check(self) -> None:
        super().check()
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise UserError(f"--dtype must be bfloat16, float16 or float32, got {self.dtype!r}")
        try:
            self.parsed = [Config(*(int(n) for n in text.split("x"))) for text in self.candidates]
        except (ValueError, TypeError):
            raise UserError(f"--candidates must look like 128x64x8x3, got {' '.join(self.candidates)}") from None


def grid(kernel: str) -> list[Config]:
    """The candidates for a kernel: rows, columns, warps, stages."""
    rows = (16,) if kernel == "decode" else ROWS
    return [Config(*c) for c in itertools.product(rows, COLUMNS, WARPS, STAGES)]


class Work:
    """A workload's inputs on the device: `call` to time, `judge` to decide whether a configuration computes the right
    thing.
    """

    def __init__(self, workload: Workload, dtype: torch.dtype, device: torch.device):
        self.workload, self.constant_norm = workload, workload.causal
        mask = Mask(workload.causal, workload.window)
        options = dict(causal=mask.causal, window=mask.window, constant_norm=self.constant_norm, impl="triton")
        self.attend = partial(gaussian_attention, **options)
        shape = (workload.batch, workload.tokens, workload.heads, workload.head_dim)
        log_sigma = torch.full((workload.heads,), 0.25 + 0.25 * math.log(workload.head_dim), device=device)
        backward, kind = workload.kernel not in ("forward", "decode"), "unit_norm" if self.constant_norm else "normal"
        fields = dict(with_values=workload.with_values, with_gradients=backward, mask=mask, log_sigma=log_sigma)
        problem = Problem.seeded(kind, shape, dtype, device=device, **fields)
        if workload.queries:
            problem = replace(problem, x=problem.x[:, -workload.queries :].clone(), keys=problem.x)
        if backward:
            self.leaves = [t.requires_grad_() for t in (problem.x, problem.values) if t is not None]
        self.problem = problem

    def call(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What the clock sees: forward for the forward kernels, else forward and backward."""
        p = self.problem
        y = self.attend(p.x, p.log_sigma, keys=p.keys, values=p.values)
        return y if p.grad_y is None else torch.autograd.grad(y, self.leaves, p.grad_y)

    def judge(self) -> str | None:
        """`testing.judge` of as many sequences as float64 has memory for."""
        pairs = self.problem.x.shape[1] * self.workload.tokens * self.workload.heads
        count = max(1, min(self.workload.batch, MOST_JUDGED // pairs))
        few = self.problem.map(lambda t: t[:count] if t.dim() == 4 else t)
        return testing.judge(self.attend, few, slack=EPS, constant_norm=self.constant_norm)


def tune(
    workload: Workload, candidates: list[Config], dtype: torch.dtype, device: torch.device, plan: Plan
) -> dict[str, Measurement]:
    """Every candidate's time beside the shipped configuration's, which comes first; named rows x columns x warps x
    stages.
    """
    name = triton_configs.generation(device)
    key = (workload.kernel, max(32, workload.head_dim), dtype.itemsize)
    shipped = triton_configs.TABLES[name].entries.get(key)
    work = Work(workload, dtype, device)

    def with_config(config: Config, method: Callable[[], Any], *_buffer: int):
        with triton_configs.override(name, entries={key: config}, head=False):
            return method()

    named = {"x".join(map(str, c)): c for c in (shipped, *candidates) if c is not None}
    calls = {text: partial(with_config, config, work.call) for text, config in named.items()}
    gates = {text: partial(with_config, config, work.judge) for text, config in named.items()}
    return interleave(calls, device, plan, gates)


def main(config: TuneConfig) -> None:
    config.check()
    device, dtype = setup(config.device_type).device, getattr(torch, config.dtype)
    if device.type != "cuda":
        raise UserError("tuning needs a CUDA device; without one the shipped table is not used either")
    workloads = {workload.name: workload for workload in WORKLOADS}
    recorder = Recorder(config, "tune", device)
    with progress_bar() as bar:
        names = config.select(list(workloads))
        task = bar.add_task("tuning", total=len(names), status="")
        for name in names:
            bar.update(task, status=name)
            measured = tune(
                workloads[name], config.parsed or grid(workloads[name].kernel), dtype, device, PLAN.adjust(config)
            )
            roles = {text: "other" if n else "ours" for n, text in enumerate(measured)}
            recorder.record(name, "tune", measured, roles, {**asdict(workloads[name]), "dtype": config.dtype})
            right = [text for text in measured if measured[text].status == "ok"]
            best = min(right, key=lambda text: measured[text].median_ms, default="none was right")
            console.print(
                f"{name}: fastest is {best}; shipped, or the first tried: {next(iter(measured))}", highlight=False
            )
            release_memory()
            bar.advance(task)


if __name__ == "__main__":
    run(main, TuneConfig)
