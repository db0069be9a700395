"""Packed rows -> batches by global row number: the same rows whatever the number of ranks, O(1) to resume.

A step is rows [step * B, (step + 1) * B) of an endless stream, which walks the split in a seeded permutation, a new one
every epoch.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nanochat_gka.data import SPLITS
from nanochat_gka.data.shards import FORMAT, MANIFEST, TRAIN_FIRST, find_damage, shard_path, splits_documents
from nanochat_gka.data.tokenizer import Tokenizer
from trainkit_gka.cli import UserError
from trainkit_gka.files import read_json, sha256

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
    """An opened folder of packed rows. Raises UserError if it is absent, from another format, truncated or corrupt."""

    def __init__(self, folder: Path, verify: bool = True):
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.exists():
            command = f"make them by python -m nanochat_gka.pack --out {self.folder}"
            raise UserError(f"no packed data in {self.folder} (no {MANIFEST}); {command}")
        advice = f"delete {path} and pack again, which keeps what is intact"
        try:
            self.manifest = read_json(path, "manifest")
        except UserError as error:
            raise UserError(f"{error}; {advice}") from None
        if self.manifest.get("format") != FORMAT:
            formats = f"has format {self.manifest.get('format')}, this version reads {FORMAT}"
            raise UserError(f"{self.folder} {formats}; delete the folder and pack again")
        self.sequence_len: int = self.manifest["sequence_len"]
        if damage := self._damage(verify):
            raise UserError(f"{damage}; {advice}")
        self._rows = {split: self._open(split) for split in (*SPLITS, TRAIN_FIRST)}

    def _damage(self, verify: bool) -> str | None:
        try:
            self.tokenizer = Tokenizer.load(self.folder)
        except UserError as error:
            return str(error)
        if self.tokenizer.sha256 != self.manifest["tokenizer_sha256"]:
            return f"{self.folder} was packed with another tokenizer than the one in it"
        damage = find_damage(self.folder, self.manifest)
        if damage is None and verify:
            paths = [shard_path(self.folder, shard) for shard in self.manifest["shards"]]
            with ThreadPoolExecutor() as pool:
                for path, shard, digest in zip(paths, self.manifest["shards"], pool.map(sha256, paths)):
                    if digest != shard["sha256"]:
                        return f"shard {path} is corrupt (wrong checksum)"
        return damage

    def _open(self, split: str) -> "Rows":
        shards = [shard for shard in self.manifest["shards"] if shard["split"] == split and shard["rows"]]
        paths = [(shard_path(self.folder, shard), shard["rows"]) for shard in shards]
        return Rows(paths, self.sequence_len, vocab_size=self.tokenizer.vocab_size)

    def split(self, name: str) -> "Rows":
        """Rows of "train" or "val"."""
        return self._rows[name]

    def eval_rows(self, split: str, tokens: int, choice: str = "upstream") -> "Rows":
        """The rows of a split to evaluate on: as many as hold `tokens` (-1 = all), at least one.

        choice: "upstream" takes the first rows of nanochat's loader with one process. Of "val" they are the split's
        own; of "train" they are kept apart, and if more are asked for than are kept, the split's own are taken.
        "spaced" takes evenly spaced rows of the whole split, as always where documents were split.
        """
        rows, count = self._rows[split], self._count(split, tokens)
        if choice == "spaced" or splits_documents(self.manifest):
            return rows.some([number * len(rows) // count for number in range(count)])
        return (self._rows[TRAIN_FIRST] if self._keeps(split, count) else rows).some(range(count))

    def name_rows(self, tokens: int, choice: str = "upstream") -> str:
        """What `eval_rows` gives, to stand beside a number: "spaced" as there, "upstream" if all rows are nanochat's.

        "first" if only some are: the text is so short that nanochat reads it again, or more are evaluated than kept.
        """
        if choice == "spaced" or splits_documents(self.manifest):
            return "spaced"
        counts = {split: self._count(split, tokens) for split in SPLITS}
        return "upstream" if all(self._upstream(split, count) == count for split, count in counts.items()) else "first"

    def _keeps(self, split: str, count: int) -> bool:
        """Whether `count` rows to evaluate on are kept apart from the split's own."""
        return split == "train" and count <= len(self._rows[TRAIN_FIRST]) and count < len(self._rows["train"])

    def _upstream(self, split: str, count: int) -> int:
        """How many of the first `count` rows to evaluate on are those of nanochat's loader with one process."""
        if split == "train" and not self._keeps(split, count):
            return 0
        name = TRAIN_FIRST if split == "train" else split
        [shard, *_] = (shard for shard in self.manifest["shards"] if shard["split"] == name)
        return min(count, shard["upstream_rows"])

    def _count(self, split: str, tokens: int) -> int:
        rows = len(self._rows[split])
        return rows if tokens < 0 else max(1, min(rows, tokens // self.sequence_len))

    def rows_hash(self, split: str = "") -> str:
        """Hash of what makes rows, those of `split` or all, the same rows, wherever they are."""
        chosen = [shard for shard in self.manifest["shards"] if split in ("", shard["split"])]
        shards = [{key: shard[key] for key in SAME_SHARD} for shard in chosen]
        same = {**same_rows(self.manifest), "shards": shards}
        return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()

    def identity(self, run: Path) -> dict[str, Any]:
        """What checkpoints of the run in `run` say of their data: what it is and where, also relative to the run."""
        known = {**same_rows(self.manifest), "train_rows": self.rows_hash("train")}
        folder, corpus = self.folder.resolve(), self.manifest.get("corpus")
        return {
            **known,
            "corpus": corpus,
            "folder": str(folder),
            "folder_from_run": os.path.relpath(folder, run.resolve()),
        }

    def check_same(self, saved: dict[str, Any], run: Path) -> None:
        """Raises UserError if these rows are not those of the run in `run`, of which its checkpoint says `saved`."""
        names = {"tokenizer_sha256": "tokenizer", "sequence_len": "context length", "source": "corpus"}
        theirs, ours = same_rows(saved), same_rows(self.manifest)
        for key, name in {**names, "split_documents": "--split-documents"}.items():
            if theirs.get(key) != ours.get(key):
                raise UserError(
                    f"{self.folder} was packed with another {name} than the run in {run}; "
                    "use its data, or another --model-tag"
                )
        if saved["train_rows"] != self.rows_hash("train"):
            raise UserError(
                f"{self.folder} has other rows than the run in {run}, though they are of the same text: another "
                "version packed them; use its data, or another --model-tag"
            )

    def warn_of_rows(self, choice: str, tokens: int, show: Callable[[str], None]) -> None:
        """`show` a note if "upstream" rows are wanted and not all that are evaluated are nanochat's.

        None of split documents, which have no such rows: there the label beside every figure, "spaced", says it.
        """
        if choice != "upstream" or splits_documents(self.manifest):
            return
        available, count = len(self._rows[TRAIN_FIRST]), self._count("train", tokens)
        if available < count < len(self._rows["train"]):
            show(
                f"note: {self.folder} keeps nanochat's first {available:,} rows of the training text, and {count:,} "
                "are evaluated, so they are the split's as packed for training, which cuts more of the long documents"
            )
        for split, name in (("train", "training"), ("val", "validation")):
            count = self._count(split, tokens)
            upstream = self._upstream(split, count)
            if upstream < count and (split == "val" or self._keeps(split, count)):
                show(
                    f"note: of the {count:,} {name} rows evaluated, {upstream:,} are those of nanochat's "
                    "loader, which reads a text as short as this again for the others"
                )


def rows_of_run(data: dict[str, Any], run: Path) -> Path:
    """The folder of rows that a run was trained on, from what its checkpoint says of them (`PackedData.identity`).

    Raises UserError if the checkpoint does not say, or if no folder there has rows of this text, tokenizer and length.
    """
    if not data:
        raise UserError(f"{run} is an exported model, which does not say where its rows are; give --data FOLDER")
    tokenizer, length, files = data["tokenizer_sha256"], data["sequence_len"], data["source"]
    needed = f"--data FOLDER with rows of {length} tokens of tokenizer {tokenizer[:12]}"
    for folder in (run / data["folder_from_run"], Path(data["folder"])):
        with contextlib.suppress(UserError):
            manifest = read_json(folder / MANIFEST, "manifest")
            if same_rows(manifest) == same_rows(data):
                return Path(os.path.normpath(folder))
    corpus = f"{data['corpus'] or 'a corpus'} ({len(files)} parquet files, {files[0][0]} to {files[-1][0]})"
    problem = f"the rows that {run} was trained on, of {corpus}, are gone from {data['folder']}"
    raise UserError(f"{problem}; pack them again, or give {needed}")


class Rows:
    """Random access to the rows of a split. No file stays open: a large corpus has more than a process may open.

    vocab_size: ids from there on are not read; by default all that a file can hold are.
    """

    def __init__(
        self,
        shards: list[tuple[Path, int]],
        sequence_len: int,
        chosen: Sequence[int] | None = None,
        vocab_size: int = 2**16,
    ):
        self.paths = [path for path, _ in shards]
        self.ends = np.cumsum([rows for _, rows in shards], dtype=np.int64)
        self.sequence_len, self.shards, self.chosen, self.vocab_size = sequence_len, shards, chosen, vocab_size

    def __len__(self) -> int:
        return len(self.chosen) if self.chosen is not None else int(self.ends[-1]) if len(self.ends) else 0

    def some(self, indices: Sequence[int]) -> "Rows":
        """The rows at `indices` alone, in that order."""
        return Rows(self.shards, self.sequence_len, indices, self.vocab_size)

    def batch(self, indices) -> Batch:
        """The rows at `indices` (each < len) as ids and targets, both (rows, T) int64.

        Raises UserError for an id that is not in the vocabulary, before it can reach a device.
        """
        if self.chosen is not None:
            indices = [self.chosen[index] for index in indices]
        width = self.sequence_len + 1
        rows = np.empty((len(indices), width), dtype=np.int64)
        for slot, index in zip(rows, indices):
            shard = int(np.searchsorted(self.ends, index, side="right"))
            start = int(self.ends[shard - 1]) if shard else 0
            slot[:] = np.fromfile(self.paths[shard], dtype="<u2", count=width, offset=(index - start) * width * 2)
        if rows.size and rows.max() >= self.vocab_size:
            raise UserError(self._damage(indices, rows))
        rows = torch.from_numpy(rows)
        return rows[:, :-1], rows[:, 1:]

    def _damage(self, indices, rows: np.ndarray) -> str:
        """In words, the first of `rows`, at `indices`, with an id that is not in the vocabulary."""
        place = int((rows.max(axis=1) >= self.vocab_size).argmax())
        shard = int(np.searchsorted(self.ends, indices[place], side="right"))
        path, first = self.paths[shard], int(self.ends[shard - 1]) if shard else 0
        return (
            f"{path} is damaged: row {indices[place] - first} has id {rows[place].max()}, and the vocabulary has "
            f"{self.vocab_size} tokens; delete {path.parent / MANIFEST} and pack again, which keeps "
            "what is intact"
        )


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
