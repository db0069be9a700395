"""Making batches: the same in any process, with broken images replaced or left out."""

import itertools
import random
import resource

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import tiny_vision
from deit_gka.data.images import Batch, Images, assemble
from deit_gka.data.order import UNIT, Key, Order, deal
from deit_gka.data.sources import open_source
from deit_gka.data.transforms import eval_transform, train_transform
from deit_gka.data.workers import batches, evaluation_batches
from deit_gka.model.checkpoints import build
from deit_gka.training.engine import Mixer, accumulate_gradients, evaluate
from tiny_images import CPU, Numbers, runtime, small_recipe
from tiny_vision import SHAPE, SIZE, encoded, photo, write_pictures
from trainkit_gka.cli import UserError


@pytest.fixture(autouse=True, scope="module")
def _workers():
    tiny_vision.server()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"), train=20, val=4)


def run_through(source, recipe, keys, workers, device_batch_size=16):
    order = Order(source, recipe, runtime(), device_batch_size) if keys is None else None
    keys = list(order.batches(0, 3)) if order else keys
    return list(batches(Images(source, train_transform(recipe), training=True), iter(keys), workers, CPU))


def test_workers_and_pieces_change_nothing(pictures):
    source, recipe = open_source(str(pictures), "train"), small_recipe(batch_size=20, group_size=20, reprob=1.0)
    here = run_through(source, recipe, None, 0)
    for workers in (1, 2):
        random.seed(workers)  # what a worker inherits must not matter
        torch.manual_seed(workers)
        np.random.seed(workers)
        there = run_through(source, recipe, None, workers)
        assert len(here) == len(there) == 6
        for a, b in zip(here, there):
            assert torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
    keys = {
        key: image
        for batch, keys in zip(here, Order(source, recipe, runtime(), 16).batches(0, 3))
        for key, image in zip(keys, batch.images)
    }
    for batch, piece in zip(
        run_through(source, recipe, None, 0, 4), Order(source, recipe, runtime(), 4).batches(0, 3), strict=True
    ):
        assert all(torch.equal(keys[key], image) for key, image in zip(piece, batch.images, strict=True))
    assert len({image.numpy().tobytes() for image in keys.values()}) == 60
    assert here[0].images.shape == (10, 3, SIZE, SIZE) and here[0].images.dtype == torch.float32


def test_pieces_are_assembled_from_units(pictures):
    source, recipe = open_source("digits", "train"), small_recipe(batch_size=300, group_size=300)
    order = Order(source, recipe, runtime(), 200)
    assert (
        [len(piece.places) for piece in order.pieces] == [150, 150]
        and [len(unit) for unit in order.units] == [50] * 6
        and UNIT == 64
    )
    keys = list(order.batches(0, 2))
    loaded = iter(run_through(source, recipe, keys, 2))
    made = [assemble(loaded, 150) for _ in range(4)]
    assert next(loaded, None) is None
    alone = Images(source, train_transform(recipe), training=True)
    for place, batch in enumerate(made):
        whole = alone.__getitems__([key for unit in keys[3 * place :][:3] for key in unit])
        assert torch.equal(batch.images, whole.images) and torch.equal(batch.labels, whole.labels) and batch.seconds > 0
    parts = [
        Batch(torch.ones(2, 3, 2, 2), torch.zeros(2), [("a", "x")], 1.0),
        Batch(torch.ones(1, 3, 2, 2), torch.zeros(1), [("b", "y")], 2.0),
    ]
    together = assemble(iter(parts), 3)
    assert (
        len(together.images) == len(together.labels) == 3
        and together.broken == [("a", "x"), ("b", "y")]
        and together.seconds == 3.0
    )
    none = Batch(torch.empty(0, 3, 1, 1), torch.empty(0), [("c", "z")], 0.0)
    assert assemble(iter([parts[0], none, parts[1]]), 4) is none


def test_copies_of_an_image_are_augmented_differently(pictures):
    source, recipe = open_source(str(pictures), "train"), small_recipe(batch_size=30, group_size=30)
    order = Order(source, recipe, runtime(), 256)
    (keys,) = order.batches(0, 1)
    made = Images(source, train_transform(recipe), training=True).__getitems__(keys).images
    copies = [
        [made[place] for place, key in enumerate(keys) if key.item == item] for item in {key.item for key in keys}
    ]
    assert sorted({len(group) for group in copies}) == [3]
    assert all(not torch.equal(a, b) for group in copies for a, b in itertools.combinations(group, 2))


def damage(root, split="train"):
    """Four broken files in class_0, by name; the last vanishes once `vanish` is called."""
    place = root / split / "class_0"
    whole = encoded(photo(1, size=(64, 64)))
    (place / "a_cut.jpg").write_bytes(whole[: len(whole) // 2])
    (place / "b_empty.jpg").write_bytes(b"")
    (place / "c_text.jpg").write_text("this is not a picture")
    (place / "d_gone.jpg").write_bytes(encoded(photo(2)))
    names = [str(place / name) for name in ("a_cut.jpg", "b_empty.jpg", "c_text.jpg", "d_gone.jpg")]
    return names, (place / "d_gone.jpg").unlink


@pytest.mark.parametrize("workers", [0, 1])
def test_training_replaces_broken_images(tmp_path, workers):
    names, vanish = damage(write_pictures(tmp_path, train=4, val=1))
    source, recipe = open_source(str(tmp_path), "train"), small_recipe(batch_size=4, group_size=4)
    paths = [source.read(index)[2] for index in range(len(source))]
    broken, good = (
        [paths.index(name) for name in names],
        [index for index, path in enumerate(paths) if path not in names],
    )
    vanish()
    items = [broken[0], good[0], broken[1], broken[2], good[-1], broken[3]]
    (batch,) = run_through(source, recipe, [[Key(item, 100 + item) for item in items]], workers)
    assert batch.images.shape == (6, 3, SIZE, SIZE)
    assert batch.labels.tolist() == [0, 0, 2, 2, 2, 0]  # the next intact one; after the last, the first
    for taker, giver in ((0, 1), (2, 4), (3, 4), (5, 1)):
        assert torch.equal(batch.images[taker], batch.images[giver])
    reasons = dict(batch.broken)
    assert [name.rsplit("/", 1)[-1].split(",")[0] for name, _ in batch.broken][:3] == [
        "a_cut.jpg",
        "b_empty.jpg",
        "c_text.jpg",
    ]
    assert (
        len(batch.broken) == 4
        and "truncated" in reasons[names[0]]
        and "empty" in reasons[names[1]]
        and "not a JPEG" in reasons[names[2]]
    )
    assert "d_gone.jpg" in " ".join(batch.broken[3])
    # Those that are whole are what they would have been without the others
    (alone,) = run_through(source, recipe, [[Key(good[-1], 100 + good[-1])]], workers)
    assert torch.equal(batch.images[4], alone.images[0]) and not alone.broken


def test_evaluation_leaves_broken_images_out(tmp_path):
    _, vanish = damage(write_pictures(tmp_path, train=1, val=4), "val")
    source = open_source(str(tmp_path), "val")
    vanish()
    found = list(evaluation_batches(source, eval_transform(SIZE, 0.875), runtime(), 5, 0))
    assert [len(batch.images) for batch in found] == [4, 2, 5, 1]  # class_0's broken ones come behind its four
    assert torch.cat([batch.labels for batch in found]).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert len([name for batch in found for name, _ in batch.broken]) == 4
    model = build("deit_tiny_gka_patch16_224", 3, SIZE, **SHAPE)
    values = evaluate({"": model}, found, runtime())[""]
    assert (values["images"], values["broken"]) == (12, 4)
    only_broken = [Batch(torch.empty(0, 3, 1, 1), torch.empty(0, dtype=torch.long), [("x", "y")], 0.0)]
    assert evaluate({"": model}, [*found, *only_broken], runtime())[""]["broken"] == 5
    with pytest.raises(UserError, match="no readable image"):
        evaluate({"": model}, only_broken, runtime())


def test_a_batch_without_readable_images_is_one_line(tmp_path):
    names, _ = damage(write_pictures(tmp_path, train=2, val=1))
    source, recipe = open_source(str(tmp_path), "train"), small_recipe(batch_size=2, group_size=2)
    paths = [source.read(index)[2] for index in range(len(source))]
    loaded = iter(run_through(source, recipe, [[Key(paths.index(name), 0) for name in names[:2]]], 0))
    model = build("deit_tiny_gka_patch16_224", 3, SIZE, **SHAPE)
    pieces = deal(2, 2, range(1), 2)
    with pytest.raises(
        UserError, match=r"none of 2 images in a row can be read, the first is .*a_cut\.jpg: .*truncated.*disk"
    ):
        accumulate_gradients(model, pieces, lambda size: assemble(loaded, size), Mixer(recipe, 3), 0, runtime())


FORMS = {
    "gray": lambda: encoded(Image.new("L", (20, 20), 100), "PNG"),
    "cmyk": lambda: encoded(photo(3).convert("CMYK")),
    "16 bit": lambda: encoded(Image.fromarray(np.full((20, 20), 100 * 257, np.uint16)), "PNG"),
    "palette": lambda: encoded(photo(4).convert("P"), "PNG"),
    "alpha": lambda: encoded(photo(5).convert("RGBA"), "PNG"),
    "one pixel": lambda: encoded(Image.new("RGB", (1, 1), (9, 9, 9)), "PNG"),
    "long": lambda: encoded(photo(6, size=(300, 2)), "PNG"),
}


def test_odd_images_can_be_augmented():
    recipe = small_recipe(aa="rand-m10-n4-inc1", reprob=0.5)

    class Odd(Numbers):
        def read(self, index):
            return FORMS[list(FORMS)[index]](), index, "odd"

    source = Odd(len(FORMS))
    keys = [Key(item, seed) for item in range(len(FORMS)) for seed in range(15)]
    batch = Images(source, train_transform(recipe), training=True).__getitems__(keys)
    assert not batch.broken and batch.images.shape == (15 * len(FORMS), 3, SIZE, SIZE) and batch.images.isfinite().all()
    (clean,) = evaluation_batches(source, eval_transform(SIZE, 0.875), runtime(), 100, 0)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = ((100 / 255 - mean) / std)[:, None, None].expand(3, SIZE, SIZE)
    for place in (list(FORMS).index("gray"), list(FORMS).index("16 bit")):
        torch.testing.assert_close(clean.images[place], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_image_once(workers):
    source = Numbers(23, "val")
    for ranks in (1, 2, 3, 7) if not workers else (2,):
        seen = []
        for rank in range(ranks):
            for batch in evaluation_batches(source, eval_transform(SIZE, 1.0), runtime(rank, ranks), 4, workers):
                assert len(batch.labels) == len(batch.images) <= 4
                seen += batch.labels.tolist()
        assert sorted(seen) == list(range(23))
    transform = eval_transform(SIZE, 1.0)
    sizes = [len(batch.labels) for batch in evaluation_batches(Numbers(150), transform, runtime(), 100, 0)]
    assert sizes == [100, 50]
    few = [evaluation_batches(Numbers(3, "val"), transform, runtime(rank, 7), 4, 0) for rank in range(7)]
    assert sorted(label for part in few for batch in part for label in batch.labels.tolist()) == [0, 1, 2]


LONG = {"tall": (1, 30_000), "wide": (30_000, 1), "flat": (4000, 3)}


@pytest.mark.parametrize("shape", LONG)
def test_very_long_images_take_little_memory(shape):
    """Resized whole the first would be 256 x 7,680,000 pixels. A grey image is grey whatever its shape."""

    class Long(Numbers):
        def read(self, index):
            return encoded(Image.new("L", LONG[shape], 100), "PNG"), 0, "long"

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (batch,) = evaluation_batches(Long(1), eval_transform(224, 0.875), runtime(), 4, 0)
    recipe = small_recipe(three_augment=True, src=True, color_jitter=0)
    trained = Images(Long(1), train_transform(recipe), training=True).__getitems__([Key(0, 1)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert not batch.broken and batch.images.shape == (1, 3, 224, 224) and trained.images.shape == (1, 3, SIZE, SIZE)
    expected = (100 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(batch.images[0], expected[:, None, None].expand(3, 224, 224), rtol=1e-5, atol=1e-5)


def test_ordinary_images_are_cropped_as_timm_crops_them():
    image = photo(1, size=(300, 20))
    expected = timm.data.create_transform((3, 32, 32), crop_pct=0.875, interpolation="bicubic")(image)
    assert torch.equal(eval_transform(32, 0.875)(image), expected)
    long = photo(1, size=(1000, 20))  # only the middle of which is seen
    expected = timm.data.create_transform((3, 32, 32), crop_pct=0.875, interpolation="bicubic")(long)
    torch.testing.assert_close(eval_transform(32, 0.875)(long), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("training", [True, False])
def test_an_image_that_a_transform_refuses_is_broken(training):
    def transform(image):
        if image.getpixel((0, 0))[0] == 1:
            raise ValueError("height and width must be > 0\nmore words")
        return torch.zeros(3, 4, 4)

    batch = Images(Numbers(3), transform, training).__getitems__([Key(item, 0) for item in range(3)])
    assert batch.broken == [("number 1", "ValueError: height and width must be > 0")]
    assert batch.labels.tolist() == ([0, 2, 2] if training else [0, 2])

    def exhausted(image):
        raise MemoryError

    with pytest.raises(MemoryError, match=r"no memory is left for number 0, 12 x 12 pixels"):
        Images(Numbers(3), exhausted, training).__getitems__([Key(0, 0)])
