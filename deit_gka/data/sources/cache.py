"""Lists of images, cached between starts in `$GKA_CACHE_DIR`, else `$XDG_CACHE_HOME/gka`, else `~/.cache/gka`.

A list is stored with the stamps of every place that it was read from: class folders and folders below them, or tars. A
stamp is inode, size, and the times of the last change and of the last change of status, which nobody can set back. A
folder's stamp changes when a name in it comes, goes or changes; a tar's when anything is written to it. A place that
changed just before it was read may change again within the same tick of its clock: such a list is not cached.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from deit_gka.data.sources.base import Names
from gka.impl.cpu.build import cache_folder
from trainkit_gka.checkpoint import write_tensors
from trainkit_gka.files import atomic

SWITCH = "GKA_KEEP_LISTS"  # 0: neither read nor write them
FORMAT = "4"
WORTH_KEEPING = 1.0  # seconds that reading a list takes; shorter ones are read every time
SETTLED = 2.0  # seconds since the last change: file systems count time in steps of up to two seconds
PLACES, STAMPS = ("places.text", "places.ends"), "places.stamps"
Tensors = dict[str, torch.Tensor]
Note = Callable[[str], None]


def cached(key: Iterable[str], read: Callable[[Note], Tensors]) -> Tensors:
    """The tensors of `read`, from the cache if every place that an earlier call read is unchanged.

    key: identifies the list. read: calls its argument with the path of every place before it reads that place. Where
    there is no cache folder, or none that can be written, nothing is cached.
    """
    try:
        folder = None if os.environ.get(SWITCH) == "0" else cache_folder()
    except RuntimeError:  # neither $HOME nor an account
        folder = None
    if folder is None:
        return read(lambda place: None)
    digest = hashlib.sha256("\0".join([FORMAT, *key]).encode(errors="surrogateescape")).hexdigest()
    path = folder / "lists" / f"{digest}.safetensors"
    with contextlib.suppress(OSError, SafetensorError, KeyError):  # absent, damaged, or a place is gone
        tensors = load(path.read_bytes())  # load_file opens it twice; another process may replace it in between
        places = Names(tensors=[tensors.pop(name) for name in PLACES])
        if torch.equal(torch.tensor([stamp(place) for place in places]), tensors.pop(STAMPS)):
            return tensors
    stamps: dict[str, tuple[int, ...]] = {}
    clock, started = time.time(), time.perf_counter()
    tensors = read(lambda place: stamps.update({place: stamp(place)}))
    latest = max((moment for one in stamps.values() for moment in one[2:]), default=0)
    if latest < (clock - SETTLED) * 1e9 and time.perf_counter() - started >= WORTH_KEEPING:
        places = dict(zip(PLACES, Names(stamps).tensors))
        with contextlib.suppress(OSError, SafetensorError):
            folder.mkdir(0o700, parents=True, exist_ok=True)  # the CPU kernel uses none to which others write
            with atomic(path) as temporary:
                write_tensors({**tensors, **places, STAMPS: torch.tensor(list(stamps.values()))}, temporary)
    return tensors


def stamp(place: str) -> tuple[int, ...]:
    """Changes when a place does; links are followed. Raises OSError if it is gone."""
    status = os.stat(place)
    return status.st_ino & (2**63 - 1), status.st_size, status.st_mtime_ns, status.st_ctime_ns
