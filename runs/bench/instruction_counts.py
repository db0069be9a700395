"""Count the instructions in the compiled loops of the Gaussian Triton kernels and of plain flash attention.

    python -m runs.bench.instruction_counts              rewrites runs/results/instruction_counts.jsonl (minutes)
    python -m runs.bench.instruction_counts --results FILE.jsonl --architectures 90

bfloat16, self-attention, the shipped tile sizes, for GPUs that this machine need not have. A trip of the loop over
tiles that need no mask is counted, over all threads of the program, and divided by the tile's pairs of query and key:
numbers per pair, without unit. These are counts of instructions in compiled code, not times. The bytes of the whole
pass are arithmetic: each kernel reads and writes each of its tensors once. `python -m runs.tables` makes the table of
gka/README.md. Needs the triton package and no GPU.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import triton
import tyro

from gka.impl.triton import configs
from runs.bench import kernel_resources, softmax_kernels
from runs.bench.machine_code import Code, assembler, compile_kernel, count, in_processes, loops
from runs.bench.results import RESULTS
from trainkit_gka.cli import Count, run
from trainkit_gka.results import append_result
from trainkit_gka.workers import cores

FILE = RESULTS / "instruction_counts.jsonl"
ITEMSIZE = 2  # bfloat16
HEAD_DIMS = (64, 128)
PASSES = ("forward", "backward")
MASKS = ("causal", "full")
STREAMED = {  # tensors of which a trip loads a tile
    "softmax": {"forward": 2, "queries": 2, "keys": 2},
    "GKA": {"forward": 1, "queries": 1, "keys": 2, "symmetric": 2},
}
SOFTMAX = {
    "forward": softmax_kernels.softmax_forward_kernel,
    "queries": softmax_kernels.softmax_queries_kernel,
    "keys": softmax_kernels.softmax_keys_kernel,
}
# Ours: causal with constant norms as in language models, full with general norms as in vision models.
CASES = {
    ("causal", "forward"): {"forward": "causal"},
    ("causal", "backward"): {"queries": "causal", "keys": "causal"},
    ("full", "forward"): {"forward": "full"},
    ("full", "backward"): {"symmetric": "full"},
    ("full", "backward in two"): {"queries": "full, general", "keys": "full, general"},
}


class Traffic(NamedTuple):
    """What a kernel reads and writes: (B, T, H, D) tensors and float32 numbers per row."""

    tensors_read: int
    tensors_written: int
    rows_read: int
    rows_written: int


# "rows": the kernel before the backward pass that computes g_i.y_i. General norms are numbers per row, too.
TRAFFIC = {
    ("softmax", "causal"): {
        "forward": Traffic(3, 1, 0, 1),  # q, k, v -> y, level
        "rows": Traffic(2, 0, 0, 1),  # dy, y -> delta
        "queries": Traffic(4, 1, 2, 0),  # q, k, v, dy, level, delta -> dq
        "keys": Traffic(4, 2, 2, 0),  # the same -> dk, dv
    },
    ("GKA", "causal"): {
        "forward": Traffic(1, 1, 0, 1),  # x -> y, level
        "rows": Traffic(2, 0, 0, 1),  # dy, y -> delta
        "queries": Traffic(2, 1, 2, 0),  # x, dy, level, delta -> dx
        "keys": Traffic(3, 1, 2, 0),  # x, dy, dx, level, delta -> dx
    },
    ("GKA", "full"): {
        "forward": Traffic(1, 1, 0, 2),  # x -> y, level, norm
        "rows": Traffic(2, 0, 2, 2),  # dy, y, level, norm -> delta, share
        "symmetric": Traffic(2, 1, 3, 0),  # x, dy, norm, share, delta -> dx
        "queries": Traffic(2, 1, 3, 0),  # x, dy, level, norm, delta -> dx
        "keys": Traffic(3, 1, 3, 0),  # x, dy, dx, level, norm, delta -> dx
    },
}
TRAFFIC["softmax", "full"] = TRAFFIC["softmax", "causal"]


class Kernel(NamedTuple):
    """One kernel of one pass, for one architecture."""

    capability: int
    head_dim: int
    attention: str
    mask: str
    phase: str
    name: str
    case: str

    @property
    def config(self) -> configs.Config:
        return configs.TABLES[f"sm_{self.capability}"].entries[self.name, self.head_dim, ITEMSIZE]

    def compile(self) -> Code:
        if self.attention == "GKA":
            build = kernel_resources.Build(self.capability, self.name, self.head_dim, ITEMSIZE, self.case, self.config)
            function, constants = kernel_resources.KERNELS[self.name], build.constants
        else:
            tiles = dict(BM=self.config.rows, BN=self.config.columns)
            function = SOFTMAX[self.name]
            constants = dict(D=self.head_dim, CAUSAL=self.mask == "causal", **tiles)
        return compile_kernel(function, constants, self.capability, ITEMSIZE, self.config.warps, self.config.stages)

    def bytes_per_row(self) -> dict[str, int]:
        """Bytes of device memory for each token and head that the kernel reads and writes, each tensor once."""
        traffic = TRAFFIC[self.attention, self.mask]
        kernels = [traffic[self.name]] + ([traffic["rows"]] if self.name in ("queries", "symmetric") else [])
        row = self.head_dim * ITEMSIZE
        return {
            "bytes_read": sum(k.tensors_read * row + k.rows_read * 4 for k in kernels),
            "bytes_written": sum(k.tensors_written * row + k.rows_written * 4 for k in kernels),
        }


def kernels_of(attention: str, mask: str, phase: str, capability: int, head_dim: int) -> list[Kernel]:
    """The kernels that make up one pass."""
    if attention == "GKA":
        symmetric = ("symmetric", head_dim, ITEMSIZE) in configs.TABLES[f"sm_{capability}"].entries
        two = (mask, phase) == ("full", "backward") and not symmetric
        cases = CASES[mask, f"{phase} in two" if two else phase]
    else:
        cases = {name: "" for name in SOFTMAX if (name == "forward") == (phase == "forward")}
    return [Kernel(capability, head_dim, attention, mask, phase, name, case) for name, case in cases.items()]


def per_pair(body: list[str], kernel: Kernel) -> dict[str, float]:
    """The counts of one loop for each pair of query and key. Raises ValueError if it does not load whole tiles.

    How many tiles a trip takes is known from what it copies; what it copies for each row besides is less than a tile.
    """
    config = kernel.config
    counts = count(body, config.warps)
    tensors = STREAMED[kernel.attention][kernel.name]
    trips = int(counts["global_bytes"] // (tensors * config.columns * kernel.head_dim * ITEMSIZE))
    if not trips:
        raise ValueError(f"{kernel}: the loop copies {counts['global_bytes']} bytes, less than its tiles")
    return {name: number / (trips * config.rows * config.columns) for name, number in counts.items()}


def measure(kernel: Kernel) -> dict:
    """Registers, spills, shared memory, the pass's bytes, and the counts of the loops over whole and masked tiles.

    The loop over whole tiles is the one with the fewest instructions; of the others, the one with the most is kept.
    """
    code = kernel.compile()
    bodies = sorted((per_pair(body, kernel) for body in loops(code.assembly)), key=lambda counts: counts["total"])
    resources = {"registers": code.registers, "stack": code.stack, "shared": code.shared}
    return {**resources, **kernel.bytes_per_row(), "whole": bodies[0], "masked": bodies[-1]}


def described(kernel: Kernel) -> dict:
    """A record's configuration."""
    settings = kernel._asdict() | kernel.config._asdict()
    return settings | {"triton": triton.__version__, "ptxas": assembler(kernel.capability)}


@dataclass
class InstructionConfig:
    """Count the instructions in the compiled loops of GKA and of plain flash attention; compiles, and times nothing."""

    results: Path = FILE
    """File of the JSON lines: one for each kernel."""
    architectures: Annotated[tuple[int, ...], tyro.conf.arg(metavar="{80,90,120}")] = (80, 90, 120)
    """Compute capabilities to compile for."""
    processes: Count = field(default_factory=cores)
    """How many compile at once."""


def main(config: InstructionConfig) -> None:
    kernels = [
        kernel
        for capability in config.architectures
        for head_dim in HEAD_DIMS
        for phase in PASSES
        for mask in MASKS
        for attention in ("softmax", "GKA")
        for kernel in kernels_of(attention, mask, phase, capability, head_dim)
    ]
    config.results.unlink(missing_ok=True)
    shown = ("products", "mufu", "multiply_add", "compare", "convert", "shared", "total")
    for kernel, metrics in in_processes(measure, kernels, config.processes):
        append_result(config.results, "instruction_counts", described(kernel), metrics, torch.device("cpu"))
        counts = Counter(metrics["whole"])
        numbers = "  ".join(f"{name} {counts[name]:.2f}" for name in shown)
        tiles = "{}x{} warps {} stages {}".format(*kernel.config)
        words = (
            f"sm_{kernel.capability:<4} d{kernel.head_dim:<4} {kernel.attention:<8} {kernel.mask:<7} {kernel.name:<10}"
        )
        print(f"{words} {tiles:<24} registers {metrics['registers']} stack {metrics['stack']}  {numbers}", flush=True)


if __name__ == "__main__":
    run(main, InstructionConfig)
