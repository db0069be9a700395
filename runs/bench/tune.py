"""Time tile sizes of the Triton kernels on the GPU at hand, and print them as configs.py has them.

    python -m runs.bench.tune                        every kernel, half precision
    python -m runs.bench.tune --only queries keys    some of them

A candidate must be within the error budget, and then takes turns with the shipped configuration and the others. The
table in gka/impl/triton/configs.py is edited by hand; `python tests/support/kernel_resources.py --write` lists what its
entries cost.
"""

import itertools
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from gka import gaussian_attention
from gka.impl.triton import configs
from gka.impl.triton.configs import Config
from runs.bench.attention import make_calls
from runs.bench.operators import FORWARD, FULL, Case, Operator, gate
from runs.bench.timing import Measurement, Plan, interleave
from trainkit_gka.cli import UserError, run

ROWS, COLUMNS, WARPS, STAGES = (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
PLAN = Plan(rounds=5, warmup=1, buffers=16, sample_ms=20.0, graph=True)  # 16 calls in a CUDA graph


@dataclass(frozen=True)
class Workload:
    """What a kernel is tuned on: a shape of `runs.bench.attention` that the two trainers have."""

    kernel: str
    shape: str

    @property
    def case(self) -> Case:
        return Case.parse(self.shape)

    @property
    def phase(self) -> str:
        """What is timed: forward for the forward kernels, else forward and backward."""
        return FORWARD if self.kernel in ("forward", "decode") else FULL

    @property
    def name(self) -> str:
        return f"{self.kernel}-d{self.case.head_dim}"


CAUSAL = ("forward", "queries", "keys")  # kernels that are tuned with a window and values of their own
WORKLOADS = [
    *(Workload(kernel, f"16x2048x{1280 // d}x{d}cw512nv") for kernel in CAUSAL for d in (32, 64, 128)),
    *(Workload("symmetric", f"256x197x{192 // d}x{d}") for d in (32, 64)),
    Workload("symmetric", "64x197x6x128"),
    *(Workload("decode", f"32x2048x{1280 // d}x{d}cnd") for d in (32, 64, 128)),
]


def grid(kernel: str) -> list[Config]:
    """The candidates for a kernel: rows, columns, warps, stages."""
    rows = (16,) if kernel == "decode" else ROWS
    return [Config(*c) for c in itertools.product(rows, COLUMNS, WARPS, STAGES)]


def tune(
    workload: Workload, candidates: list[Config], dtype: torch.dtype, device: torch.device, plan: Plan = PLAN
) -> dict[Config, Measurement]:
    """The shipped configuration and the candidates, fastest first; those that are wrong or fail are last."""
    case, phase = workload.case, workload.phase
    name, key = configs.generation(device), (workload.kernel, max(32, case.head_dim), dtype.itemsize)
    shipped = configs.TABLES[name].entries.get(key)
    every = [config for config in dict.fromkeys([shipped, *candidates]) if config is not None]
    options = dict(causal=case.causal, window=case.window, constant_norm=case.constant_norm)
    operator = Operator("ours", "gka", partial(gaussian_attention, impl="triton", **options), dtype)
    [call] = make_calls(case, phase, {"": operator}, 1, device).values()
    with_tiles = {config: configs.override(name, entries={key: config}) for config in every}
    calls = {config: under(lambda n: call(0)) for config, under in with_tiles.items()}
    gates = {config: under(partial(gate, operator, case, phase, device)) for config, under in with_tiles.items()}
    measured = interleave(calls, device, plan, gates)
    return dict(sorted(measured.items(), key=lambda item: item[1].median_ms or math.inf))


@dataclass
class TuneConfig:
    """Time tile sizes of the Triton kernels on this GPU."""

    only: list[str] = field(default_factory=list)
    """Beginnings of the workloads to time, such as forward or keys-d64; empty = all."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the features."""


def main(config: TuneConfig) -> None:
    for start in config.only:
        if not any(workload.name.startswith(start) for workload in WORKLOADS):
            names = ", ".join(workload.name for workload in WORKLOADS)
            raise UserError(f"--only {start}: no such workload; there are {names}")
    if not torch.cuda.is_available():
        raise UserError("tuning needs a CUDA device; without one the shipped table is not used either")
    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, config.dtype)
    for workload in (one for one in WORKLOADS if not config.only or one.name.startswith(tuple(config.only))):
        print(f"{workload.name}, {config.dtype}, {torch.cuda.get_device_name(device)}")
        for tiles, timed in tune(workload, grid(workload.kernel), dtype, device).items():
            print(f"    {tuple(tiles)!s:<20} {timed.reason or f'{timed.median_ms:.4f} ms'}", flush=True)


if __name__ == "__main__":
    run(main, TuneConfig)
