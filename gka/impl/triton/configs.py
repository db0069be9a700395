"""Tile sizes of the Triton kernels per GPU generation: a small shipped table, read at every launch, never searched at
run time.

README.md says how the entries were chosen; tests/golden/kernel_resources.txt lists what each costs in registers and
shared memory.
"""

import contextlib
import functools
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """Rows that a program owns, rows (columns of W) per tile that it streams, warps, pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


class Table(NamedTuple):
    """One GPU generation.

    entries: by kernel, BLOCK_D and bytes per element. paths: of each optional path (PATHS), which versions of Triton
    take it where it can serve, by their beginnings; "" is every version.
    """

    entries: dict[tuple[str, int, int], Config]
    paths: dict[str, tuple[str, ...]]

    def takes(self, path: str) -> bool:
        """Whether this path is chosen with the installed version of Triton."""
        import triton  # whoever asks has it

        return triton.__version__.startswith(self.paths.get(path, ()))

    def find(self, kernel: str, x: torch.Tensor, block_d: int) -> Config | None:
        """The entry for this kernel and these features, if there is one."""
        return self.entries.get((kernel, max(32, block_d), x.element_size()))

    def pick(self, kernel: str, x: torch.Tensor, block_d: int) -> Config:
        """The entry for a kernel that every table has."""
        return self.entries[kernel, max(32, block_d), x.element_size()]


def _table(half: dict[str, tuple], single: dict[str, tuple], **paths: tuple[str, ...]) -> Table:
    """From one Config per BLOCK_D of 32, 64 and 128 for each kernel; `half` for 2 bytes per element, `single` for 4."""
    entries: dict[tuple[str, int, int], Config] = {}
    for size, kernels in ((2, half), (4, single)):
        for kernel, configs in kernels.items():
            entries |= {
                (kernel, block_d, size): Config(*c) for block_d, c in zip(BLOCKS, configs, strict=True) if c is not None
            }
    return Table(entries, paths)


# forward and decode: forward.py; symmetric, queries, keys: backward.py; triangular: triangular.py. None: queries and
# keys do symmetric's work, and symmetric does triangular's.
BLOCKS = (32, 64, 128)
# What a request takes in place of the usual kernels: triangular.py; short.py; cudnn.py.
PATHS = ("triangular", "short", "cudnn")
DECODE = ((16, 128, 4, 3), (16, 128, 4, 3), (16, 128, 4, 3))
DECODE_SINGLE = ((16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 2))
TABLES = {
    "sm_80": _table(  # A100
        half=dict(
            forward=((128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3)),
            decode=DECODE,
            symmetric=((64, 32, 4, 3), (64, 32, 4, 3), None),
            queries=((64, 64, 4, 2), (128, 32, 8, 2), (64, 64, 8, 2)),
            keys=((64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        ),
        single=dict(
            forward=((64, 32, 8, 2), (64, 16, 8, 2), (16, 32, 8, 2)),
            decode=DECODE_SINGLE,
            symmetric=((64, 16, 4, 2), None, None),
            queries=((64, 16, 8, 2), (32, 32, 8, 2), (16, 16, 8, 1)),
            keys=((64, 16, 4, 2), (32, 32, 8, 2), (16, 32, 8, 2)),
        ),
    ),
    # H100, H200. Tiles of 64 rows or more have 16 for each warp: with 8, on an H200, a float32 kernel wrote outside its
    # memory, and bfloat16 took twice the time.
    "sm_90": _table(
        half=dict(
            forward=((128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2)),
            decode=DECODE,
            symmetric=((64, 32, 4, 3), (64, 32, 4, 3), (128, 32, 8, 2)),
            triangular=(None, (64, 64, 4, 2), None),
            queries=((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3)),
            keys=((64, 64, 4, 2), (128, 32, 8, 2), (128, 64, 8, 3)),
        ),
        single=dict(
            forward=((64, 32, 4, 2), (64, 32, 4, 2), (16, 32, 8, 2)),
            decode=DECODE_SINGLE,
            symmetric=((64, 16, 4, 2), None, None),
            queries=((64, 32, 4, 2), (32, 32, 8, 2), (16, 16, 8, 1)),
            keys=((64, 32, 4, 2), (32, 32, 8, 2), (16, 32, 8, 2)),
        ),
        # A prototype of triangular was faster on an H200, and one of short with Triton 3.6. None of the three has run
        # there as it is here.
        triangular=(),
        short=(),
        cudnn=(),
    ),
    "sm_120": _table(  # RTX 50; also RTX 30 and 40, whose blocks have as little shared memory
        half=dict(
            forward=((64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3)),
            decode=DECODE,
            symmetric=((64, 32, 4, 2), (64, 32, 4, 3), None),
            queries=((64, 64, 4, 2), (128, 32, 8, 2), (64, 64, 8, 2)),
            keys=((64, 32, 4, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        ),
        single=dict(
            forward=((64, 32, 4, 2), (32, 32, 4, 2), (16, 32, 8, 2)),
            decode=DECODE_SINGLE,
            symmetric=(None, None, None),
            queries=((64, 16, 8, 2), (32, 32, 8, 2), (16, 16, 4, 1)),
            keys=((64, 16, 8, 2), (32, 32, 8, 2), (16, 32, 8, 2)),
        ),
    ),
}


def table_of(device: torch.device) -> Table:
    """The table of a device's generation, with the overrides of the moment."""
    return TABLES[generation(device)]


@functools.cache
def generation(device: torch.device) -> str:
    """The table for a device: its own generation's, or the nearest with as little shared memory.

    The interpreter uses Hopper's.
    """
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(
            f"the Triton kernels need compute capability 8.0 or newer, {device} has {major}.{minor}; use impl='sdpa'"
        )
    if major in (9, 10):
        return "sm_90"
    return "sm_80" if (major, minor) == (8, 0) else "sm_120"


@contextlib.contextmanager
def override(
    name: str,
    entries: dict[tuple[str, int, int], Config] | None = None,
    paths: dict[str, tuple[str, ...]] | None = None,
):
    """Within the context, the table `name` with these entries and paths replaced."""
    before = TABLES[name]
    TABLES[name] = Table({**before.entries, **(entries or {})}, {**before.paths, **(paths or {})})
    try:
        yield
    finally:
        TABLES[name] = before
