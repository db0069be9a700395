"""Time tile sizes of the Triton kernels on the GPU at hand, and print the lines that belong in gka/impl/triton/configs.py.

    python -m runs.bench.tune                          every kernel, half precision
    python -m runs.bench.tune --only queries keys      some of them

A candidate must agree with the shipped configuration's result, and then takes turns with it. Every measurement is a line of
RESULTS/bench_tune_<hardware>.jsonl; the table is edited by hand, and `python -m runs.bench.kernel_resources --write` says what an entry costs.
"""

import itertools
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from gka import gaussian_attention, testing
from gka.impl.triton import configs as triton_configs
from gka.impl.triton.configs import Config
from runs.bench.config import CaseConfig
from runs.bench.device import release_memory
from runs.bench.measurement import Measurement, Plan
from runs.bench.results import Recorder
from runs.bench.timing import interleave
from trainkit.cli import UserError, run
from trainkit.distributed import setup
from trainkit.progress import console, progress_bar

ROWS, COLUMNS, WARPS, STAGES = (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
PLAN = Plan(rounds=20, seconds=3, sample_ms=1.0, graph=True)


@dataclass(frozen=True)
class Problem:
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


PROBLEMS = [
    *(Problem("forward", 16, 2048, 1280 // d, d, causal=True, window=512, with_values=True) for d in (32, 64, 128)),
    *(Problem("symmetric", 256, 197, 192 // d, d) for d in (32, 64)),
    Problem("symmetric", 64, 197, 6, 128),
    *(Problem("queries", 16, 2048, 1280 // d, d, causal=True, window=512, with_values=True) for d in (32, 64, 128)),
    *(Problem("keys", 16, 2048, 1280 // d, d, causal=True, window=512, with_values=True) for d in (32, 64, 128)),
    *(Problem("decode", 32, 2048, 1280 // d, d, causal=True, queries=1) for d in (32, 64, 128)),
]


@dataclass
class TuneConfig(CaseConfig):
    """Time tile sizes of the Triton kernels on this GPU."""

    dtype: str = "bfloat16"
    """bfloat16, float16 or float32"""
    candidates: list[str] = field(default_factory=list)
    """instead of the built-in grid: rows x columns x warps x stages, such as 128x64x8x3"""

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


def operator(problem: Problem, dtype: torch.dtype, device: torch.device):
    """call(n) -> tensors: forward for the forward kernels, else forward and backward."""
    shape = (problem.batch, problem.tokens, problem.heads, problem.head_dim)
    constant = problem.causal
    x = testing.make_features("unit_norm" if constant else "normal", shape, dtype).to(device)
    values = testing.make_features("normal", shape, dtype, 1).to(device) if problem.with_values else None
    log_sigma = torch.full((problem.heads,), 0.25, device=device) + 0.5 * torch.log(torch.tensor(problem.head_dim**0.5))
    options = dict(causal=problem.causal, window=problem.window, constant_norm=constant, impl="triton")
    if problem.queries:
        queries = x[:, -problem.queries :].clone()
        return lambda n: [gaussian_attention(queries, log_sigma, keys=x, **options)]
    if problem.kernel == "forward":
        return lambda n: [gaussian_attention(x, log_sigma, values=values, **options)]
    leaves = [t.requires_grad_() for t in (x, values) if t is not None]
    grad_y = testing.make_features("normal", shape, dtype, 2).to(device)
    return lambda n: list(
        torch.autograd.grad(gaussian_attention(x, log_sigma, values=values, **options), leaves, grad_y)
    )


def tune(
    problem: Problem, candidates: list[Config], dtype: torch.dtype, device: torch.device, plan: Plan
) -> dict[str, Measurement]:
    """Every candidate's time beside the shipped configuration's, which comes first; named rows x columns x warps x stages."""
    name = triton_configs.generation(device)
    key = (problem.kernel, max(32, problem.head_dim), dtype.itemsize)
    shipped = triton_configs.TABLES[name].entries.get(key)
    work = operator(problem, dtype, device)
    want = [t.double() for t in work(0)]

    def call(config: Config, n: int):
        with triton_configs.override(name, entries={key: config}, head=False):
            return work(n)

    def differs(config: Config) -> str | None:
        worst = max(testing.error(got, expected) for got, expected in zip(call(config, 0), want, strict=True))
        limit = 8 * torch.finfo(dtype).eps
        return (
            None
            if worst <= limit
            else f"differs from the shipped configuration by {worst:.1e}, allowed are {limit:.1e}"
        )

    named = {"x".join(map(str, c)): c for c in (shipped, *candidates) if c is not None}
    return interleave(
        {text: partial(call, c) for text, c in named.items()},
        device,
        plan,
        {text: partial(differs, c) for text, c in named.items()},
    )


def main(config: TuneConfig) -> None:
    config.check()
    device, dtype = setup(config.device_type).device, getattr(torch, config.dtype)
    if device.type != "cuda":
        raise UserError("tuning needs a CUDA device; without one the shipped table is not used either")
    problems = {problem.name: problem for problem in PROBLEMS}
    recorder = Recorder(config, "tune", device)
    with progress_bar() as bar:
        names = config.select(list(problems))
        task = bar.add_task("tuning", total=len(names), status="")
        for name in names:
            bar.update(task, status=name)
            measured = tune(
                problems[name], config.parsed or grid(problems[name].kernel), dtype, device, PLAN.adjust(config)
            )
            roles = {text: "other" if n else "ours" for n, text in enumerate(measured)}
            recorder.record(name, "tune", measured, roles, {**asdict(problems[name]), "dtype": config.dtype})
            right = [text for text in measured if measured[text].status == "ok"]
            best = min(right, key=lambda text: measured[text].median_ms, default="none was right")
            console.print(
                f"{name}: fastest is {best}; shipped, or the first tried: {next(iter(measured))}", highlight=False
            )
            release_memory()
            bar.advance(task)


if __name__ == "__main__":
    run(main, TuneConfig)
