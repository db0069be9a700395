"""Training and evaluating on a stream: records resume, are shared by ranks, and are read ahead."""

import itertools
import threading
import time
from collections import Counter

import numpy as np
import pytest

import tiny
from deit_gka.data.images import Images
from deit_gka.data.order import Order, read_ahead
from deit_gka.data.sources import open_source
from deit_gka.data.transforms import eval_transform, train_transform
from deit_gka.data.workers import evaluation_batches
from tiny_images import drawn, runtime, small_recipe, union
from tiny_vision import SIZE, encoded, photo
from trainkit_gka.cli import UserError

CARD = """---
dataset_info:
  features:
  - {{name: image, dtype: image}}
  - name: label
    dtype:
      class_label:
       names:
{names}  splits:
  - {{name: train, num_bytes: 1, num_examples: 40}}
  - {{name: validation, num_bytes: 1, num_examples: 6}}
---
"""


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """40 training images in 5 uneven files, 6 of validation."""
    datasets = pytest.importorskip("datasets")
    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.05)
    folder = tmp_path_factory.mktemp("parquet")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(label) for label in range(40)])}
    )
    for split, sizes in (("train", [11, 3, 9, 8, 9]), ("validation", [6])):
        ends = np.cumsum([0, *sizes])
        for number, (begin, end) in enumerate(itertools.pairwise(ends)):
            rows = [
                {"image": {"bytes": encoded(photo(v), "PNG"), "path": f"{split}{v}.png"}, "label": int(v)}
                for v in range(begin, end)
            ]
            path = folder / "data" / f"{split}-{number:05d}-of-{len(sizes):05d}.parquet"
            path.parent.mkdir(exist_ok=True)
            datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    names = "".join(f"        '{label}': '{label}'\n" for label in range(40))
    (folder / "README.md").write_text(CARD.format(names=names))
    yield open_source(f"hf-stream:{folder}", "train"), open_source(f"hf-stream:{folder}", "val")
    patch.undo()


def test_stream_resumes_with_the_same_records(stream):
    train, _ = stream
    recipe = small_recipe(batch_size=10, group_size=10, repeated_aug=1)
    for ranks in (1, 2):
        orders = [Order(train, recipe, runtime(rank, ranks), 4) for rank in range(ranks)]
        whole = [drawn(order, 0, 8) for order in orders]
        assert [drawn(order, 2, 7) for order in orders] == [
            part[2:7] for part in whole
        ]  # from mid-epoch, over an epoch's end
        updates = union(whole)
        epochs = [
            [update[place].item[1] for update in updates[4 * epoch :][:4] for place in range(10)] for epoch in range(2)
        ]
        if ranks == 1:
            assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(40)) and epochs[0] != epochs[1]
        seeds = [key.seed for update in updates for key in update.values()]
        assert len(set(seeds)) == len(seeds) == 80
    batch = Images(train, train_transform(recipe), training=True).__getitems__(list(whole[0][0].values()))
    assert not batch.broken and batch.labels.tolist() == [key.item[1] for key in whole[0][0].values()]


def test_short_part_of_a_stream_starts_again(stream, monkeypatch):
    train, _ = stream
    recipe = small_recipe(batch_size=10, group_size=10, repeated_aug=1)
    monkeypatch.setattr(train, "length", 80)
    labels = [key.item[1] for update in drawn(Order(train, recipe, runtime(), 10), 0, 8) for key in update.values()]
    assert Counter(labels) == dict.fromkeys(range(40), 2)


def test_stream_refuses_repeated_augmentation(stream):
    with pytest.raises(UserError, match=r"repeated augmentation needs random access .*--repeated-aug 1"):
        Order(stream[0], small_recipe(batch_size=10), runtime(), 10)


def test_evaluation_of_a_stream_sees_every_image_once(stream):
    for ranks in (1, 2):
        transform = eval_transform(SIZE, 1.0)
        parts = [evaluation_batches(stream[1], transform, runtime(rank, ranks), 4, 0) for rank in range(ranks)]
        assert sorted(label for part in parts for batch in part for label in batch.labels.tolist()) == list(range(6))


def test_read_ahead_passes_items_and_errors_and_ends():
    before, taken = set(threading.enumerate()), []

    def numbers(stop):
        for number in itertools.count():
            if number == stop:
                raise OSError("the network is gone")
            taken.append(number)
            yield number

    assert list(read_ahead(iter(range(1000)), 3)) == list(range(1000))
    ahead, got = read_ahead(numbers(5), 2), []
    with pytest.raises(OSError, match="the network is gone"):
        for number in ahead:
            got.append(number)
    assert got == [0, 1, 2, 3, 4]
    taken.clear()
    ahead = read_ahead(numbers(-1), 10)
    assert next(ahead) == 0
    while len(taken) < 10:
        time.sleep(0.002)
    time.sleep(0.2)
    assert len(taken) <= 12  # ahead, but no further
    ahead.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(tiny.HANG_AFTER)
        assert not thread.is_alive()
