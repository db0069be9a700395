"""Which images an update has, and their batches: the same for any number of processes, workers and restarts."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from torch import nn

import tiny_vision
from deit_gka.data.batch import ImageBatch, Images, assemble
from deit_gka.data.order import ImageKey, Order, read_ahead
from deit_gka.data.seeds import seed_of
from deit_gka.data.sources import open_source
from deit_gka.data.transforms import eval_transform, train_transform
from deit_gka.data.workers import batches, evaluation_batches
from deit_gka.model.checkpoints import build, parse_kwargs
from deit_gka.training.config import TrainConfig
from deit_gka.training.engine import evaluate
from deit_gka.training.images import fitted
from tiny import one_line_error
from tiny_images import CPU, Numbers, drawn, runtime, small_recipe, union
from tiny_vision import SHAPE, SIZE, encoded, photo, write_pictures
from trainkit_gka.cli import UserError


def test_images_and_seeds_do_not_depend_on_ranks():
    source, recipe = Numbers(125), small_recipe()
    one = drawn(Order(source, recipe, runtime(), 10**6), 0, 7)
    assert all(sorted(update) == list(range(40)) for update in one)
    for ranks, device_batch_size in ((1, 6), (3, 10), (7, 2)):
        orders = [Order(source, recipe, runtime(rank, ranks), device_batch_size) for rank in range(ranks)]
        assert union([drawn(order, 0, 7) for order in orders]) == one
        assert max(len(piece.places) for order in orders for piece in order.pieces) <= device_batch_size
        assert sum(len(piece.places) for order in orders for piece in order.pieces) == 40


def test_without_repeated_augmentation_every_image_is_drawn_once():
    updates = drawn(Order(Numbers(120), small_recipe(repeated_aug=1), runtime(), 256), 0, 3)
    assert Counter(key.item for update in updates for key in update.values()) == Counter(range(120))


@pytest.mark.parametrize("count,batch_size,group_size", [(4000, 1792, 256), (300, 28, 4)])
def test_groups_are_the_samples_of_timms_seven_gpus(count, batch_size, group_size):
    """Group g of our batch is the batch of GPU g, image for image; so are the pairs that are mixed."""
    order = Order(Numbers(count), small_recipe(batch_size=batch_size, group_size=group_size, seed=5), runtime(), 10**6)
    epoch = drawn(order, order.steps_per_epoch, 2 * order.steps_per_epoch)
    for gpu in range(7):
        sampler = RepeatAugSampler(range(count), num_replicas=7, rank=gpu, num_repeats=3, selected_round=256)
        sampler.set_epoch(seed_of(5, "order", 1))
        reference = list(sampler)
        reference = reference[: len(reference) // group_size * group_size]  # timm rounds down to a multiple of 256
        mine = [update[gpu + 7 * k].item for update in epoch for k in range(group_size)]
        assert len(mine) - len(reference) in (0, group_size) and mine[: len(reference)] == reference
        assert len(set(mine[:group_size])) == group_size  # copies of an image are apart


SIZES = [  # smaller sides of images, flags; the input size and the patch
    ((24, 30, 28), {}, 32, 4),  # at least 32
    ((50, 66, 400), {}, 64, 8),  # the median
    ((100, 100, 100), {}, 96, 16),
    ((800, 301, 299), {}, 224, 16),  # at most 224
    ((100, 100, 100), dict(patch_size=8), 96, 8),
    ((100, 100, 100), dict(input_size=64), 64, 8),
    ((100, 100, 100), dict(patch_size=0, model_kwargs=("patch_size=10",)), 100, 10),
    ((100, 100, 100), dict(patch_size=0), 96, None),  # the model's own, 16
]


@pytest.mark.parametrize("sides, settings, size, patch", SIZES)
def test_size_and_patches_are_those_of_the_images(sides, settings, size, patch, tmp_path):
    """The same settings continue the run, whether they are given or found; a broken image does not count."""
    folder = tmp_path / "train/cat"
    folder.mkdir(parents=True)
    for number, side in enumerate(sides):
        photo(number, size=(side + 20, side)).save(folder / f"{number}.jpg")
    (folder / "9.jpg").write_bytes(b"broken")
    config = TrainConfig(
        data=str(tmp_path), **{**dict(input_size=-1, patch_size=-1, model_kwargs=("depth=2",)), **settings}
    )
    got = fitted(config)
    assert (got.input_size, parse_kwargs(got.model_kwargs).get("patch_size"), got.patch_size) == (size, patch, 0)
    assert fitted(got) == got and fitted(TrainConfig()) == TrainConfig()


def test_images_without_a_size_are_one_line(tmp_path):
    (tmp_path / "train/cat").mkdir(parents=True)
    (tmp_path / "train/cat/1.jpg").write_bytes(b"broken")
    for data, message in ((str(tmp_path), "--input-size"), (str(tmp_path / "none"), "does not exist")):
        with one_line_error(message):
            fitted(TrainConfig(data=data, input_size=-1))


def test_too_few_images_are_one_line():
    with pytest.raises(UserError, match=r"39 .* --batch-size"):
        Order(Numbers(39), small_recipe(), runtime(), 256)
    with pytest.raises(UserError, match="--batch-size 4"):
        Order(Numbers(39), small_recipe(batch_size=4), runtime(0, 3), 256)


def test_read_ahead_passes_items_and_errors_and_ends():
    def numbers():
        yield from range(100)
        raise OSError("the network is gone")

    items = read_ahead(numbers(), 2)
    assert [next(items) for _ in range(100)] == list(range(100))
    with pytest.raises(OSError, match="the network is gone"):
        next(items)
    assert list(read_ahead(iter("abc"), 1)) == ["a", "b", "c"]


@pytest.fixture(autouse=True, scope="module")
def _workers():
    tiny_vision.server()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"), train=20, val=4)


def loaded(source, recipe, keys, workers=0):
    return list(batches(Images(source, train_transform(recipe), training=True), iter(keys), workers, CPU))


# Training


def test_workers_and_pieces_change_nothing(pictures):
    source, recipe = open_source(str(pictures), "train"), small_recipe(batch_size=20, group_size=20, reprob=1.0)
    orders = {size: list(Order(source, recipe, runtime(), size).batches(0, 3)) for size in (16, 4)}
    here = loaded(source, recipe, orders[16])
    for workers in (1, 2):
        random.seed(workers)  # what a worker inherits must not matter
        torch.manual_seed(workers)
        np.random.seed(workers)
        there = loaded(source, recipe, orders[16], workers)
        assert len(here) == len(there) == 6
        for a, b in zip(here, there):
            assert torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
    made = {key: image for batch, keys in zip(here, orders[16]) for key, image in zip(keys, batch.images)}
    for batch, keys in zip(loaded(source, recipe, orders[4]), orders[4], strict=True):
        assert all(torch.equal(made[key], image) for key, image in zip(keys, batch.images, strict=True))
    assert len({image.numpy().tobytes() for image in made.values()}) == 60  # also of an image's repeated copies


def test_pieces_are_assembled_from_units():
    """Of 300 images, 150 come from the workers at once as three units of 50."""
    source, recipe = open_source("digits", "train"), small_recipe(batch_size=300, group_size=300)
    keys = list(Order(source, recipe, runtime(), 200).batches(0, 1))
    units = iter(loaded(source, recipe, keys, 1))
    for start in (0, 3):
        batch = assemble(units, 150)
        wanted = [key for unit in keys[start : start + 3] for key in unit]
        want = Images(source, train_transform(recipe), training=True).__getitems__(wanted)
        assert torch.equal(batch.images, want.images) and torch.equal(batch.labels, want.labels)
    assert next(units, None) is None


# Broken images


def damaged(root, split, **counts):
    """Pictures with four broken files in class_0, of which one is gone after it was listed; and the names of these."""
    place, jpeg = write_pictures(root, **counts) / split / "class_0", encoded(photo(1, size=(64, 64)))
    contents = {"a_cut": jpeg[: len(jpeg) // 2], "b_empty": b"", "c_text": b"no picture", "d_gone": jpeg}
    for name, content in contents.items():
        (place / f"{name}.jpg").write_bytes(content)
    source = open_source(str(root), split)
    (place / "d_gone.jpg").unlink()
    return source, [str(place / f"{name}.jpg") for name in contents]


@pytest.mark.parametrize("workers", [0, 1])
def test_training_replaces_broken_images(tmp_path, workers):
    source, names = damaged(tmp_path, "train", train=4, val=1)
    recipe, broken, good = small_recipe(batch_size=4, group_size=4), range(4, 8), (0, 11 + 4)  # 4 more in class_0
    items = [broken[0], good[0], broken[1], broken[2], good[-1], broken[3]]
    (batch,) = loaded(source, recipe, [[ImageKey(item, 100 + item) for item in items]], workers)
    assert batch.images.shape == (6, 3, SIZE, SIZE)
    assert batch.labels.tolist() == [0, 0, 2, 2, 2, 0]  # the next intact one; after the last, the first
    for taker, giver in ((0, 1), (2, 4), (3, 4), (5, 1)):
        assert torch.equal(batch.images[taker], batch.images[giver])
    assert [name for name, _ in batch.broken][:3] == names[:3] and len(batch.broken) == 4
    (alone,) = loaded(source, recipe, [[ImageKey(good[-1], 100 + good[-1])]], workers)
    assert torch.equal(batch.images[4], alone.images[0]) and not alone.broken


def test_an_image_that_a_transform_refuses_is_broken_and_a_batch_of_them_ends_training():
    def transform(image):
        if image.getpixel((0, 0))[0] == 1:
            raise ValueError("height and width must be > 0\nmore words")
        return torch.zeros(3, 4, 4)

    keys = [ImageKey(item, 0) for item in range(3)]
    for training, labels in ((True, [0, 2, 2]), (False, [0, 2])):
        images = Images(Numbers(3), transform, training)
        batch = images.__getitems__(keys)
        assert batch.broken == [("number 1", "ValueError: height and width must be > 0")]
        assert batch.labels.tolist() == labels
    with pytest.raises(UserError, match="number 1: ValueError"):
        assemble(iter([batch, images.__getitems__([keys[1]]), batch]), 5)


def test_evaluation_leaves_broken_images_out(tmp_path):
    source, _ = damaged(tmp_path, "val", train=1, val=4)
    parts = list(evaluation_batches(source, eval_transform(SIZE, 0.875), runtime(), 5, 0))
    assert torch.cat([batch.labels for batch in parts]).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    model = build("deit_tiny_gka_patch16_224", 3, SIZE, **SHAPE)
    values = evaluate({"": model}, parts, runtime())[""]
    assert (values["images"], values["broken"]) == (12, 4)
    unreadable = ImageBatch(torch.empty(0, 3, 1, 1), torch.empty(0, dtype=torch.long), [("x", "y")], 0.0)
    with pytest.raises(UserError, match="no readable image"):
        evaluate({"": model}, [unreadable], runtime())


# Evaluation


@pytest.mark.parametrize("ranks, workers", [(1, 0), (2, 0), (3, 0), (7, 0), (2, 2)])
def test_evaluation_sees_every_image_once(ranks, workers):
    for count, size in ((23, 4), (3, 4), (150, 100)):
        seen = []
        for rank in range(ranks):
            source, part = Numbers(count, "val"), runtime(rank, ranks)
            for batch in evaluation_batches(source, eval_transform(SIZE, 1.0), part, size, workers):
                assert len(batch.labels) == len(batch.images) <= size
                seen += batch.labels.tolist()
        assert sorted(seen) == list(range(count))


class Table(nn.Module):
    """Image i, a constant of i, has row i of a table of logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, images):
        return self.logits[images[:, 0, 0, 0].long()]


def constants(labels, numbers):
    images = torch.tensor(numbers, dtype=torch.float32)[:, None, None, None].expand(-1, 3, 2, 2)
    return ImageBatch(images, torch.tensor([labels[number] for number in numbers], dtype=torch.long), [], 0.0)


def test_accuracy_is_right_whatever_the_batches():
    falling = [6.0, 5, 4, 3, 2, 1, 0]
    logits = [[9.0, 5, 4, 3, 2, 1, 0], falling[::-1], falling, [0.0, 0, 0, 0, 0, 0, 50], falling]
    labels = [0, 2, 5, 6, 4]  # right at once; fifth; sixth; right at once; fifth
    loss = sum(math.log(sum(math.exp(value) for value in row)) - row[label] for row, label in zip(logits, labels)) / 5
    expected = {"top1": 40.0, "top5": 80.0, "loss": pytest.approx(loss, rel=1e-6), "images": 5, "broken": 0}
    models = {"": Table(logits).train(), "turned": Table([row[::-1] for row in logits])}
    for split in ([[0, 1, 2, 3, 4]], [[0], [1, 2], [3, 4]], [[4, 3, 2], [1, 0]]):
        values = evaluate(models, [constants(labels, numbers) for numbers in split], runtime())
        assert values[""] == expected and values["turned"]["top1"] == 0.0 and values["turned"]["images"] == 5
    assert not models[""].training
    three = evaluate({"": Table([[0.0, 1.0, 2.0]] * 3)}, [constants([0, 1, 2], [0, 1, 2])], runtime())[""]
    assert three["top1"] == pytest.approx(100 / 3) and three["top5"] == 100.0


def test_images_per_second_are_each_models_own(monkeypatch):
    """On a clock that only models and the loading move: neither counts the other, its first batch or the loading."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    class Paced(Table):
        def __init__(self, pace):
            super().__init__([[0.0, 1.0]] * 10)
            self.pace, self.start = pace, 7.0

        def forward(self, images):
            clock[0] += len(images) / self.pace + self.start
            self.start = 0.0
            return super().forward(images)

    def loaded():
        for numbers in ([0, 1], [2, 3, 4], [5, 6, 7, 8, 9]):
            clock[0] += 3
            yield constants([0] * 10, numbers)._replace(seconds=3.0)

    values = evaluate({"model": Paced(50), "ema": Paced(200)}, loaded(), runtime(), timed=True)
    assert {name: of["images_per_second"] for name, of in values.items()} == pytest.approx({"model": 50, "ema": 200})
    assert all(of["loading"] == 9 for of in values.values())
