"""How fast a run trains, and whether it waits for images."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from deit_gka.data.batch import ImageBatch, assemble

UPDATES_NOT_TIMED = 3  # compilation, and the workers' start


class Fetch:
    """Takes the batches of one update from a loader, and sums up over them.

    waiting: seconds until they came. loading: seconds that workers spent. broken: images, by name and reason.
    """

    def __init__(self, units: Iterator[ImageBatch]):
        self._units = units
        self.waiting = self.loading = 0.0
        self.broken: list[tuple[str, str]] = []

    def __call__(self, size: int) -> ImageBatch:
        """The next batch of `size` images."""
        started = time.perf_counter()
        batch = assemble(self._units, size)
        self.waiting += time.perf_counter() - started
        self.loading += batch.seconds
        self.broken += batch.broken
        return batch


@dataclass
class Meter:
    """Sums over updates.

    seconds: of training alone. waiting: the part of them in which the slowest process had no batch. loading: seconds
    that workers spent.
    """

    images: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    loading: float = 0.0

    def add(self, images: int, seconds: float, waiting: float, loading: float) -> None:
        self.images += images
        self.seconds += seconds
        self.waiting += min(waiting, seconds)
        self.loading += loading

    def rates(self, workers: int) -> dict[str, float | None]:
        """Images per second over all processes, and the part of the time spent waiting.

        Of training, of the model alone, and of `workers` loading workers. None for what took no time, as before
        anything is timed.
        """
        computing = self.seconds - self.waiting
        return {
            "images_per_second": self.images / self.seconds if self.seconds else None,
            "model_images_per_second": self.images / computing if computing > 0 else None,
            "loader_images_per_second": workers * self.images / self.loading if self.loading else None,
            "waiting": self.waiting / self.seconds if self.seconds else None,
        }
