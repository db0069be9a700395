"""From images to batches: which image goes where, augmentation, worker processes. Unusual in it:

- An update is a fixed set of images whatever the number of processes. They are dealt out in pairs, because Mixup and CutMix mix pairs.
- Every image has its own random seed, from (run seed, epoch, place in the epoch). So neither the number of processes nor of workers, nor
  where a run was interrupted, changes what is drawn.
- A broken image never stops training: a neighbour in the batch takes its place, and it is counted and reported.
"""

import hashlib
import os
import queue
import random
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from typing import Annotated, NamedTuple

import numpy as np
import torch
from timm.data import create_transform
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DataLoader

from deit_gka.augment import three_augment
from deit_gka.recipe import Recipe
from deit_gka.sources import BrokenImage, Record, Source, Stream, decode
from gka.runtime import workers
from gka.runtime.cli import Bounds, UserError, command_line
from gka.runtime.distributed import Runtime

MAX_WORKERS = 16
WorkerCount = Annotated[int, Bounds(0, 1024, other=(-1, "automatic"))]  # of a flag
UNIT = 64  # images a worker makes at once: at 224 pixels 39 MB of shared memory, of which a worker holds three
READ_AHEAD = 256  # records of a stream
# Seconds without a batch. A unit takes seconds, a network disk that stalls may come back after minutes; other
# processes would wait for an hour.
PATIENCE = 600.0
GLANCE = 5.0  # seconds after which to see whether the workers live


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
            raise UserError(f"--batch-size {recipe.batch_size} has too few pairs of images for {runtime.world_size} processes; raise it")
        if len(source) < recipe.batch_size:
            raise UserError(f"{source.name} has {len(source):,} training images, fewer than one batch; lower --batch-size (now {recipe.batch_size})")
        if isinstance(source, Stream) and recipe.repeated_aug > 1:
            raise UserError("repeated augmentation needs random access and a stream has none; pass --repeated-aug 1, or use a local copy")
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
            yield from self._stream(epoch, first, last) if isinstance(self.source, Stream) else self._random_access(epoch, first, last)
            step += last - first

    def _key(self, item, epoch: int, place: int) -> Key:
        return Key(item, seed_of(self.recipe.seed, "image", epoch, place))

    def _random_access(self, epoch: int, first: int, last: int) -> Iterator[list[Key]]:
        sampler = RepeatAugSampler(self.source, num_replicas=1, rank=0, num_repeats=self.recipe.repeated_aug, selected_round=0)
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
            yield from self.source.records(seed_of("pass", epoch, passes) % 2**31, self.runtime.rank, self.runtime.world_size, self.recipe.seed)
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
            made = [image or made[next((other for other in intact if other > place), intact[0])] for place, image in enumerate(made)]
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
    return _join(parts)


def _join(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    images = [part.images for part in parts if len(part.images)] or [parts[0].images]
    broken = [image for part in parts for image in part.broken]
    return Batch(torch.cat(images), torch.cat([part.labels for part in parts]), broken, sum(part.seconds for part in parts))


def train_transform(recipe: Recipe):
    """Crop, flip, RandAugment, normalise, erase (timm's, in DeiT's order), or DeiT III's. Raises UserError for a RandAugment timm does not know."""
    if recipe.three_augment:
        return three_augment(recipe)
    try:
        return create_transform(recipe.input_size, is_training=True, scale=recipe.scale, ratio=recipe.ratio, hflip=recipe.hflip,
                                auto_augment=recipe.aa or None, color_jitter=None, interpolation="bicubic", re_prob=recipe.reprob, re_mode="pixel",
                                re_count=1)  # fmt: skip
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"--aa {recipe.aa!r} is not an augmentation of timm's, such as rand-m9-mstd0.5-inc1: {error}") from None


def eval_transform(input_size: int | tuple[int, int], crop_pct: float, interpolation: str = "bicubic", **others):
    """Resize, crop the centre, normalise. others: crop_mode, mean and std, if not timm's and ImageNet's."""
    return create_transform(input_size, is_training=False, interpolation=interpolation, crop_pct=crop_pct, **others)


class Loaded(Iterator[Batch]):
    """The batches of `loader`, in order. Its workers start here and end with `end`."""

    def __init__(self, loader: DataLoader, patience: float):
        self._loader, self._patience = iter(loader), patience
        self._workers = getattr(self._loader, "_workers", [])
        self._glances = round(patience / loader.timeout) if loader.timeout else 1

    def __next__(self) -> Batch:
        """Raises UserError if the workers are silent, or dead."""
        for _ in range(self._glances):  # counted, not timed: a machine may have slept
            try:
                return next(self._loader)
            except (RuntimeError, ConnectionError, EOFError) as error:
                if not str(error).startswith("DataLoader timed out"):
                    if not (self._workers and wait([worker.sentinel for worker in self._workers], GLANCE)):
                        raise
                    break  # one died, which shows as any of these errors, perhaps before the server reports it
        # Not within `except`: the traceback would keep the workers' semaphores, and the process's end would complain.
        raise UserError(f"{self._trouble()}; continue with: {command_line()}")

    def _trouble(self) -> str:
        codes = [worker.exitcode for worker in self._workers if worker.exitcode is not None]
        for worker in self._workers:
            worker.kill()  # one that waits for a disk hears nothing else
        if not codes:
            minutes = f"{self._patience / 60:.3g} minutes"
            return f"no loading worker has sent images for {minutes}; does the disk that they are on still answer?"
        ended = f"signal {-codes[0]}" if codes[0] < 0 else f"exit code {codes[0]}"
        reasons = "out of memory, or of shared memory in /dev/shm?"
        return f"a loading worker ended with {ended} ({reasons}); it may help to lower --num-workers"

    def end(self) -> None:
        """Shut the workers down now, whoever still refers to them (a traceback may)."""
        shutdown = getattr(self._loader, "_shutdown_workers", None)
        self._loader, self._workers = iter(()), []
        if shutdown is not None:
            shutdown()


def worker_context(data: str = ""):
    """Where the workers come from that load `data`. Call it early: the first call starts importing what they need."""
    return workers.context("deit_gka", *(["datasets"] if data.startswith("hf:") else []))


def batches(images: Images, keys: Iterable[list[Key]], num_workers: int, device: torch.device) -> Loaded:
    """Run `images` over `keys` in worker processes (0: in this one); batches come in order."""
    how = dict(batch_sampler=keys, collate_fn=_whole, pin_memory=device.type == "cuda")
    if num_workers:
        how |= dict(num_workers=num_workers, prefetch_factor=2, worker_init_fn=_start_worker)
        how |= dict(multiprocessing_context=worker_context(), timeout=min(PATIENCE, GLANCE))
    return Loaded(DataLoader(images, **how), PATIENCE)


def evaluation_batches(source: Source | Stream, transform, runtime: Runtime, batch_size: int, num_workers: int) -> Iterator[Batch]:
    """This process's part of the images, in order: every image is in exactly one process's part, once."""
    if isinstance(source, Stream):
        items: Iterable = source.records(0, runtime.rank, runtime.world_size)
    else:
        items = range(runtime.rank, len(source), runtime.world_size)
    count = -(-batch_size // UNIT)
    units = _groups_of(items, batch_size // count)
    loaded = batches(Images(source, transform, training=False), units, num_workers, runtime.device)
    try:
        parts: list[Batch] = []
        for unit in loaded:
            parts.append(unit)
            if len(parts) == count:
                yield _join(parts)
                parts = []
        if parts:
            yield _join(parts)
    finally:
        loaded.end()


def _groups_of(items: Iterable, size: int) -> Iterator[list[Key]]:
    group = []
    for item in items:
        group.append(Key(item, 0))
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def default_workers() -> int:
    """Worker processes for this process: its share of the machine's cores, at most 16."""
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _whole(batch: Batch) -> Batch:
    return batch


def _start_worker(number: int) -> None:
    # Signals reach the whole process group, and the trainer still wants batches to finish its update and save; it ends its workers itself.
    signals: list[int] = []

    def on_sigterm(*_):
        signals.append(1)
        if len(signals) > 1:
            os._exit(1)

    workers.begin(on_sigterm)
