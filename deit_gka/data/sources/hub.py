"""Hugging Face datasets: stored locally, or streamed."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deit_gka.data.sources.base import Record, Source
from trainkit import extras
from trainkit.cli import PassingFault, UserError, reason_of

HUB_SPLITS = {"train": ("train",), "val": ("validation", "val", "valid")}
SHUFFLE_BUFFER = 1000  # records of a stream


class Hub(Source):
    """A dataset that `datasets` stores locally, after downloading it if need be.

    Raises UserError if it cannot serve.
    """

    def __init__(self, data: str, split: str, name: str):
        self._dataset, self._image, self._label, classes = _load(data, split, name, streaming=False)
        super().__init__(data, split, classes)
        labels = self._dataset.data.column(self._label)
        if not len(labels):
            raise UserError(f"{data} has no images in {split}; use another copy of it")
        if labels.null_count or min(labels.unique().to_pylist()) < 0:
            raise UserError(f"{data} has images without labels in {split}; use another copy of it")

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> Record:
        row = self._dataset[index]
        image = row[self._image]
        return _encoded(image), row[self._label], (image or {}).get("path") or f"{self.name}, image {index}"


class Stream:
    """A dataset read over the network while it is used. `length` is its number of images, None if unknown."""

    def __init__(self, data: str, split: str, name: str):
        self.name, self.split = data, split
        self._dataset, self._image, self._label, self.classes = _load(data, split, name, streaming=True)
        info = (self._dataset.info.splits or {}).get(str(self._dataset.split))
        self.length: int | None = (info and info.num_examples) or None

    def __len__(self) -> int:
        """Raises UserError if the dataset does not say."""
        if self.length is None:
            unknown = f"{self.name} does not say how many images are in {self.split} (no dataset_info on its card)"
            raise UserError(f"{unknown}; use hf: instead of hf-stream:")
        return self.length

    def records(self, epoch: int, rank: int, world_size: int, seed: int = 0) -> Iterator[Record]:
        """This rank's part of one pass; every record is in one part. Training data is shuffled: shards and a buffer.

        Raises PassingFault if the stream breaks off, UserError if an image has no label.
        """
        from datasets.distributed import split_dataset_by_node

        dataset, training = self._dataset, self.split == "train"
        if training:  # a generator of our own: set_epoch would be shared with other passes
            dataset = dataset.shuffle(generator=np.random.default_rng((seed, epoch)), buffer_size=SHUFFLE_BUFFER)
        # Whole shards, if that makes fair parts; otherwise every rank reads everything and keeps its share.
        if dataset.num_shards >= world_size * (8 if training else 1):
            dataset = dataset.shard(world_size, rank, contiguous=False)
        else:
            dataset = split_dataset_by_node(dataset, rank, world_size)
        try:
            for number, row in enumerate(dataset):
                yield self._record(row, f"{self.name}, image {number} of rank {rank}")
        except UserError:
            raise
        except Exception as error:  # every file system and transport has its own
            reason = f"{type(error).__name__}: {reason_of(error)}"
            todo = "check the network and run the same command again"
            raise PassingFault(f"{self.name} broke off ({reason}); {todo}") from None

    def _record(self, row: dict, name: str) -> Record:
        image, label = row[self._image], row[self._label]
        name = (image or {}).get("path") or name
        if label is None or label < 0:
            raise UserError(f"{name} has no label; use another copy of {self.name}")
        try:
            return _encoded(image), label, name
        except (FileNotFoundError, PermissionError) as error:  # one file; a lost network is another matter
            return b"", label, f"{name} ({reason_of(error)})"


def _load(data: str, split: str, name: str, streaming: bool):
    """(dataset of undecoded images and labels, its image column, its label column, classes).

    Raises UserError; PassingFault if the hub cannot be reached.
    """
    if reason := extras.missing("vision", "datasets"):
        raise UserError(f"{data}: {reason}")
    import datasets

    path = os.path.expanduser(name)
    try:
        splits = datasets.get_dataset_split_names(path)
        chosen = next((candidate for candidate in HUB_SPLITS[split] if candidate in splits), None)
        dataset = chosen and datasets.load_dataset(path, split=chosen, streaming=streaming)
    except Exception as error:  # the hub's, its transport's, pyarrow's
        cause = error
        while isinstance(error, datasets.exceptions.DatasetGenerationError) and cause.__cause__:
            cause = cause.__cause__
        conditions = f"A gated dataset needs its conditions accepted at https://huggingface.co/datasets/{name}"
        hint = "" if os.path.exists(path) else f". {conditions} and `hf auth login`; or use a local copy"
        kind = PassingFault if isinstance(cause, (ConnectionError, TimeoutError)) else UserError
        raise kind(f"{data} cannot be loaded, {type(cause).__name__}: {reason_of(cause)}{hint}") from None
    if chosen is None:
        raise UserError(f"{data} has no {' or '.join(HUB_SPLITS[split])} split; it has: {', '.join(splits)}")
    features = dataset.features or {}
    image = next((column for column, feature in features.items() if isinstance(feature, datasets.Image)), None)
    label = next((column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel)), None)
    if image is None or label is None:
        columns = ", ".join(f"{column} ({type(feature).__name__})" for column, feature in features.items())
        tars = "if it is tars, download them and use wds:FOLDER"
        raise UserError(f"{data} needs an Image and a ClassLabel column, it has: {columns or 'none'} ({tars})")
    dataset = dataset.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    return dataset, image, label, features[label].names


def _encoded(image: dict | None) -> bytes:
    """The file in a record. Raises OSError."""
    if image is None or image["bytes"] is not None:
        return image["bytes"] if image else b""
    if "://" not in image["path"]:
        return Path(image["path"]).read_bytes()
    import fsspec

    with fsspec.open(image["path"], "rb") as file:
        return file.read()
