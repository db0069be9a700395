"""Time tile sizes of the Triton kernels on the GPU at hand, and print them as configs.py has them.

    python -m runs.bench.tune                        every kernel, half precision
    python -m runs.bench.tune --only queries keys    some of them

A candidate must be within the error budget, and then takes turns with the shipped configuration and the others. The
table in gka/impl/triton/configs.py is edited by hand; `python tests/support/kernel_resources.py --write` lists what its
entries cost.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import torch
from triton.testing import do_bench_cudagraph

from gka import gaussian_attention, testing
from gka.api import EPS
from gka.impl.triton import configs
from gka.impl.triton.configs import Config
from gka.masking import Mask
from gka.testing import Problem

ROWS, COLUMNS, WARPS, STAGES = (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
MOST_JUDGED = 2**28  # numbers of a float64 matrix W: 2 GiB
ROUNDS = 5


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


def grid(kernel: str) -> list[Config]:
    """The candidates for a kernel: rows, columns, warps, stages."""
    rows = (16,) if kernel == "decode" else ROWS
    return [Config(*c) for c in itertools.product(rows, COLUMNS, WARPS, STAGES)]


class Work:
    """A workload's inputs on the device: `call` is timed, `judge` says why what it computes is wrong."""

    def __init__(self, workload: Workload, dtype: torch.dtype, device: torch.device):
        self.workload, self.constant_norm = workload, workload.causal
        self.attend = partial(
            gaussian_attention,
            causal=workload.causal,
            window=workload.window,
            constant_norm=self.constant_norm,
            impl="triton",
        )
        backward = workload.kernel not in ("forward", "decode")
        problem = Problem.seeded(
            "unit_norm" if self.constant_norm else "normal",
            (workload.batch, workload.tokens, workload.heads, workload.head_dim),
            dtype,
            device=device,
            with_values=workload.with_values,
            with_gradients=backward,
            mask=Mask(workload.causal, workload.window),
            log_sigma=torch.full((workload.heads,), 0.25 + 0.25 * math.log(workload.head_dim), device=device),
        )
        if workload.queries:
            problem = replace(problem, x=problem.x[:, -workload.queries :].clone(), keys=problem.x)
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
        return testing.judge(self.attend, few, slack=EPS, constant_norm=self.constant_norm)


@dataclass
class Timed:
    """One candidate: the milliseconds of its rounds, or the reason why it has none."""

    config: Config
    milliseconds: list[float] = field(default_factory=list)
    reason: str | None = None

    @property
    def median(self) -> float:
        return math.inf if self.reason else statistics.median(self.milliseconds)


def tune(
    workload: Workload, candidates: list[Config], dtype: torch.dtype, device: torch.device, rounds: int = ROUNDS
) -> list[Timed]:
    """The shipped configuration and the candidates, fastest first; those that are wrong or fail are last."""
    name = configs.generation(device)
    key = (workload.kernel, max(32, workload.head_dim), dtype.itemsize)
    shipped = configs.TABLES[name].entries.get(key)
    work = Work(workload, dtype, device)
    timed = [Timed(config) for config in dict.fromkeys([shipped, *candidates]) if config is not None]
    for turn, one in itertools.product(range(-1, rounds), timed):
        if one.reason:
            continue
        try:
            with configs.override(name, entries={key: one.config}):
                if turn < 0:
                    one.reason = work.judge()
                else:
                    one.milliseconds.append(milliseconds(work.call))
        except Exception as error:  # tiles may need more registers or memory than the device has
            one.reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            torch.cuda.empty_cache()
    return sorted(timed, key=lambda one: one.median)


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call, the median of ten replays of a CUDA graph of many."""
    return do_bench_cudagraph(call, return_mode="median")


def candidate(text: str) -> Config:
    """From text such as 128x64x8x3."""
    numbers = text.split("x")
    if len(numbers) != 4 or not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"{text} is not rows x columns x warps x stages, such as 128x64x8x3")
    return Config(*map(int, numbers))


class Parser(argparse.ArgumentParser):
    """A mistake is one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main() -> None:
    names = [workload.name for workload in WORKLOADS]
    parser = Parser(prog="python -m runs.bench.tune", description="Time tile sizes of the Triton kernels on this GPU.")
    parser.add_argument("--only", nargs="+", default=[""], help=f"beginnings of {', '.join(names)} (default: all)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the features"
    )
    parser.add_argument(
        "--candidates",
        nargs="+",
        type=candidate,
        help="rows x columns x warps x stages, such as 128x64x8x3, in place of the grid",
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="timed turns of every candidate (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if unknown := [start for start in arguments.only if not any(name.startswith(start) for name in names)]:
        parser.error(f"--only {unknown[0]}: no such workload; there are {', '.join(names)}")
    if arguments.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if not torch.cuda.is_available():
        parser.error("tuning needs a CUDA device; without one the shipped table is not used either")
    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, arguments.dtype)
    for workload in (workload for workload in WORKLOADS if workload.name.startswith(tuple(arguments.only))):
        print(f"{workload.name}, {arguments.dtype}, {torch.cuda.get_device_name(device)}")
        for one in tune(workload, arguments.candidates or grid(workload.kernel), dtype, device, arguments.rounds):
            print(f"    {tuple(one.config)!s:<20} {one.reason or f'{one.median:.4f} ms'}", flush=True)


if __name__ == "__main__":
    main()
