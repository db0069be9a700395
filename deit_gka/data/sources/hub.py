"""Hugging Face datasets: stored locally, or streamed."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from deit_gka.data.sources.base import MAX_CLASSES, NONE, DataParts, ImageSource, Record
from deit_gka.data.sources.classes import in_order
from trainkit_gka import extras
from trainkit_gka.cli import PassingFault, UserError, flag_of, is_network, reason_of

HUB_SPLITS = {"train": ("train",), "val": ("validation", "val", "valid")}
CIFAR10 = "cifar10"  # data of this name: its test images may be its validation images
LABEL_NAMES = ("label", "labels")  # of columns whose numbers or names are classes without --target-key
PATH_NAMES = ("image", "image_path", "file_name", "filename", "path")  # of columns of paths without --input-key
TEXT = ("string", "large_string", "string_view")
SHUFFLE_BUFFER = 1000  # records of a stream


class HubData:
    """Undecoded images, their labels and classes, of a dataset of the hub or of a local folder.

    Raises UserError if it cannot serve, PassingFault if the hub cannot be reached.
    """

    def __init__(self, data: str, split: str, name: str, parts: DataParts, streaming: bool):
        if reason := extras.missing("vision", "datasets"):
            raise UserError(f"{data}: {reason}")
        import datasets
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # its retries, before the one line that counts
        self.name, self.split = data, split
        path = os.path.expanduser(name)
        # In which paths of images begin
        self._folder = os.path.abspath(path) if os.path.isdir(path) else f"hf://datasets/{name}"
        # A cached folder must not stand in for a dataset of the hub with its name that cannot be reached.
        cache = Path(datasets.config.HF_DATASETS_CACHE, "folders") if os.path.isdir(path) else None
        with _explained(data, name):
            config = _configuration(data, path, parts)
            splits = datasets.get_dataset_split_names(path, config)
            chosen = _known(data, split, parts, splits)
            if chosen is None:
                part = " (a part of one is train[90%:])" if data.startswith("hf:") else ""
                names = " or ".join(_names(data, split, parts))
                raise UserError(f"{data} has no {names} split; choose by --{split}-split{part}: {', '.join(splits)}")
            load = functools.partial(datasets.load_dataset, path, config, streaming=streaming, cache_dir=cache)
            dataset = load(split=chosen)
            features = dataset.features or {}
            self._image = image = _column(data, features, parts.input_key, "input_key")
            self._label = label = _column(data, features, parts.target_key, "target_key")
            self._numbers: dict[str, int] | None = None  # of the classes, where labels are names
            if isinstance(features[label], datasets.ClassLabel):
                self.classes = features[label].names
            else:
                self.classes = _unnamed(data, label, load, _known(data, "train", parts, splits) or chosen)
                if features[label].dtype in TEXT:
                    self._numbers = {name: number for number, name in enumerate(self.classes)}
            dataset = dataset.select_columns([image, label])
            self._dataset = dataset.cast_column(image, datasets.Image(decode=False))

    def _record(self, row: dict, name: str) -> Record:
        """The record of a row. name: of an image without one. Raises UserError as `_number`, and OSError."""
        image = row[self._image]
        name = (image or {}).get("path") or name
        label = self._number(row[self._label], name)
        try:
            return self._encoded(image), label, name
        except (FileNotFoundError, PermissionError) as error:  # one file; a lost network is another matter
            return b"", label, f"{name} ({reason_of(error)})"

    def _number(self, label: int | str | None, where: str) -> int:
        """The number of a label's class. Raises UserError if it is missing, or no training image has it."""
        number = label if self._numbers is None or label is None else self._numbers.get(label, len(self.classes))
        if number is None or number < 0:
            raise UserError(f"{where} has no label; an image without labels cannot serve: use another copy of the data")
        if number >= len(self.classes):
            last = self.classes[-1] if self.classes else "none"
            raise UserError(f"{where} has the label {label}, but no training image has; their last is {last}")
        return number

    def _encoded(self, image: dict | None) -> bytes:
        """The file in a record. Raises OSError."""
        if image is None or image["bytes"] is not None:
            return image["bytes"] if image else b""
        path = image["path"]
        inside = path if "://" in path else os.path.join(self._folder, path)
        if "://" not in inside:
            return Path(inside if os.path.exists(inside) else path).read_bytes()
        import fsspec

        with fsspec.open(inside, "rb") as file:
            return file.read()


class Hub(HubData, ImageSource):
    """A dataset that `datasets` stores locally, after downloading it if need be."""

    def __init__(self, data: str, split: str, name: str, parts: DataParts = NONE):
        HubData.__init__(self, data, split, name, parts, streaming=False)
        ImageSource.__init__(self, data, split, self.classes)
        labels = self._dataset.data.column(self._label)
        if not len(labels):
            raise UserError(f"{data} has no images in {split}; use another copy of it")
        for value in labels.unique().to_pylist():
            self._number(value, f"{data} in {split}")

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> Record:
        return self._record(self._dataset[index], f"{self.name}, image {index}")


class ImageStream(HubData):
    """A dataset read over the network while it is used. `length` is its number of images, None if unknown."""

    def __init__(self, data: str, split: str, name: str, parts: DataParts = NONE):
        super().__init__(data, split, name, parts, streaming=True)
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
        if training:  # a new generator: set_epoch would be shared with other passes
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
            message = f"{self.name} broke off ({reason}); check the network and run the same command again"
            raise PassingFault(message) from None


@contextlib.contextmanager
def _explained(data: str, name: str):
    """Turns what the hub, its transport and pyarrow raise into one line."""
    import datasets

    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error
        while isinstance(error, datasets.exceptions.DatasetGenerationError) and cause.__cause__:
            cause = cause.__cause__
        failed, hint = f"{data} cannot be loaded, {type(cause).__name__}: {reason_of(cause)}", ""
        if is_network(cause):
            folder = CIFAR10 if data == CIFAR10 else name
            fetch = f"hf download {name} --repo-type dataset --local-dir {folder}"
            advice = f"check the network, or fetch it on another machine and put the folder {folder} here: {fetch}"
            raise PassingFault(f"{failed}; {advice}") from None
        if not os.path.exists(os.path.expanduser(name)):
            hint = f". A gated dataset needs its conditions accepted at https://huggingface.co/datasets/{name} and "
            hint += "`hf auth login`; or use a local copy"
        raise UserError(failed + hint) from None


def _configuration(data: str, path: str, parts: DataParts) -> str | None:
    """Which of the dataset's configurations to load."""
    import datasets

    configs = datasets.get_dataset_config_names(path)
    chosen = parts.data_config or (configs[0] if len(configs) == 1 else datasets.get_dataset_default_config_name(path))
    if chosen not in configs:
        reason = f"has no configuration {chosen!r}" if chosen else "has several configurations"
        raise UserError(f"{data} {reason}; choose by --data-config: {', '.join(configs)}")
    return chosen


def _names(data: str, split: str, parts: DataParts) -> tuple[str, ...]:
    """The names that `split` may have in a dataset. A test split is taken for validation only by name."""
    test = ("test",) if data == CIFAR10 and split == "val" else ()
    return parts.split_names(split, HUB_SPLITS[split] + test)


def _known(data: str, split: str, parts: DataParts, splits: list[str]) -> str | None:
    """The dataset's name of `split`, None without one."""
    return next((name for name in _names(data, split, parts) if name.partition("[")[0] in splits), None)


def _column(data: str, features: dict, name: str, field: str) -> str:
    """The column called `name`, or without a name the only one of its kind. Raises UserError that lists the columns.

    Numbers and strings are classes, and strings are paths of images, if the column is named or has a usual name.
    """
    import datasets

    def of(*kinds: type) -> list[str]:
        return [column for column, feature in features.items() if isinstance(feature, kinds)]

    values = {column: features[column].dtype for column in of(datasets.Value)}
    texts = [column for column, dtype in values.items() if dtype in TEXT]
    numbers = [column for column, dtype in values.items() if dtype.startswith(("int", "uint"))]
    if field == "input_key":
        kind, needs, fitting, names = "images", "Image, or string for paths", of(datasets.Image), PATH_NAMES
        usual = fitting
    else:
        kind, needs, names = "classes", "ClassLabel, whole numbers or string", LABEL_NAMES
        fitting = of(datasets.ClassLabel)
        usual, fitting = fitting + [column for column in numbers if column in names], fitting + numbers
    usual = usual or [column for column in texts if column in names]
    if name in fitting + texts:
        return name
    if not name and len(usual) == 1:
        return usual[0]
    has = f"no column {name!r}" if name else "several columns" if usual else "no column"
    columns = ", ".join(f"{column} ({values.get(column, type(features[column]).__name__)})" for column in features)
    columns = columns or "it has no columns (if it is tars, download them and use wds:FOLDER)"
    raise UserError(f"{data} has {has} of {kind} ({needs}); choose by {flag_of(field)}: {columns}")


def _unnamed(data: str, label: str, load: Callable, split: str) -> list[str]:
    """The classes of a column that does not list them: 0 to the largest number of the training images, or their names,
    in order.
    """
    if not load.keywords["streaming"]:
        values = load(split=split).data.column(label).unique().to_pylist()
    else:
        try:  # parquet is read by the column
            dataset = load(split=split, columns=[label])
        except (TypeError, ValueError):
            dataset = load(split=split).select_columns([label])
        values = (row[label] for row in dataset)
    values = {value for value in values if value is not None}
    if values and all(isinstance(value, str) for value in values):
        return in_order(values)
    last = max(values, default=-1)
    if not 0 <= last < MAX_CLASSES:
        raise UserError(f"{data}: the largest {label} is {last}; classes are numbers from 0 to {MAX_CLASSES - 1:,}")
    return [str(number) for number in range(last + 1)]
