"""Triton kernels compiled for GPUs that this machine need not have: what the assembler says, and the loops of the
machine code, counted.
"""

import concurrent.futures
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from trainkit_gka.workers import begin, context

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Pointers in the features' dtype; the others are float32.
HALF = ("p_x", "p_q", "p_k", "p_v", "p_y", "p_dy", "p_dx", "p_dq", "p_dk", "p_dv")
FLOATS = ("eps", "scale")
WARP = 32
# The classes of a loop's instructions, by the beginning of the name; what fits none is "other": addresses, control.
CLASSES = {
    "matrix": ("HMMA", "HGMMA"),
    "mufu": ("MUFU",),
    "multiply_add": ("FFMA", "FMUL", "FADD"),
    "compare": ("FMNMX", "FSEL", "FSETP"),
    "convert": ("F2F", "I2F", "F2I"),
    "shared": ("LDS", "STS"),
    "shuffle": ("SHFL",),
    "global": ("LDG", "STG", "UTMALDG"),
}


class Code(NamedTuple):
    """What one kernel became."""

    registers: int  # per thread
    stack: int  # bytes of spilled registers per thread
    shared: int  # bytes of shared memory
    assembly: str


def compile_kernel(function, constants: dict, capability: int, itemsize: int, warps: int, stages: int) -> Code:
    """Compile for the architecture, without a device; features have `itemsize` bytes."""
    names = function.arg_names
    features = {2: "*bf16", 4: "*fp32"}[itemsize]

    def type_of(name: str) -> str:
        if name.startswith("p_"):
            return features if name in HALF else "*fp32"
        return "fp32" if name in FLOATS else "i32"

    signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
    # At run time the JIT finds pointers and strides divisible by 16; without that no copy is asynchronous.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and re.match(r"p_|s.*_[bth]$", name)
    }
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=aligned)
    options = dict(num_warps=warps, num_stages=stages)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=options)
    usage, assembly = (said_by(tool, compiled) for tool in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c", "-ndf")))
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    return Code(int(match[1]), int(match[2]), compiled.metadata.shared, assembly)


def said_by(tool: tuple[str, ...], compiled) -> str:
    """What a tool says of a kernel's machine code. Triton's cache keeps it beside the kernel, as long as that is the
    same.
    """
    cache, name = get_cache_manager(compiled.hash), f"{tool[0]}.txt"
    if not (path := cache.get_file(name)):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            done = subprocess.run([TOOLS / tool[0], *tool[1:], file.name], capture_output=True, text=True, check=True)
        path = cache.put(done.stdout + done.stderr, name)
    return Path(path).read_text()


def in_processes(function: Callable, items: list, processes: int) -> Iterator[tuple[Any, Any]]:
    """(item, function(item)) of every item, in order; from worker processes if there is more than one."""
    if processes == 1:
        yield from ((item, function(item)) for item in items)
        return
    with concurrent.futures.ProcessPoolExecutor(processes, context("triton"), begin) as pool:
        yield from zip(items, pool.map(function, items), strict=True)


def assembler(capability: int) -> str:
    """The version of the assembler (ptxas) that Triton takes for the architecture."""
    return get_ptxas(capability).version


def loops(assembly: str) -> list[list[str]]:
    """The instructions of every innermost loop that has matrix products, in the order of the code.

    A loop is what lies between a label and the last branch back to it. Instructions that never run (predicate !PT) are
    left out.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    ends: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+)?\s*([A-Z]\S*)(.*)", line):
            predicate, name, operands = found.groups()
            target = re.search(r"`\((\.L\w+)\)", operands)
            if name.startswith("BRA") and target and target[1] in labels:
                ends[target[1]] = len(instructions)
            if predicate != "@!PT":
                instructions.append(name.rstrip(";"))
    spans = [(labels[label], end + 1) for label, end in ends.items()]
    bodies = []
    for start, end in sorted(spans):
        inner = any(start <= other and last <= end and (other, last) != (start, end) for other, last in spans)
        body = instructions[start:end]
        if not inner and any(name.startswith(CLASSES["matrix"]) for name in body):
            bodies.append(body)
    return bodies


def count(body: list[str], warps: int) -> Counter[str]:
    """What all threads of a program do in one trip: by class, total, the products, and bytes to and from memory.

    Instructions count once per thread, those of a matrix product too. A copy that only some threads make counts as if
    all made it.
    """
    threads, counts = warps * WARP, Counter()
    for name in body:
        kind = next((kind for kind, starts in CLASSES.items() if name.startswith(starts)), "other")
        counts[kind] += threads
        counts["total"] += threads
        if kind == "matrix":
            counts["products"] += products(name, warps)
        elif kind in ("shared", "global"):
            counts[f"{kind}_bytes"] += threads * width(name)
    return counts


def products(name: str, warps: int) -> int:
    """Multiply-adds of one matrix instruction, over all warps of the program."""
    if group := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\.", name):  # four warps together
        rows, columns, depth = map(int, group.groups())
        return rows * columns * depth * (warps // 4)
    rows, columns, depth = {"16816": (16, 8, 16), "1688": (16, 8, 8)}[name.split(".")[1]]
    return rows * columns * depth * warps


def width(name: str) -> int:
    """Bytes that a thread moves with one load or store."""
    if name.startswith("LDSM"):  # 8 x 8 matrices of two bytes, four bytes for each thread
        return 4 * int(name.rsplit(".", 1)[1]) if name[-1].isdigit() else 4
    bits = re.search(r"\.(?:[US])?(8|16|32|64|128)(?:\.|$)", name)
    return int(bits[1]) // 8 if bits else 4
