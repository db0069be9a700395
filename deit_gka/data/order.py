"""Which images an update trains on, and which process makes them. Unusual in it:

- An update is a fixed set of images whatever the number of processes. They are dealt out in pairs, because Mixup and
  CutMix mix pairs.
- Every image has its own random seed, from (run seed, epoch, place in the epoch). So neither the number of processes
  or workers, nor where a run was interrupted, changes what is drawn.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from timm.data.distributed_sampler import RepeatAugSampler

from deit_gka.data.seeds import seed_of
from deit_gka.data.sources import ImageSource, ImageStream, Record
from deit_gka.recipe import Recipe
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime

UNIT = 64  # images a worker makes at once: at 224 pixels 39 MB of shared memory, of which a worker holds three
READ_AHEAD = 256  # records of a stream


class BatchPiece(NamedTuple):
    """The part of an update that one process runs at once."""

    places: list[int]  # in the global batch, ordered so that flipping a part pairs its images
    parts: list[tuple[int, int]]  # (group, length): the images that share a Mixup draw


def deal(batch_size: int, group_size: int, pairs: range, device_batch_size: int) -> list[BatchPiece]:
    """The pieces of one update, of at most `device_batch_size` images, for the process that has `pairs` of the batch.

    Group g of G is every G-th image from g on, as with G GPUs in DeiT: copies made by repeated augmentation come to lie
    in different groups. Within a group of n, image k is mixed with image n-1-k.
    """
    groups = batch_size // group_size if batch_size % group_size == 0 else 1
    half, pieces = batch_size // groups // 2, []
    for here in split_evenly(pairs, max(1, device_batch_size // 2)):
        places, parts = [], []
        for group in range(here[0] // half, here[-1] // half + 1):
            inside = [pair - group * half for pair in here if pair // half == group]
            order = inside + [2 * half - 1 - k for k in reversed(inside)]
            places += [group + groups * k for k in order]
            parts.append((group, len(order)))
        pieces.append(BatchPiece(places, parts))
    return pieces


def split_evenly(places: Sequence[int], most: int) -> list[Sequence[int]]:
    """`places` in parts of at most `most`, as equal as possible."""
    count = -(-len(places) // most)
    return [places[part * len(places) // count : (part + 1) * len(places) // count] for part in range(count)]


class ImageKey(NamedTuple):
    """One image, and the seed of its augmentation."""

    item: int | Record  # index into an ImageSource, or a record of an ImageStream
    seed: int


class Order:
    """The keys of one process's images, unit by unit, from any update on.

    An epoch has len(source) // batch_size updates.

    Raises UserError if there are too few images for a batch or too few pairs for the processes, and for a stream whose
    images should be repeated.
    """

    def __init__(self, source: ImageSource | ImageStream, recipe: Recipe, runtime: Runtime, device_batch_size: int):
        size, ranks = recipe.batch_size, runtime.world_size
        pairs = runtime.share(size // 2)
        if not pairs:
            raise UserError(f"--batch-size {size} has too few pairs of images for {ranks} processes; raise it")
        if len(source) < size:
            few = f"{source.name} has {len(source):,} training images, fewer than one batch"
            raise UserError(f"{few}; lower --batch-size (now {size})")
        if isinstance(source, ImageStream) and recipe.repeated_aug > 1:
            raise UserError("a stream cannot repeat images: pass --repeated-aug 1, or use a local copy")
        self.source, self.recipe, self.runtime = source, recipe, runtime
        self.pieces = deal(size, recipe.group_size, pairs, device_batch_size)
        self.units = [unit for piece in self.pieces for unit in split_evenly(piece.places, UNIT)]
        self.steps_per_epoch = len(source) // size

    def batches(self, start: int, stop: int) -> Iterator[list[ImageKey]]:
        """Keys of every unit of every piece of the updates start .. stop-1; `assemble` makes pieces of the units."""
        step, size = start, self.recipe.batch_size
        while step < stop:
            epoch, first = divmod(step, self.steps_per_epoch)
            last = min(self.steps_per_epoch, first + stop - step)
            item_at = (self._stream if isinstance(self.source, ImageStream) else self._random_access)(epoch, first)
            for begin in range(first * size, last * size, size):
                for unit in self.units:
                    places = [begin + place for place in unit]
                    seeds = [seed_of(self.recipe.seed, "image", epoch, place) for place in places]
                    yield [ImageKey(item_at(place), seed) for place, seed in zip(places, seeds)]
            step += last - first

    def _random_access(self, epoch: int, first: int) -> Callable[[int], int]:
        """The image at a place in the epoch."""
        repeats = self.recipe.repeated_aug
        sampler = RepeatAugSampler(self.source, num_replicas=1, rank=0, num_repeats=repeats, selected_round=0)
        sampler.set_epoch(seed_of(self.recipe.seed, "order", epoch))
        return list(sampler).__getitem__

    def _stream(self, epoch: int, first: int) -> Callable[[int], Record]:
        """The record at the next place in the epoch, from update `first` on."""
        each = sum(map(len, self.units))
        if first:
            self.runtime.print(f"reading {first * each:,} images of this epoch again, to go on where it stopped")
        of_epoch = itertools.islice(self._endless(epoch), first * each, self.steps_per_epoch * each)
        records = read_ahead(of_epoch, READ_AHEAD)
        return lambda place: next(records)

    def _endless(self, epoch: int) -> Iterator[Record]:
        """This process's records; should its part of the shards be short, it starts on them again."""
        rank, ranks, passes = self.runtime.rank, self.runtime.world_size, 0
        while True:
            yield from self.source.records(seed_of("pass", epoch, passes) % 2**31, rank, ranks, self.recipe.seed)
            passes += 1


def read_ahead(iterator: Iterator, count: int) -> Iterator:
    """The same items, read by a thread that stays up to `count` ahead, until they end or the process does."""
    items: queue.Queue = queue.Queue(count)

    def read() -> None:
        end: BaseException = StopIteration()
        try:
            for item in iterator:
                items.put((item, None))
        except BaseException as error:
            end = error
        items.put((None, end))

    threading.Thread(target=read, daemon=True).start()
    while True:
        item, end = items.get()
        if isinstance(end, StopIteration):
            return
        if end is not None:
            raise end
        yield item
