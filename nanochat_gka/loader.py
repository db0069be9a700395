"""Packed rows -> batches by global row number: the same rows whatever the number of ranks, O(1) to resume.

A step is rows [step * B, (step + 1) * B) of an endless stream that walks the split in a seeded permutation, a new one every epoch.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from gka.runtime.cli import UserError
from gka.runtime.files import read_json, sha256
from nanochat_gka.corpus import SPLITS
from nanochat_gka.pack import FORMAT, MANIFEST, shard_path, wrong_size
from nanochat_gka.tokenizer import Tokenizer

Batch = tuple[torch.Tensor, torch.Tensor]  # ids and targets, both (rows, T) int64


class PackedData:
    """An opened folder of packed rows. Raises UserError if it is absent, from another format, truncated or corrupt."""

    def __init__(self, folder: Path, verify: bool = True):
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).exists():
            raise UserError(f"no packed data in {self.folder} (no {MANIFEST}); run make tokenize, or python -m nanochat_gka.pack --out {self.folder}")
        advice = f"delete {self.folder / MANIFEST} and pack again (make tokenize), which keeps what is intact"
        try:
            self.manifest = read_json(self.folder / MANIFEST, "manifest")
        except UserError as error:
            raise UserError(f"{error}; {advice}") from None
        if self.manifest.get("format") != FORMAT:
            raise UserError(f"{self.folder} has format {self.manifest.get('format')}, this version reads {FORMAT}; delete the folder and pack again")
        self.sequence_len: int = self.manifest["sequence_len"]
        damage = self._damage(verify)
        if damage:
            raise UserError(f"{damage}; {advice}")
        self._rows = {split: self._open(split) for split in SPLITS}

    def _damage(self, verify: bool) -> str | None:
        try:
            self.tokenizer = Tokenizer.load(self.folder)
        except UserError as error:
            return str(error)
        if self.tokenizer.sha256 != self.manifest["tokenizer_sha256"]:
            return f"{self.folder} was packed with another tokenizer than the one in it"
        damage, shards = wrong_size(self.folder, self.manifest), self.manifest["shards"]
        if damage is None and verify:
            with ThreadPoolExecutor() as pool:
                for shard, digest in zip(shards, pool.map(lambda shard: sha256(shard_path(self.folder, shard)), shards)):
                    if digest != shard["sha256"]:
                        return f"shard {shard_path(self.folder, shard)} is corrupt (wrong checksum)"
        return damage

    def _open(self, split: str) -> "Rows":
        shards = [shard for shard in self.manifest["shards"] if shard["split"] == split and shard["rows"]]
        return Rows([(shard_path(self.folder, shard), shard["rows"]) for shard in shards], self.sequence_len)

    def split(self, name: str) -> "Rows":
        """Rows of "train" or "val"."""
        return self._rows[name]


class Rows:
    """Random access to the rows of a split. No file stays open: a large corpus has more shards than a process may hold."""

    def __init__(self, shards: list[tuple[Path, int]], sequence_len: int):
        self.paths = [path for path, _ in shards]
        self.ends = np.cumsum([rows for _, rows in shards])
        self.sequence_len = sequence_len

    def __len__(self) -> int:
        return int(self.ends[-1])

    def batch(self, indices) -> Batch:
        """The rows at `indices` (each < len) as ids and targets."""
        width = self.sequence_len + 1
        rows = np.empty((len(indices), width), dtype=np.int64)
        for slot, index in zip(rows, indices):
            shard = int(np.searchsorted(self.ends, index, side="right"))
            start = int(self.ends[shard - 1]) if shard else 0
            slot[:] = np.fromfile(self.paths[shard], dtype="<u2", count=width, offset=(index - start) * width * 2)
        rows = torch.from_numpy(rows)
        return rows[:, :-1], rows[:, 1:]


class Stream:
    """The endless sequence of training rows: row number n is row permutation_e[n mod R] of epoch e = n // R."""

    def __init__(self, rows: Rows, seed: int):
        self.rows, self.seed = rows, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def locate(self, number: int) -> int:
        """Index into the split of global row `number`."""
        epoch, position = divmod(number, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))
        return int(self._order[position])

    def batch(self, numbers) -> Batch:
        return self.rows.batch([self.locate(number) for number in numbers])


def micro_batches(numbers: range, size: int) -> Iterator[range]:
    """`numbers` in pieces of at most `size`."""
    for start in range(numbers.start, numbers.stop, size):
        yield range(start, min(start + size, numbers.stop))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy without waiting for the device."""
    if device.type == "cpu":
        return batch
    return tuple(t.contiguous().pin_memory().to(device, non_blocking=True) for t in batch)
