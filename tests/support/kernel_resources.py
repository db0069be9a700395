"""Compile the Triton kernels for GPUs that this machine need not have, and list what each shipped configuration needs.

    python tests/support/kernel_resources.py           prints the table of tests/golden/kernel_resources.txt
    python tests/support/kernel_resources.py --write   rewrites that file
    python tests/support/kernel_resources.py 8         prints eight of its lines

Per configuration, in its kernel's heaviest case: registers per thread, bytes of spilled registers (STACK), shared
memory, tensor-core instructions (HGMMA on Hopper, HMMA), asynchronous copies (LDGSTS). The last lines are of the same
cases with packed documents. Ends with 1 if one breaks a limit: more shared memory than the device has, no tensor cores,
no asynchronous copies (LDGSTS or, by a descriptor, UTMALDG). Needs the triton package and no GPU.
"""

import collections
import hashlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from gka.bandwidth import LOG_SIGMA_BOUND
from gka.impl.triton import backward, configs, forward, short, triangular
from gka.impl.triton.tiles import NORM_COMPUTED, NORM_CONSTANT

VERSION = f"# Triton {triton.__version__},"
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "kernel_resources.txt"
# What is compiled, and what chooses it.
SOURCES = (
    "gka/bandwidth.py",
    *(f"gka/impl/triton/{name}.py" for name in ("backward", "configs", "forward", "short", "tiles", "triangular")),
    "tests/support/kernel_resources.py",
)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_LIMIT = {80: 166912, 90: 232448, 120: 101376}  # bytes a block may use
# The builds that are listed with packed documents too.
PACKED = {(90, "forward", 128, 2), (90, "symmetric", 128, 2), (90, "queries", 128, 2), (90, "keys", 128, 2)}
# Pointers to features; the others are to float32.
FEATURES = ("p_x", "p_k", "p_v", "p_y", "p_dy", "p_dx", "p_dk", "p_dv")

# Each kernel with its heaviest case: its name and its constants.
VALUES_IN_WINDOW = dict(OWN_KEYS=True, OWN_VALUES=False, HAS_BEFORE=True, HAS_AFTER=True)
SPLIT = dict(SPLIT=True, OWN_KEYS=False, OWN_VALUES=True, HAS_BEFORE=False, HAS_AFTER=False)
NOT_SPLIT = dict(NORM=NORM_CONSTANT.value, SPLIT=False, **VALUES_IN_WINDOW)
KERNELS = {
    "forward": (forward.gka_forward_kernel, "window, values", NOT_SPLIT),
    "decode": (forward.gka_forward_kernel, "general, split", dict(NORM=NORM_COMPUTED.value, **SPLIT)),
    "symmetric": (backward.gka_symmetric_kernel, "window", dict(CONSTANT=False, HAS_REACH=True)),
    "triangular": (triangular.gka_triangular_kernel, "last tile cut", dict(MASKED=True)),
    "short": (short.gka_short_kernel, "Gluon", {}),
    "queries": (backward.gka_queries_kernel, "window, values", dict(CONSTANT=True, **VALUES_IN_WINDOW)),
    "keys": (backward.gka_keys_kernel, "window, values", dict(CONSTANT=True, **VALUES_IN_WINDOW)),
}


class Build(NamedTuple):
    """One kernel for one architecture."""

    capability: int
    kernel: str
    head_dim: int
    size: int  # bytes per element
    config: configs.Config
    packed: bool = False  # whether documents are packed into a sequence

    @property
    def constants(self) -> dict:
        shape = dict(D=self.head_dim, BLOCK_D=self.head_dim, BOUND=LOG_SIGMA_BOUND, p_lengths=None)
        shape |= {} if self.packed else dict(p_starts=None)
        shape |= dict(BM=self.config.rows, BN=self.config.columns, **KERNELS[self.kernel][2])
        if self.kernel in ("forward", "decode", "symmetric"):
            shape["TAIL"] = self.config.columns
        return {name: value for name, value in shape.items() if name in KERNELS[self.kernel][0].arg_names}

    def __str__(self) -> str:
        dtype, case = {2: "bf16", 4: "fp32"}[self.size], "packed" if self.packed else KERNELS[self.kernel][1]
        tiles = "{}x{} warps {} stages {}".format(*self.config)
        return f"sm_{self.capability:<4} {self.kernel:<10} d{self.head_dim:<4} {dtype}  {case:<20} {tiles:<24}"


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
        limit = SHARED_LIMIT[build.capability]
        pipelined = half and build.config.stages > 1
        checks = {
            f"needs {self.shared} bytes of shared memory, the device has {limit}": self.shared > limit,
            f"has no {name}: no tensor cores": not cores,
            "has no LDGSTS: copies are not asynchronous": pipelined
            and not any(map(self.instructions.get, ("LDGSTS", "UTMALDG"))),
        }
        return [text for text, broken in checks.items() if broken]


def shipped() -> list[Build]:
    """Every entry of the configuration tables, and the kernel that has tiles of its own."""
    tables = ((int(name.removeprefix("sm_")), table) for name, table in configs.TABLES.items())
    builds = [Build(number, *key, config) for number, table in tables for key, config in table.entries.items()]
    builds += [build._replace(packed=True) for build in builds if build[:4] in PACKED]
    return [*builds, Build(90, "short", short.HEAD_DIM, 2, configs.Config(64, short.LAST_TOKENS, 4, 2))]


def compile_one(build: Build) -> Resources:
    """Compile for the architecture, without a device, and read what the assembler says."""
    function, constants = KERNELS[build.kernel][0], build.constants
    names = function.arg_names
    features = {2: "*bf16", 4: "*fp32"}[build.size]
    types = {name: features if name in FEATURES else "*fp32" if name[:2] == "p_" else "i32" for name in names}
    types |= {name: "*i32" for name in names if name == "p_starts"}
    types |= {"eps": "fp32"} if "eps" in names else {}
    tile = f"[{build.config.columns},{build.head_dim}]>"
    types |= {name: f"tensordesc<{features[1:]}{tile}" for name in ("x_rows", "dy_rows") if name in names}
    if build.kernel == "short":
        types |= {
            name: f"tensordesc<bf16[{rows},{build.head_dim}],{short.TILES!r}>"
            for name, rows in (("x_rows", 64), ("x_tail", 16))
        }
    types |= {"x_sum": f"tensordesc<fp32{tile}"} if "x_sum" in names else {}
    types |= dict.fromkeys(constants, "constexpr")
    # At run time the JIT finds pointers and strides divisible by 16; without that no copy is asynchronous.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and re.match(r"p_|s.*_[bth]$", name)
    }
    compile_source = GluonASTSource if build.kernel == "short" else ASTSource
    source = compile_source(
        function, types, {(names.index(name),): value for name, value in constants.items()}, aligned
    )
    options = dict(num_warps=build.config.warps, num_stages=build.config.stages)
    compiled = triton.compile(source, target=GPUTarget("cuda", build.capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, assembly = (
            subprocess.run([TOOLS / tool, *flags, file.name], stdout=PIPE, stderr=STDOUT, text=True, check=True).stdout
            for tool, *flags in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c", "-ndf"))
        )
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    counts = collections.Counter(re.findall(r"\b(HGMMA|HMMA|LDGSTS|UTMALDG)\b", assembly))
    return Resources(registers, stack, compiled.metadata.shared, dict(counts))


def header() -> str:
    """The first line of the list: the version of Triton, and a hash of kernels, configurations and cases."""
    text = "\n".join((ROOT / name).read_text() for name in SOURCES)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{VERSION} sources {digest}. Written by `python tests/support/kernel_resources.py --write`."


def main(argument: str = "") -> None:
    """argument: "--write", how many configurations to compile, spread over the list, or nothing."""
    builds, cores = shipped(), len(os.sched_getaffinity(0))
    if argument.isdecimal():
        number = min(int(argument), len(builds))
        builds, cores = [builds[place * len(builds) // number] for place in range(number)], 1
    elif argument not in ("", "--write"):
        sys.exit(f"error: --write or a number, not {argument}")
    lines, broken = [header()], []
    print(lines[0], flush=True)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(cores, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:  # Ctrl-C is for this process
        for build, resources in zip(builds, pool.imap(compile_one, builds), strict=True):
            lines.append(f"{build} {resources}")
            print(lines[-1], flush=True)
            broken += [f"{' '.join(str(build).split())}: {reason}" for reason in resources.broken(build)]
    if broken:
        sys.exit("\n".join(broken))
    if argument == "--write":
        GOLDEN.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
