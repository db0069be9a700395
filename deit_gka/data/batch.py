"""Making batches of images from keys, in the worker processes.

A broken image never stops training: a neighbour in the batch takes its place, and the batch lists it.
"""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from deit_gka.data.order import ImageKey
from deit_gka.data.seeds import seed_everything
from deit_gka.data.sources import BrokenImage, ImageSource, ImageStream, decode
from trainkit_gka.cli import UserError, reason_of


class ImageBatch(NamedTuple):
    """Images and labels, and the images that could not be read."""

    images: torch.Tensor  # (n, 3, S, S) float32, normalised
    labels: torch.Tensor  # (n,) int64
    broken: list[tuple[str, str]]  # name and reason of every image that could not be read
    seconds: float  # that the worker took


class Images:
    """Makes batches from keys. In training a broken image is replaced by a neighbour, in evaluation it is left out.

    numbers: the model's number for each label of the source; None = the same number.
    """

    def __init__(
        self, source: ImageSource | ImageStream, transform, training: bool, numbers: Sequence[int] | None = None
    ):
        self.name, self.transform, self.training, self.numbers = source.name, transform, training, numbers
        self.source = source if isinstance(source, ImageSource) else None  # a stream's keys bring the images

    def __getitems__(self, keys: list[ImageKey]) -> ImageBatch:
        started = time.perf_counter()
        broken: list[tuple[str, str]] = []
        made = [self._make(key, broken) for key in keys]
        intact = [place for place, pair in enumerate(made) if pair is not None]
        chosen = intact
        if self.training and intact:  # the next intact image takes a broken one's place, after the last the first
            chosen = [next((k for k in intact if k >= place), intact[0]) for place in range(len(made))]
        images = torch.stack([made[k][0] for k in chosen]) if chosen else torch.empty(0, 3, 1, 1)
        labels = torch.tensor([made[k][1] for k in chosen], dtype=torch.long)
        return ImageBatch(images, labels, broken, time.perf_counter() - started)

    def _make(self, key: ImageKey, broken: list[tuple[str, str]]) -> tuple[torch.Tensor, int] | None:
        """Image and label; None for a broken image, which is added to `broken`. Raises MemoryError."""
        name = f"{self.name}, image {key.item}" if isinstance(key.item, int) else key.item[2]
        try:
            data, label, name = self.source.read(key.item) if isinstance(key.item, int) else key.item
            image = decode(data)
        except (BrokenImage, OSError) as error:
            broken.append((name, str(error)))
            return None
        if self.training:
            seed_everything(key.seed)
        try:
            return self.transform(image), label if self.numbers is None else self.numbers[label]
        except MemoryError:  # may be the machine's fault
            raise MemoryError(f"no memory is left for {name}, {image.width} x {image.height} pixels") from None
        except Exception as error:  # this image's fault: it has a shape that a transform does not take
            broken.append((name, f"{type(error).__name__}: {reason_of(error)}"))
            return None


def assemble(units: Iterator[ImageBatch], size: int) -> ImageBatch:
    """The next `size` images as one batch. Raises UserError for a unit without any readable image."""
    parts: list[ImageBatch] = []
    while sum(len(part.images) for part in parts) < size:
        parts.append(next(units))
        if not len(parts[-1].images):
            (name, reason), *more = parts[-1].broken
            first = f"the first is {name}: {reason}; is the disk still there?"
            raise UserError(f"none of {1 + len(more)} images in a row can be read, {first}")
    return join(parts)


def join(parts: list[ImageBatch]) -> ImageBatch:
    """Several batches as one."""
    if len(parts) == 1:
        return parts[0]
    images = [part.images for part in parts if len(part.images)] or [parts[0].images]
    broken = [pair for part in parts for pair in part.broken]
    labels, seconds = torch.cat([part.labels for part in parts]), sum(part.seconds for part in parts)
    return ImageBatch(torch.cat(images), labels, broken, seconds)
