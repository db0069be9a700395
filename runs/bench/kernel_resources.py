"""Compile the Triton kernels for GPUs that this machine need not have, and list what each shipped configuration needs.

    python -m runs.bench.kernel_resources            prints the table of tests/golden/kernel_resources.txt
    python -m runs.bench.kernel_resources --write    rewrites that file
    python -m runs.bench.kernel_resources --every    every case of every configuration, not only the heaviest (minutes)
    python -m runs.bench.kernel_resources --sample 8    eight of the lines

Per configuration: registers per thread, bytes of spilled registers (STACK), shared memory, tensor-core instructions
(HGMMA on Hopper, HMMA), asynchronous copies (LDGSTS). Ends with 1 if one breaks a limit: spills, more shared memory
than the device has, no tensor cores, no asynchronous copies. Needs the triton package and no GPU.
"""

import collections
import hashlib
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import triton

from gka.bandwidth import LOG_SIGMA_BOUND
from gka.impl.triton import backward as triton_backward
from gka.impl.triton import configs as triton_configs
from gka.impl.triton import forward as triton_forward
from gka.impl.triton import head as triton_head
from gka.impl.triton.tiles import NORM_COMPUTED, NORM_CONSTANT, NORM_LOADED
from runs.bench.machine_code import compile_kernel, in_processes
from trainkit_gka.cli import Count, CountOrAll, UserError, run
from trainkit_gka.workers import cores

VERSION = f"# Triton {triton.__version__},"
GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "kernel_resources.txt"
SHARED_LIMIT = {80: 166912, 90: 232448, 120: 101376}  # bytes a block may use
# Bytes per thread. float32 with head_dim 128 does not fit otherwise; other versions of Triton than the table was made
# for may need a little.
KNOWN_SPILLS = {(120, "queries", 128, 4): 16}
SPILLS_OF_OTHER_VERSIONS = 64

KERNELS = {
    "forward": triton_forward.gka_forward_kernel,
    "decode": triton_forward.gka_forward_kernel,
    "symmetric": triton_backward.gka_symmetric_kernel,
    "queries": triton_backward.gka_queries_kernel,
    "keys": triton_backward.gka_keys_kernel,
    "head": triton_head.gka_head_forward_kernel,
}
FULL = dict(HAS_BEFORE=False, HAS_AFTER=False)
CAUSAL = dict(HAS_BEFORE=False, HAS_AFTER=True)
WINDOW = dict(HAS_BEFORE=True, HAS_AFTER=True)
OWN = dict(OWN_KEYS=True, OWN_VALUES=True)
VALUES = dict(OWN_KEYS=True, OWN_VALUES=False)
FOREIGN = dict(OWN_KEYS=False, OWN_VALUES=True)
# The first case of each kernel is the heaviest.
CASES = {
    "forward": {
        "window, values": dict(NORM=NORM_CONSTANT.value, **VALUES, **WINDOW),
        "full": dict(NORM=NORM_COMPUTED.value, **OWN, **FULL),
        "full, norms loaded": dict(NORM=NORM_LOADED.value, **OWN, **FULL),
        "causal": dict(NORM=NORM_CONSTANT.value, **OWN, **CAUSAL),
        "causal, values": dict(NORM=NORM_CONSTANT.value, **VALUES, **CAUSAL),
        "causal, general": dict(NORM=NORM_COMPUTED.value, **OWN, **CAUSAL),
        "window, foreign": dict(NORM=NORM_CONSTANT.value, OWN_KEYS=False, OWN_VALUES=False, **WINDOW),
    },
    "decode": {
        "general, split": dict(NORM=NORM_COMPUTED.value, **FOREIGN, **FULL),
        "split": dict(NORM=NORM_CONSTANT.value, **FOREIGN, **FULL),
    },
    "symmetric": {
        "window": dict(CONSTANT=False, HAS_REACH=True),
        "full": dict(CONSTANT=False, HAS_REACH=False),
        "full, constant": dict(CONSTANT=True, HAS_REACH=False),
    },
    "queries": {
        "window, values": dict(CONSTANT=True, OWN_VALUES=False, **WINDOW),
        "causal, values": dict(CONSTANT=True, OWN_VALUES=False, **CAUSAL),
        "causal": dict(CONSTANT=True, OWN_VALUES=True, **CAUSAL),
        "causal, general": dict(CONSTANT=False, OWN_VALUES=True, **CAUSAL),
        "full, general": dict(CONSTANT=False, OWN_VALUES=True, **FULL),
    },
    "keys": {
        "window, values": dict(CONSTANT=True, **VALUES, **WINDOW),
        "causal, values": dict(CONSTANT=True, **VALUES, **CAUSAL),
        "causal": dict(CONSTANT=True, **OWN, **CAUSAL),
        "causal, general": dict(CONSTANT=False, **OWN, **CAUSAL),
        "full, general": dict(CONSTANT=False, **OWN, **FULL),
        "window, foreign": dict(CONSTANT=True, OWN_KEYS=False, OWN_VALUES=False, **WINDOW),
    },
    "head": {
        "197 tokens": dict(FULL=3, TAIL=16),
        "192 tokens": dict(FULL=3, TAIL=0),
        "180 tokens": dict(FULL=2, TAIL=64),
    },
}


class Build(NamedTuple):
    """One kernel for one architecture."""

    capability: int
    kernel: str
    head_dim: int
    size: int  # bytes per element
    case: str
    config: triton_configs.Config

    @property
    def constants(self) -> dict:
        shape = dict(D=self.head_dim, BLOCK_D=self.head_dim, BOUND=LOG_SIGMA_BOUND, **CASES[self.kernel][self.case])
        if self.kernel != "head":
            shape |= dict(BM=self.config.rows, BN=self.config.columns)
        if self.kernel in ("forward", "decode"):
            shape["SPLIT"] = self.kernel == "decode"
        if self.kernel in ("forward", "decode", "symmetric"):
            shape["TAIL"] = self.config.columns
        return shape

    def __str__(self) -> str:
        dtype = {2: "bf16", 4: "fp32"}[self.size]
        tiles = "{}x{} warps {} stages {}".format(*self.config)
        return f"sm_{self.capability:<4} {self.kernel:<10} d{self.head_dim:<4} {dtype}  {self.case:<20} {tiles:<24}"


class Resources(NamedTuple):
    registers: int
    stack: int
    shared: int
    instructions: dict[str, int]

    def __str__(self) -> str:
        counts = "  ".join(f"{name} {self.instructions.get(name, 0):>3}" for name in ("HGMMA", "HMMA", "LDGSTS"))
        return f"registers {self.registers:>3}  stack {self.stack:>4}  shared {self.shared:>6}  {counts}"

    def broken(self, build: Build) -> list[str]:
        """The limits this build breaks."""
        half = build.size == 2
        name = "HGMMA" if build.capability == 90 and half and build.kernel != "decode" else "HMMA"
        cores = self.instructions.get(name) or (not half and self.instructions.get("HGMMA"))
        spills = KNOWN_SPILLS.get(build[:4], 0) if GOLDEN.read_text().startswith(VERSION) else SPILLS_OF_OTHER_VERSIONS
        limit = SHARED_LIMIT[build.capability]
        pipelined = half and build.kernel != "head" and build.config.stages > 1
        checks = {
            f"spills {self.stack} bytes per thread": self.stack > spills,
            f"needs {self.shared} bytes of shared memory, the device has {limit}": self.shared > limit,
            f"has no {name}: no tensor cores": not cores,
            "has no LDGSTS: copies are not asynchronous": pipelined and not self.instructions.get("LDGSTS"),
        }
        return [text for text, broken in checks.items() if broken]


def shipped(every: bool = False) -> list[Build]:
    """Every entry of the configuration tables, in its heaviest case or, with `every`, in all cases."""
    builds = []
    for name, table in triton_configs.TABLES.items():
        capability = int(name.removeprefix("sm_"))
        for (kernel, head_dim, size), config in table.entries.items():
            builds += [Build(capability, kernel, head_dim, size, case, config) for case in cases_of(kernel, every)]
        if table.head:
            cases = cases_of("head", every)
            builds += [Build(capability, "head", d, 2, case, triton_configs.HEAD) for d in (32, 64) for case in cases]
    return builds


def cases_of(kernel: str, every: bool) -> list[str]:
    """The kernel's heaviest case or, with `every`, all its cases."""
    cases = list(CASES[kernel])
    return cases if every else cases[:1]


def compile_one(build: Build) -> Resources:
    """Compile for the architecture, without a device, and read what the assembler says."""
    config = build.config
    code = compile_kernel(
        KERNELS[build.kernel], build.constants, build.capability, build.size, config.warps, config.stages
    )
    counts = collections.Counter(re.findall(r"\b(HGMMA|HMMA|LDGSTS)\b", code.assembly))
    return Resources(code.registers, code.stack, code.shared, dict(counts))


def header() -> str:
    """The first line of the list: the version of Triton, and a hash of kernels, configurations and cases."""
    return f"{VERSION} sources {sources()}. Written by `python -m runs.bench.kernel_resources --write`."


def sources() -> str:
    """A hash of the files that are compiled and of those that choose what is."""
    root = Path(__file__).resolve().parents[2]
    paths = [*sorted(root.glob("gka/impl/triton/*.py")), root / "gka/bandwidth.py"]
    paths += [root / f"runs/bench/{name}.py" for name in ("kernel_resources", "machine_code")]
    return hashlib.sha256("\n".join(path.read_text() for path in paths).encode()).hexdigest()[:16]


@dataclass
class ResourcesConfig:
    """List the registers, spills, shared memory and important instructions of each shipped Triton configuration.

    It compiles them for GPUs that this machine need not have, and exits with 1 if a configuration breaks a limit.
    """

    write: bool = False
    """Rewrite tests/golden/kernel_resources.txt, if no configuration breaks a limit."""
    every: bool = False
    """Compile every case of every configuration."""
    sample: CountOrAll = -1
    """Compile only so many configurations, spread over the list."""
    processes: Count = field(default_factory=cores)
    """How many compile at once."""


def main(config: ResourcesConfig) -> None:
    if config.write and config.sample > 0:
        raise UserError("--write needs all configurations; leave out --sample")
    builds = shipped(config.every)
    if config.sample > 0:
        number = min(config.sample, len(builds))
        builds = [builds[place * len(builds) // number] for place in range(number)]
    lines, broken = [header()], []
    print(lines[0], flush=True)
    for build, resources in in_processes(compile_one, builds, config.processes):
        lines.append(f"{build} {resources}")
        print(lines[-1], flush=True)
        broken += [f"{' '.join(str(build).split())}: {reason}" for reason in resources.broken(build)]
    if broken:
        print(*broken, sep="\n", file=sys.stderr)
        sys.exit(1)
    if config.write:
        GOLDEN.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    run(main, ResourcesConfig)
