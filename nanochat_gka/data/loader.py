"""Packed rows -> batches by global row number: the same rows whatever the number of ranks, O(1) to resume.

A step is rows [step * B, (step + 1) * B) of an endless stream, which walks the split in a seeded permutation, a new one
every epoch.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nanochat_gka.data import SPLITS
from nanochat_gka.data.shards import MANIFEST, TRAIN_FIRST, find_damage, read_manifest, shard_path, splits_documents
from nanochat_gka.data.tokenizer import Tokenizer
from trainkit_gka.cli import UserError
from trainkit_gka.files import sha256

EvalRows = Literal["upstream", "spaced"]
SAME_SHARD = ("name", "split", "rows", "sha256")
Batch = tuple[torch.Tensor, torch.Tensor]  # ids and targets, both (rows, T) int64


def same_rows(about: dict[str, Any]) -> dict[str, Any]:
    """What the manifests of equal rows, and checkpoints that tell of them, have in common.

    Only rows of split documents have the last key.
    """
    same = {key: about.get(key) for key in ("tokenizer_sha256", "sequence_len", "source")}
    return {**same, "split_documents": True} if splits_documents(about) else same


class PackedData:
    """An opened folder of packed rows.

    verify: whether to compare checksums. Raises UserError if it is absent, from another format, truncated or corrupt.
    """

    def __init__(self, folder: Path, verify: bool = True):
        self.folder, path = Path(folder), Path(folder) / MANIFEST
        if not path.exists():
            command = f"make them by python -m nanochat_gka.pack --out {self.folder}"
            raise UserError(f"no packed data in {self.folder} (no {MANIFEST}); {command}")
        try:
            self.manifest = read_manifest(self.folder)
            self._check(verify)
        except UserError as error:
            raise UserError(f"{error}; delete {path} and pack again, which repacks only what is damaged") from None
        self.sequence_len: int = self.manifest["sequence_len"]
        files = {split: [] for split in (*SPLITS, TRAIN_FIRST)}
        for shard in filter(lambda shard: shard["rows"], self.manifest["shards"]):
            files[shard["split"]].append((shard_path(self.folder, shard), shard["rows"]))
        self._rows = {split: Rows(files[split], self.sequence_len, self.tokenizer.vocab_size) for split in files}

    def _check(self, verify: bool) -> None:
        self.tokenizer = Tokenizer.load(self.folder)
        if self.tokenizer.sha256 != self.manifest["tokenizer_sha256"]:
            raise UserError(f"{self.folder} was packed with another tokenizer than the one in it")
        if damage := find_damage(self.folder, self.manifest):
            raise UserError(damage)
        paths = [shard_path(self.folder, shard) for shard in self.manifest["shards"]] if verify else []
        with ThreadPoolExecutor() as pool:
            for path, shard, digest in zip(paths, self.manifest["shards"], pool.map(sha256, paths)):
                if digest != shard["sha256"]:
                    raise UserError(f"shard {path} is corrupt (wrong checksum)")

    def split(self, name: str) -> "Rows":
        """Rows of "train" or "val"."""
        return self._rows[name]

    def eval_rows(self, split: str, tokens: int, choice: str = "upstream") -> "Rows":
        """The rows of a split to evaluate on: as many as hold `tokens` (-1 = all), at least one.

        choice: "upstream" takes the first rows of nanochat's loader with one process. Of "val" they are the split's
        first; of "train" they are stored apart, and if more are needed than are stored, the split's first are taken.
        "spaced" takes evenly spaced rows of the whole split, as always where documents were split.
        """
        return self._choose(split, tokens, choice)[0]

    def name_rows(self, tokens: int, choice: str = "upstream") -> str:
        """What `eval_rows` gives, to stand beside a number: "spaced" as there, "upstream" if all rows are nanochat's.

        "first" if only some are: the text is so short that nanochat reads it again, or more are evaluated than stored.
        """
        names = {self._choose(split, tokens, choice)[1] for split in SPLITS}
        return "first" if "first" in names else names.pop()

    def _choose(self, split: str, tokens: int, choice: str) -> tuple["Rows", str]:
        """The rows of `eval_rows`, and what `name_rows` calls those of this split."""
        rows = self._rows[split]
        name = TRAIN_FIRST if split == "train" else split
        count = len(rows) if tokens < 0 else max(1, min(len(rows), tokens // self.sequence_len))
        if choice == "spaced" or splits_documents(self.manifest):
            return rows.some([number * len(rows) // count for number in range(count)]), "spaced"
        if split == "train" and (count > len(self._rows[name]) or count == len(rows)):
            return rows.some(range(count)), "first"
        upstream = next(shard["upstream_rows"] for shard in self.manifest["shards"] if shard["split"] == name)
        return self._rows[name].some(range(count)), "upstream" if count <= upstream else "first"

    def rows_hash(self, split: str = "") -> str:
        """Hash of what makes rows, those of `split` or all, the same rows, wherever they are."""
        shards = [shard for shard in self.manifest["shards"] if split in ("", shard["split"])]
        same = {**same_rows(self.manifest), "shards": [{key: shard[key] for key in SAME_SHARD} for shard in shards]}
        return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()

    def provenance(self, run: Path) -> dict[str, Any]:
        """What checkpoints of the run in `run` say of their data: what it is and where, also relative to the run."""
        folder = self.folder.resolve()
        return {
            **same_rows(self.manifest),
            "train_rows": self.rows_hash("train"),
            "corpus": self.manifest.get("corpus"),
            "folder": str(folder),
            "folder_from_run": os.path.relpath(folder, run.resolve()),
        }

    def check_same(self, saved: dict[str, Any], run: Path) -> None:
        """Raises UserError if these rows are not those of the run in `run`, of which its checkpoint says `saved`."""
        names = {"tokenizer_sha256": "tokenizer", "sequence_len": "context length", "source": "corpus"}
        names |= {"split_documents": "--split-documents", "train_rows": "version of nanochat_gka"}
        now = self.provenance(run)
        for key, name in names.items():
            if saved.get(key) != now.get(key):
                problem = f"{self.folder} was packed with another {name} than the run in {run}"
                raise UserError(f"{problem}; use its data, or another --model-tag")


def rows_of_run(data: dict[str, Any], run: Path) -> Path:
    """The folder of rows that a run was trained on, from what its checkpoint says of them (`PackedData.provenance`).

    Raises UserError if the checkpoint does not say, or if no folder there has rows of this text, tokenizer and length.
    """
    if not data:
        raise UserError(f"{run} is an exported model, which does not say where its rows are; give --data FOLDER")
    for folder in (run / data["folder_from_run"], Path(data["folder"])):
        with contextlib.suppress(UserError):
            if same_rows(read_manifest(folder)) == same_rows(data):
                return Path(os.path.normpath(folder))
    needed = f"--data FOLDER with rows of {data['sequence_len']} tokens of tokenizer {data['tokenizer_sha256'][:12]}"
    problem = f"the rows that {run} was trained on are gone from {data['folder']}"
    raise UserError(f"{problem}; pack {data['corpus'] or 'its corpus'} again, or give {needed}")


@dataclass
class Rows:
    """Random access to the rows of a split. No file stays open: a large corpus has more than a process may open.

    files: with the number of rows in each. vocab_size: ids from there on are refused. chosen: the numbers of the rows,
    in all files, that these are; None = all.
    """

    files: list[tuple[Path, int]]
    sequence_len: int
    vocab_size: int
    chosen: Sequence[int] | None = None

    def __post_init__(self):
        self.starts = np.cumsum([0, *(rows for _, rows in self.files)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1]) if self.chosen is None else len(self.chosen)

    def some(self, indices: Sequence[int]) -> "Rows":
        """The rows at `indices` alone, in that order."""
        return replace(self, chosen=indices)

    def batch(self, indices) -> Batch:
        """The rows at `indices` (each < len) as ids and targets, both (rows, T) int64.

        Raises UserError for an id that is not in the vocabulary, before it can reach a device.
        """
        width = self.sequence_len + 1
        rows = np.empty((len(indices), width), dtype=np.int64)
        for slot, index in zip(rows, indices):
            path, number = self._place(index)
            slot[:] = np.fromfile(path, dtype="<u2", count=width, offset=number * width * 2)
        if rows.size and rows.max() >= self.vocab_size:
            first = int((rows.max(axis=1) >= self.vocab_size).argmax())
            path, number = self._place(indices[first])
            raise UserError(
                f"{path} is damaged: row {number} has id {rows[first].max()}, and the vocabulary has {self.vocab_size} "
                f"tokens; delete {path.parent / MANIFEST} and pack again, which repacks only what is damaged"
            )
        rows = torch.from_numpy(rows)
        return rows[:, :-1], rows[:, 1:]

    def _place(self, index: int) -> tuple[Path, int]:
        """The file of a row, and its number there."""
        row = index if self.chosen is None else self.chosen[index]
        file = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.files[file][0], row - int(self.starts[file])


class RowStream:
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
    """`numbers` in as few pieces of at most `size` as will do, as even as possible: 73 by 32 is 25, 24, 24."""
    pieces = -(-len(numbers) // size)
    for piece in range(pieces):
        yield numbers[-(-piece * len(numbers) // pieces) : -(-(piece + 1) * len(numbers) // pieces)]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy without waiting for the device."""
    if device.type == "cpu":
        return batch
    return tuple(t.contiguous().pin_memory().to(device, non_blocking=True) for t in batch)
