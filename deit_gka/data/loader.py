"""From images to batches: which image goes where, augmentation. `loader_workers.py` runs it in processes. Unusual in it:

- An update is a fixed set of images whatever the number of processes. They are dealt out in pairs, because Mixup and CutMix mix pairs.
- Every image has its own random seed, from (run seed, epoch, place in the epoch). So neither the number of processes nor of workers, nor
  where a run was interrupted, changes what is drawn.
- A broken image never stops training: a neighbour in the batch takes its place, and it is counted and reported.
"""

import hashlib
import queue
import random
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from timm.data import create_transform
from timm.data.distributed_sampler import RepeatAugSampler

from deit_gka.data.augment import three_augment
from deit_gka.data.sources import BrokenImage, Record, Source, Stream, decode
from deit_gka.recipe import Recipe
from trainkit.cli import UserError
from trainkit.distributed import Runtime

UNIT = 64  # images a worker makes at once: at 224 pixels 39 MB of shared memory, of which a worker holds three
READ_AHEAD = 256  # records of a stream


def seed_of(*what) -> int:
    """A 63-bit seed that depends on everything given."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's CPU generators (torch.manual_seed would queue a call, stack trace included, for a CUDA never started)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


# Which images


class Piece(NamedTuple):
    """What one process runs at once: places in the global batch, ordered so that flipping a part pairs it up; and those parts."""

    places: list[int]
    parts: list[tuple[int, int]]  # (group, length): the images that share a Mixup draw


def deal(batch_size: int, group_size: int, pairs: range, device_batch_size: int) -> list[Piece]:
    """The pieces of one update for the process that has `pairs` of the global batch, each of at most `device_batch_size` images.

    Group g of G is every G-th image from g on, as with G GPUs in DeiT: copies made by repeated augmentation come to lie in different groups.
    Within a group of n, image k is mixed with image n-1-k.
    """
    groups = batch_size // group_size if batch_size % group_size == 0 else 1
    half = batch_size // groups // 2
    count = -(-len(pairs) // max(1, device_batch_size // 2))
    pieces = []
    for piece in range(count):
        mine = pairs[piece * len(pairs) // count : (piece + 1) * len(pairs) // count]
        places, parts = [], []
        for group in range(mine[0] // half, mine[-1] // half + 1):
            inside = [pair - group * half for pair in mine if pair // half == group]
            order = inside + [2 * half - 1 - k for k in reversed(inside)]
            places += [group + groups * k for k in order]
            parts.append((group, len(order)))
        pieces.append(Piece(places, parts))
    return pieces


def split_evenly(places: list[int], most: int) -> list[list[int]]:
    """`places` in parts of at most `most`, as equal as possible."""
    count = -(-len(places) // most)
    return [places[part * len(places) // count : (part + 1) * len(places) // count] for part in range(count)]


class Key(NamedTuple):
    """What a worker needs to make one training image."""

    item: int | Record  # index into a Source, or a record of a Stream
    seed: int


class Order:
    """The keys of one process's images, unit by unit, from any update on. An epoch is len(source) // batch_size updates."""

    def __init__(self, source: Source | Stream, recipe: Recipe, runtime: Runtime, device_batch_size: int):
        pairs = runtime.share(recipe.batch_size // 2)
        if not pairs:
            raise UserError(
                f"--batch-size {recipe.batch_size} has too few pairs of images for {runtime.world_size} processes; raise it"
            )
        if len(source) < recipe.batch_size:
            raise UserError(
                f"{source.name} has {len(source):,} training images, fewer than one batch; lower --batch-size (now {recipe.batch_size})"
            )
        if isinstance(source, Stream) and recipe.repeated_aug > 1:
            raise UserError(
                "repeated augmentation needs random access and a stream has none; pass --repeated-aug 1, or use a local copy"
            )
        self.source, self.recipe, self.runtime = source, recipe, runtime
        self.pieces = deal(recipe.batch_size, recipe.group_size, pairs, device_batch_size)
        self.units = [unit for piece in self.pieces for unit in split_evenly(piece.places, UNIT)]
        self.steps_per_epoch = len(source) // recipe.batch_size

    def batches(self, start: int, stop: int) -> Iterator[list[Key]]:
        """Keys of every unit of every piece of the updates start .. stop-1; `assemble` makes pieces of them again."""
        step = start
        while step < stop:
            epoch, first = divmod(step, self.steps_per_epoch)
            last = min(self.steps_per_epoch, first + stop - step)
            yield from (
                self._stream(epoch, first, last)
                if isinstance(self.source, Stream)
                else self._random_access(epoch, first, last)
            )
            step += last - first

    def _key(self, item, epoch: int, place: int) -> Key:
        return Key(item, seed_of(self.recipe.seed, "image", epoch, place))

    def _random_access(self, epoch: int, first: int, last: int) -> Iterator[list[Key]]:
        sampler = RepeatAugSampler(
            self.source, num_replicas=1, rank=0, num_repeats=self.recipe.repeated_aug, selected_round=0
        )
        sampler.set_epoch(seed_of(self.recipe.seed, "order", epoch))
        indices = list(sampler)
        for step in range(first, last):
            begin = step * self.recipe.batch_size
            for unit in self.units:
                yield [self._key(indices[begin + place], epoch, begin + place) for place in unit]

    def _stream(self, epoch: int, first: int, last: int) -> Iterator[list[Key]]:
        skipped = first * sum(map(len, self.units))
        if skipped:
            self.runtime.print(f"reading {skipped:,} images of this epoch again, to go on where it stopped")
        records = read_ahead(self._endless(epoch), READ_AHEAD)
        for _ in range(skipped):
            next(records)
        for step in range(first, last):
            for unit in self.units:
                yield [self._key(next(records), epoch, step * self.recipe.batch_size + place) for place in unit]

    def _endless(self, epoch: int) -> Iterator[Record]:
        """This process's records; should its part of the shards be short, it starts on them again."""
        passes = 0
        while True:
            yield from self.source.records(
                seed_of("pass", epoch, passes) % 2**31, self.runtime.rank, self.runtime.world_size, self.recipe.seed
            )
            passes += 1


def read_ahead(iterator: Iterator, count: int) -> Iterator:
    """The same items, read by a thread that stays up to `count` ahead."""
    items: queue.Queue = queue.Queue(count)
    done, left = object(), threading.Event()

    def put(item) -> bool:
        while not left.is_set():
            try:
                items.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def read():
        try:
            for item in iterator:
                if not put((item, None)):
                    return
            put((done, None))
        except BaseException as error:
            put((done, error))

    threading.Thread(target=read, daemon=True).start()
    try:
        while True:
            item, error = items.get()
            if error is not None:
                raise error
            if item is done:
                return
            yield item
    finally:
        left.set()


# Batches


class Batch(NamedTuple):
    """Images (n, 3, S, S) float32, normalised; labels (n,) int64; the broken files among them with the reason; seconds a worker spent."""

    images: torch.Tensor
    labels: torch.Tensor
    broken: list[tuple[str, str]]
    seconds: float


class Images:
    """Makes batches from keys; lives in the workers. In training a broken image is replaced by a neighbour, in evaluation it is left out."""

    def __init__(self, source: Source | Stream, transform, training: bool):
        self.name, self.transform, self.training = source.name, transform, training
        self.source = source if isinstance(source, Source) else None  # a stream's keys bring the images

    def __getitems__(self, keys: list[Key]) -> Batch:
        started = time.perf_counter()
        made, broken = [], []
        for key in keys:
            name = f"{self.name}, image {key.item}" if isinstance(key.item, int) else key.item[2]
            try:
                data, label, name = self.source.read(key.item) if isinstance(key.item, int) else key.item
                image = decode(data)
            except (BrokenImage, OSError) as error:
                broken.append((name, str(error)))
                made.append(None)
                continue
            if self.training:
                seed_everything(key.seed)
            made.append((self.transform(image), label))
        intact = [place for place, image in enumerate(made) if image is not None]
        if self.training and intact:
            made = [
                image or made[next((other for other in intact if other > place), intact[0])]
                for place, image in enumerate(made)
            ]
        made = [image for image in made if image is not None]
        images = torch.stack([image for image, _ in made]) if made else torch.empty(0, 3, 1, 1)
        labels = torch.tensor([label for _, label in made], dtype=torch.long)
        return Batch(images, labels, broken, time.perf_counter() - started)


def assemble(loaded: Iterator[Batch], size: int) -> Batch:
    """The next `size` images of the loader as one batch; an empty batch if one of its units has no readable image."""
    parts: list[Batch] = []
    while sum(len(part.images) for part in parts) < size:
        parts.append(next(loaded))
        if not len(parts[-1].images):
            return parts[-1]
    return join(parts)


def join(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    images = [part.images for part in parts if len(part.images)] or [parts[0].images]
    broken = [image for part in parts for image in part.broken]
    return Batch(
        torch.cat(images), torch.cat([part.labels for part in parts]), broken, sum(part.seconds for part in parts)
    )


def train_transform(recipe: Recipe):
    """Crop, flip, RandAugment, normalise, erase (timm's, in DeiT's order), or DeiT III's. Raises UserError for a RandAugment timm does not know."""
    if recipe.three_augment:
        return three_augment(recipe)
    try:
        return create_transform(recipe.input_size, is_training=True, scale=recipe.scale, ratio=recipe.ratio, hflip=recipe.hflip,
                                auto_augment=recipe.aa or None, color_jitter=None, interpolation="bicubic", re_prob=recipe.reprob, re_mode="pixel",
                                re_count=1)  # fmt: skip
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"--aa {recipe.aa!r} is not an augmentation of timm's, such as rand-m9-mstd0.5-inc1: {error}"
        ) from None


def eval_transform(input_size: int | tuple[int, int], crop_pct: float, interpolation: str = "bicubic", **others):
    """Resize, crop the centre, normalise. others: crop_mode, mean and std, if not timm's and ImageNet's."""
    return create_transform(input_size, is_training=False, interpolation=interpolation, crop_pct=crop_pct, **others)
