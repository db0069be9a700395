"""Sources, recipes and processes for tests of the order and the making of images."""

import torch
from PIL import Image

from deit_gka.data.sources import ImageSource
from deit_gka.recipe import Recipe
from tiny_vision import SIZE
from trainkit_gka.distributed import Runtime

CPU = torch.device("cpu")


def runtime(rank=0, ranks=1):
    return Runtime(rank, ranks, CPU)


class Numbers(ImageSource):
    """Image i is a gray of i, and i its label."""

    def __init__(self, count, split="train"):
        super().__init__("numbers", split, [str(label) for label in range(count)])
        self.count = count

    def __len__(self):
        return self.count

    def read(self, index):
        return Image.new("L", (12, 12), index % 256), index, f"number {index}"


def small_recipe(**settings) -> Recipe:
    return Recipe(**{**dict(epochs=3, warmup_epochs=1, batch_size=40, group_size=8, input_size=SIZE), **settings})


def drawn(order, start, stop):
    """{place: key} of each update."""
    stream = order.batches(start, stop)
    updates = [
        {place: key for unit in order.units for place, key in zip(unit, next(stream), strict=True)}
        for _ in range(start, stop)
    ]
    assert next(stream, None) is None
    return updates


def union(parts):
    """{place: key} of each update, of several processes together."""
    return [{place: key for part in parts for place, key in part[step].items()} for step in range(len(parts[0]))]
