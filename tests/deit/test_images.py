"""Making batches: the same in any process, with broken images replaced or left out; and evaluating on them."""

import itertools
import math
import random
import resource

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import tiny_vision
from deit_gka.data.batch import ImageBatch, Images, assemble
from deit_gka.data.order import ImageKey, Order
from deit_gka.data.sources import open_source
from deit_gka.data.transforms import eval_transform, train_transform
from deit_gka.data.workers import batches, evaluation_batches
from deit_gka.model.checkpoints import build
from deit_gka.training.engine import evaluate
from tiny_images import CPU, Numbers, runtime, small_recipe
from tiny_vision import SHAPE, SIZE, encoded, photo, write_pictures
from trainkit_gka.cli import UserError


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
    assert len({image.numpy().tobytes() for image in made.values()}) == 60
    assert here[0].images.shape == (10, 3, SIZE, SIZE) and here[0].images.dtype == torch.float32
    copies = [[made[key] for key in orders[16][0] if key.item == item] for item in {k.item for k in orders[16][0]}]
    assert max(map(len, copies)) > 1  # an image's copies are augmented differently
    assert all(not torch.equal(a, b) for group in copies for a, b in itertools.combinations(group, 2))


def test_pieces_are_assembled_from_units():
    source, recipe = open_source("digits", "train"), small_recipe(batch_size=300, group_size=300)
    order = Order(source, recipe, runtime(), 200)
    assert [len(piece.places) for piece in order.pieces] == [150, 150]
    assert [len(unit) for unit in order.units] == [50] * 6
    keys = list(order.batches(0, 2))
    units = iter(loaded(source, recipe, keys, 2))
    made = [assemble(units, 150) for _ in range(4)]
    assert next(units, None) is None
    alone = Images(source, train_transform(recipe), training=True)
    for place, batch in enumerate(made):
        want = alone.__getitems__([key for unit in keys[3 * place :][:3] for key in unit])
        assert torch.equal(batch.images, want.images) and torch.equal(batch.labels, want.labels)


# Broken images


def damage(root, split="train"):
    """Names of four broken files in class_0; the last vanishes once `vanish` is called."""
    place = root / split / "class_0"
    jpeg = encoded(photo(1, size=(64, 64)))
    contents = {"a_cut": jpeg[: len(jpeg) // 2], "b_empty": b"", "c_text": b"no picture", "d_gone": jpeg}
    for name, content in contents.items():
        (place / f"{name}.jpg").write_bytes(content)
    return [str(place / f"{name}.jpg") for name in contents], (place / "d_gone.jpg").unlink


@pytest.mark.parametrize("workers", [0, 1])
def test_training_replaces_broken_images(tmp_path, workers):
    names, vanish = damage(write_pictures(tmp_path, train=4, val=1))
    source, recipe = open_source(str(tmp_path), "train"), small_recipe(batch_size=4, group_size=4)
    paths = [source.read(index)[2] for index in range(len(source))]
    broken = [paths.index(name) for name in names]
    good = [index for index, path in enumerate(paths) if path not in names]
    vanish()
    items = [broken[0], good[0], broken[1], broken[2], good[-1], broken[3]]
    (batch,) = loaded(source, recipe, [[ImageKey(item, 100 + item) for item in items]], workers)
    assert batch.images.shape == (6, 3, SIZE, SIZE)
    assert batch.labels.tolist() == [0, 0, 2, 2, 2, 0]  # the next intact one; after the last, the first
    for taker, giver in ((0, 1), (2, 4), (3, 4), (5, 1)):
        assert torch.equal(batch.images[taker], batch.images[giver])
    reasons = dict(batch.broken)
    assert len(reasons) == 4 and "truncated" in reasons[names[0]] and "empty" in reasons[names[1]]
    # Those that are whole are what they would have been without the others
    (alone,) = loaded(source, recipe, [[ImageKey(good[-1], 100 + good[-1])]], workers)
    assert torch.equal(batch.images[4], alone.images[0]) and not alone.broken


NONE = ImageBatch(torch.empty(0, 3, 1, 1), torch.empty(0, dtype=torch.long), [("x", "y")], 0.0)


def test_a_batch_without_readable_images_ends_training():
    two = ImageBatch(torch.ones(2, 3, 2, 2), torch.zeros(2), [("a", "x")], 1.0)
    assert assemble(iter([two, two]), 4).broken == 2 * [("a", "x")]
    with pytest.raises(UserError, match="x: y"):
        assemble(iter([two, NONE, two]), 4)


def test_evaluation_leaves_broken_images_out(tmp_path):
    _, vanish = damage(write_pictures(tmp_path, train=1, val=4), "val")
    source = open_source(str(tmp_path), "val")
    vanish()
    parts = list(evaluation_batches(source, eval_transform(SIZE, 0.875), runtime(), 5, 0))
    assert torch.cat([batch.labels for batch in parts]).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    model = build("deit_tiny_gka_patch16_224", 3, SIZE, **SHAPE)
    values = evaluate({"": model}, [*parts, NONE], runtime())[""]
    assert (values["images"], values["broken"]) == (12, 5)
    with pytest.raises(UserError, match="no readable image"):
        evaluate({"": model}, [NONE], runtime())


@pytest.mark.parametrize("training", [True, False])
def test_an_image_that_a_transform_refuses_is_broken(training):
    def transform(image):
        if image.getpixel((0, 0))[0] == 1:
            raise ValueError("height and width must be > 0\nmore words")
        return torch.zeros(3, 4, 4)

    def exhausted(image):
        raise MemoryError

    batch = Images(Numbers(3), transform, training).__getitems__([ImageKey(item, 0) for item in range(3)])
    assert batch.broken == [("number 1", "ValueError: height and width must be > 0")]
    assert batch.labels.tolist() == ([0, 2, 2] if training else [0, 2])
    with pytest.raises(MemoryError, match="number 0"):
        Images(Numbers(3), exhausted, training).__getitems__([ImageKey(0, 0)])


# Long images


class Long(Numbers):
    """One grey image of this shape."""

    def __init__(self, shape):
        super().__init__(1)
        self.shape = shape

    def read(self, index):
        return encoded(Image.new("L", self.shape, 100), "PNG"), 0, "long"


@pytest.mark.parametrize("shape", [(1, 30_000), (30_000, 1), (4000, 3)], ids=["tall", "wide", "flat"])
def test_very_long_images_take_little_memory(shape):
    """Resized whole the first would be 256 x 7,680,000 pixels. A grey image is grey whatever its shape."""
    source, before = Long(shape), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (batch,) = evaluation_batches(source, eval_transform(224, 0.875), runtime(), 4, 0)
    recipe = small_recipe(three_augment=True, src=True, color_jitter=0)
    trained = Images(source, train_transform(recipe), training=True).__getitems__([ImageKey(0, 1)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert not batch.broken and trained.images.shape == (1, 3, SIZE, SIZE)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    grey = ((100 / 255 - mean) / std)[:, None, None].expand(3, 224, 224)
    torch.testing.assert_close(batch.images[0], grey, rtol=1e-5, atol=1e-5)


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
    models, advanced = {"": Table(logits).train(), "turned": Table([row[::-1] for row in logits])}, []
    for split in ([[0, 1, 2, 3, 4]], [[0], [1, 2], [3, 4]], [[4, 3, 2], [1, 0]]):
        values = evaluate(models, [constants(labels, numbers) for numbers in split], runtime(), advance=advanced.append)
        assert values[""] == expected and values["turned"]["top1"] == 0.0 and values["turned"]["images"] == 5
    assert not models[""].training and sum(len(batch.labels) for batch in advanced) == 15
    three = evaluate({"": Table([[0.0, 1.0, 2.0]] * 3)}, [constants([0, 1, 2], [0, 1, 2])], runtime())[""]
    assert three["top1"] == pytest.approx(100 / 3) and three["top5"] == 100.0
