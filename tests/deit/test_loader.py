"""The images of every update, what is done to them, and what one update computes: the same for any number of processes, workers and restarts."""

import itertools
import math
import random
import threading
import time
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.mixup import Mixup
from torch import nn

import tiny
import tiny_vision
from deit_gka.data import loader
from deit_gka.data.loader import (
    UNIT,
    Batch,
    Images,
    Key,
    Order,
    assemble,
    deal,
    eval_transform,
    read_ahead,
    seed_of,
    train_transform,
)
from deit_gka.data.sources import Source, open_source
from deit_gka.data.workers import batches, evaluation_batches
from deit_gka.model.checkpoints import build
from deit_gka.recipe import Recipe
from deit_gka.training.engine import Mixer, accumulate_gradients, autocast, bandwidths, evaluate
from deit_gka.training.optim import load_state_tensors, make_average, make_optimizer, make_schedule, state_tensors
from tiny_vision import SHAPE, SIZE, encoded, photo, write_pictures
from trainkit.cli import UserError
from trainkit.distributed import Runtime

CPU = torch.device("cpu")
RANKS = (1, 2, 3, 5, 7, 8)
GROUPS = [(48, 8), (56, 8), (50, 8), (16, 16), (1792, 256)]  # 50 is no multiple of 8: one group


def runtime(rank=0, ranks=1):
    return Runtime(rank, ranks, CPU)


class Numbers(Source):
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


@pytest.fixture(autouse=True, scope="module")
def _workers():
    tiny_vision.server()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"), train=20, val=4)


# --- Recipe ---

PAPER = dict(  # paper, section 4.1
    epochs=300, batch_size=7 * 256, group_size=256, lr=1e-3, weight_decay=0.05, opt_betas=(0.9, 0.999), clip_grad=1.0, warmup_epochs=5,
    min_lr=1e-6, input_size=224, scale=(0.08, 1.0), reprob=0.25, repeated_aug=3, mixup=0.8, cutmix=1.0, smoothing=0.1, model_ema_decay=0.99996,
)  # fmt: skip
DEIT = dict(  # left open by the paper: the recipe it follows
    warmup_lr=1e-6, ratio=(3 / 4, 4 / 3), hflip=0.5, aa="rand-m9-mstd0.5-inc1", crop_pct=0.875, seed=0,
)  # fmt: skip
OURS = dict(drop_path=-1.0, model_ema_warmup=True, amp="auto")
NOT_THE_PAPERS = dict(  # DeiT's distillation and DeiT III's loss and augmentation: off, with upstream's values for when they are on
    three_augment=False, src=False, color_jitter=0.3, bce_loss=False, distillation_type="none", teacher_model="regnety_160.deit_in1k", teacher_path="",
    distillation_alpha=0.5, distillation_tau=1.0,
)  # fmt: skip


def test_the_defaults_are_the_papers():
    recipe = Recipe()
    assert {field.name: getattr(recipe, field.name) for field in fields(Recipe)} == {
        **PAPER,
        **DEIT,
        **OURS,
        **NOT_THE_PAPERS,
    }
    assert recipe.scaled_lr == pytest.approx(1.75e-3)
    rates = {size: recipe.drop_path_of(f"deit_{size}_gka_patch16_224") for size in ("tiny", "small", "base")}
    assert rates == {"tiny": 0.1, "small": 0.1, "base": 0.2} and recipe.drop_path_of("deit_base_patch16_224") == 0.2
    assert Recipe(drop_path=0.0).drop_path_of("deit_base_patch16_224") == 0.0
    recipe.check()


@pytest.mark.parametrize(
    "name,values",
    [("epochs", (0, -1)), ("repeated_aug", (0,)), ("input_size", (0,)), ("batch_size", (0, 7, -2)), ("group_size", (0, 3)), ("weight_decay", (-0.1, math.nan)),
     ("clip_grad", (-1.0,)), ("warmup_epochs", (-1.0, 301)), ("mixup", (-0.1,)), ("cutmix", (-0.1,)), ("seed", (-1,)), ("lr", (0.0, -1.0, math.nan)),
     ("warmup_lr", (0.0,)), ("min_lr", (0.0,)), ("hflip", (-0.1, 1.1)), ("reprob", (1.5, math.nan)), ("smoothing", (1.0, -0.1)),
     ("model_ema_decay", (1.0, -0.5)), ("opt_betas", ((0.9, 1.0), (-0.1, 0.9))), ("crop_pct", (0.0, 1.1)), ("drop_path", (1.0, -0.5)),
     ("scale", ((0.0, 1.0), (0.5, 0.1), (0.5, 1.5))), ("ratio", ((0.0, 1.0), (2.0, 1.0)))],
)  # fmt: skip
def test_values_that_make_no_sense_name_the_flag(name, values):
    for value in values:
        with pytest.raises(UserError, match=f"^--{name.replace('_', '-')} must be ") as caught:
            Recipe(**{name: value}).check()
        assert "\n" not in str(caught.value)


# --- Dealing ---


@pytest.mark.parametrize("batch_size,group_size", GROUPS)
def test_every_place_is_dealt_once_in_pairs_of_its_group(batch_size, group_size):
    groups = batch_size // group_size if batch_size % group_size == 0 else 1
    n = batch_size // groups
    for ranks, device_batch_size in itertools.product(RANKS, (2, 3, 10, 256, 10**6)):
        shares = [
            deal(batch_size, group_size, runtime(rank, ranks).share(batch_size // 2), device_batch_size)
            for rank in range(ranks)
        ]
        assert sorted(place for pieces in shares for piece in pieces for place in piece.places) == list(
            range(batch_size)
        )
        for rank, pieces in enumerate(shares):
            sizes = [len(piece.places) for piece in pieces]
            pairs = len(runtime(rank, ranks).share(batch_size // 2))
            assert max(sizes) <= device_batch_size and max(sizes) - min(sizes) <= 2
            assert len(sizes) == -(-pairs // (device_batch_size // 2))  # no more than are needed
            for piece in pieces:
                begin = 0
                for group, length in piece.parts:
                    part = piece.places[begin : begin + length]
                    assert {place % groups for place in part} == {group}  # every G-th image, as G GPUs have them
                    inside = [place // groups for place in part]
                    assert all(k + other == n - 1 for k, other in zip(inside, reversed(inside)))
                    begin += length
                assert begin == len(piece.places)


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
    return [{place: key for part in parts for place, key in part[step].items()} for step in range(len(parts[0]))]


def test_a_place_has_the_same_image_and_seed_on_any_number_of_ranks():
    source, recipe = Numbers(125), small_recipe()
    one = drawn(Order(source, recipe, runtime(), 10**6), 0, 7)
    assert all(sorted(update) == list(range(40)) for update in one)
    for ranks, device_batch_size in ((1, 6), (3, 10), (7, 2)):
        assert (
            union(
                [drawn(Order(source, recipe, runtime(rank, ranks), device_batch_size), 0, 7) for rank in range(ranks)]
            )
            == one
        )


def test_starting_anywhere_gives_what_running_there_gives():
    order = Order(Numbers(125), small_recipe(), runtime(1, 3), 8)  # 3 updates an epoch
    whole = drawn(order, 0, 9)
    assert order.steps_per_epoch == 3
    for start, stop in itertools.combinations(range(10), 2):
        assert drawn(order, start, stop) == whole[start:stop]


def test_repeated_augmentation_draws_a_third_of_the_images_three_times():
    updates = drawn(Order(Numbers(240), small_recipe(), runtime(), 256), 0, 6)
    for epoch in range(2):
        items = Counter(key.item for update in updates[6 * epoch // 2 :][:3] for key in update.values())
        assert set(items.values()) == {3} and len(items) == 40
    epoch = drawn(Order(Numbers(123), small_recipe(), runtime(), 256), 0, 3)  # 120 of 123 draws
    items = Counter(key.item for update in epoch for key in update.values())
    assert sum(items.values()) == 120 and len(items) == 40 and set(items.values()) == {3}
    once = Counter(
        key.item
        for update in drawn(Order(Numbers(120), small_recipe(repeated_aug=1), runtime(), 256), 0, 3)
        for key in update.values()
    )
    assert once == Counter(range(120))


@pytest.mark.parametrize("count,batch_size,group_size", [(4000, 1792, 256), (300, 28, 4)])
def test_the_papers_seven_gpus_get_timms_seven_samplers_images(count, batch_size, group_size):
    """Group g of our batch is the batch of GPU g, image for image; so are the pairs that are mixed."""
    recipe = small_recipe(batch_size=batch_size, group_size=group_size, seed=5)
    order = Order(Numbers(count), recipe, runtime(), 10**6)
    epoch = drawn(order, order.steps_per_epoch, 2 * order.steps_per_epoch)
    copies_apart = True
    for gpu in range(7):
        sampler = RepeatAugSampler(range(count), num_replicas=7, rank=gpu, num_repeats=3, selected_round=256)
        sampler.set_epoch(seed_of(5, "order", 1))
        reference = list(sampler)
        reference = reference[
            : len(reference) // group_size * group_size
        ]  # whole batches; timm rounds the images down to a multiple of 256
        mine = [update[gpu + 7 * k].item for update in epoch for k in range(group_size)]
        assert len(mine) - len(reference) in (0, group_size) and mine[: len(reference)] == reference
        copies_apart &= len(set(mine[:group_size])) == group_size
    assert copies_apart


def test_epochs_and_seeds_differ():
    orders = {}
    for seed in (0, 1):
        updates = drawn(Order(Numbers(40), small_recipe(seed=seed), runtime(), 256), 0, 3)  # one update an epoch
        for epoch, update in enumerate(updates):
            orders[seed, epoch] = tuple(update[place].item for place in range(40))
            for key in update.values():
                orders.setdefault("seeds", []).append(key.seed)
    seeds = orders.pop("seeds")
    assert len(set(orders.values())) == 6 and len(set(seeds)) == len(seeds) == 240


def test_copies_of_an_image_in_a_batch_are_augmented_differently(pictures):
    source, recipe = open_source(str(pictures), "train"), small_recipe(batch_size=30, group_size=30)
    order = Order(source, recipe, runtime(), 256)
    (keys,) = order.batches(0, 1)
    made = Images(source, train_transform(recipe), training=True).__getitems__(keys).images
    copies = [
        [made[place] for place, key in enumerate(keys) if key.item == item] for item in {key.item for key in keys}
    ]
    assert sorted({len(group) for group in copies}) == [3]
    assert all(not torch.equal(a, b) for group in copies for a, b in itertools.combinations(group, 2))


def test_mistakes_of_the_order_are_one_line():
    with pytest.raises(
        UserError, match=r"numbers has 39 training images, fewer than one batch; lower --batch-size \(now 40\)"
    ):
        Order(Numbers(39), small_recipe(), runtime(), 256)
    with pytest.raises(UserError, match="--batch-size 4 has too few pairs of images for 3 processes"):
        Order(Numbers(39), small_recipe(batch_size=4), runtime(0, 3), 256)


# --- Images ---


def run_through(source, recipe, keys, workers, device_batch_size=16):
    order = Order(source, recipe, runtime(), device_batch_size) if keys is None else None
    keys = list(order.batches(0, 3)) if order else keys
    return list(batches(Images(source, train_transform(recipe), training=True), iter(keys), workers, CPU))


def test_workers_and_pieces_change_no_bit(pictures):
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


def test_a_large_piece_is_made_in_units_and_put_together_again(pictures):
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


def damage(root, split="train"):
    """Four broken files in class_0, by name; the last vanishes once `vanish` is called."""
    place = root / split / "class_0"
    whole = encoded(photo(1, size=(64, 64)))
    (place / "a_cut.jpg").write_bytes(whole[: len(whole) // 2])
    (place / "b_empty.jpg").write_bytes(b"")
    (place / "c_text.jpg").write_text("this is no picture")
    (place / "d_gone.jpg").write_bytes(encoded(photo(2)))
    names = [str(place / name) for name in ("a_cut.jpg", "b_empty.jpg", "c_text.jpg", "d_gone.jpg")]
    return names, (place / "d_gone.jpg").unlink


@pytest.mark.parametrize("workers", [0, 1])
def test_broken_images_are_replaced_in_training_and_named(tmp_path, workers):
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


def test_broken_images_are_left_out_of_an_evaluation(tmp_path):
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


def test_a_batch_without_one_readable_image_is_a_user_error(tmp_path):
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


def test_odd_images_go_through_the_whole_augmentation():
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


def test_the_strongest_posterize_leaves_nothing_of_an_image():
    """0 bits: an error in Pillow 13, an image in a thousand at the paper's magnitude."""
    from timm.data.auto_augment import AugmentOp

    black = AugmentOp("PosterizeIncreasing", prob=1.0, magnitude=10)(photo(1))
    assert np.asarray(black).max() == 0
    augment = train_transform(small_recipe(aa="rand-m10-inc1")).transforms[2]
    darkest = 255
    for seed in range(150):
        loader.seed_everything(seed)
        darkest = min(darkest, np.asarray(augment(photo(seed))).max())
    assert darkest == 0


def test_the_transforms_are_deits():
    text = str(train_transform(Recipe()))
    assert (
        "size=(224, 224), scale=(0.08, 1.0), ratio=(0.75, 1.3333), interpolation=bicubic" in text
        and "RandomHorizontalFlip(p=0.5)" in text
    )
    assert (
        "RandAugment(n=2" in text
        and "m=9" in text
        and "mstd=0.5" in text
        and "PosterizeIncreasing" in text
        and "ColorJitter" not in text
    )
    assert "RandomErasing(p=0.25, mode=pixel, count=(1, 1))" in text
    assert "RandAugment" not in str(train_transform(Recipe(aa="", reprob=0.0))) and "Erasing" not in str(
        train_transform(Recipe(reprob=0.0))
    )
    text = str(eval_transform(224, 0.875))
    assert "Resize(size=256, interpolation=bicubic" in text and "CenterCrop(size=(224, 224))" in text


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_sees_every_image_once(workers):
    source = Numbers(23, "val")
    for ranks in (1, 2, 3, 7) if not workers else (2,):
        seen = []
        for rank in range(ranks):
            for batch in evaluation_batches(source, eval_transform(SIZE, 1.0), runtime(rank, ranks), 4, workers):
                assert len(batch.labels) == len(batch.images) <= 4
                seen += batch.labels.tolist()
        assert sorted(seen) == list(range(23))
    assert [
        len(batch.labels) for batch in evaluation_batches(Numbers(150), eval_transform(SIZE, 1.0), runtime(), 100, 0)
    ] == [100, 50]
    few = [label for rank in range(7) for batch in evaluation_batches(Numbers(3, "val"), eval_transform(SIZE, 1.0), runtime(rank, 7), 4, 0)
           for label in batch.labels.tolist()]  # fmt: skip
    assert sorted(few) == [0, 1, 2]


# --- Streams ---


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
    (folder / "README.md").write_text(
        "---\ndataset_info:\n  features:\n  - {name: image, dtype: image}\n  - name: label\n    dtype:\n      class_label:\n       names:\n"
        + names + "  splits:\n  - {name: train, num_bytes: 1, num_examples: 40}\n  - {name: validation, num_bytes: 1, num_examples: 6}\n---\n"
    )  # fmt: skip
    yield open_source(f"hf-stream:{folder}", "train"), open_source(f"hf-stream:{folder}", "val")
    patch.undo()


def test_a_stream_resumes_with_the_same_records(stream):
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


def test_a_rank_whose_part_of_a_stream_is_short_starts_on_it_again(stream, monkeypatch):
    train, _ = stream
    recipe = small_recipe(batch_size=10, group_size=10, repeated_aug=1)
    monkeypatch.setattr(train, "length", 80)
    labels = [key.item[1] for update in drawn(Order(train, recipe, runtime(), 10), 0, 8) for key in update.values()]
    assert Counter(labels) == dict.fromkeys(range(40), 2)


def test_a_stream_and_repeated_augmentation_are_one_line(stream):
    with pytest.raises(UserError, match=r"repeated augmentation needs random access .*--repeated-aug 1"):
        Order(stream[0], small_recipe(batch_size=10), runtime(), 10)


def test_an_evaluation_of_a_stream_sees_every_image_once(stream):
    for ranks in (1, 2):
        labels = [label for rank in range(ranks) for batch in evaluation_batches(stream[1], eval_transform(SIZE, 1.0), runtime(rank, ranks), 4, 0)
                  for label in batch.labels.tolist()]  # fmt: skip
        assert sorted(labels) == list(range(6))


def test_read_ahead_gives_the_same_items_and_errors_and_ends_its_thread():
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


# --- Mixing ---


def prepared(source, recipe, ranks=1, device_batch_size=10**6, step=0):
    """For each rank: (pieces, their batches) of one update."""
    found = []
    for rank in range(ranks):
        order = Order(source, recipe, runtime(rank, ranks), device_batch_size)
        images = Images(source, train_transform(recipe), training=True)
        units = (images.__getitems__(keys) for keys in order.batches(step, step + 1))
        found.append((order.pieces, [assemble(units, len(piece.places)) for piece in order.pieces]))
        assert next(units, None) is None
    return found


def test_one_group_is_mixed_as_timm_does():
    recipe, kinds = small_recipe(batch_size=16, group_size=16, seed=3), set()
    (piece,) = deal(16, 16, range(8), 16)
    for step in range(12):
        images, labels = torch.randn(16, 3, SIZE, SIZE), torch.randint(10, (16,))
        np.random.seed(seed_of(3, "mix", step, 0) % 2**32)
        reference = Mixup(0.8, 1.0, prob=1.0, switch_prob=0.5, mode="batch", label_smoothing=0.1, num_classes=10)(
            images.clone(), labels
        )
        np.random.seed(step)
        got = Mixer(recipe, 10)(images.clone(), labels, piece.parts, step)
        assert torch.equal(got[0], reference[0]) and torch.equal(got[1], reference[1])
        kinds.add("cutmix" if (got[0] == images).any() else "mixup")
        torch.testing.assert_close(got[1].sum(1), torch.ones(16))
    assert kinds == {"cutmix", "mixup"}


def test_a_groups_draw_does_not_depend_on_how_the_batch_is_dealt():
    source, recipe = open_source("digits", "train"), small_recipe(batch_size=24, group_size=8)
    mixer, lambdas = Mixer(recipe, 10), set()
    for step in (0, 1, 5):
        mixed = []
        for ranks, device_batch_size in ((1, 10**6), (1, 4), (2, 6), (3, 10), (5, 2)):
            places = {}
            for pieces, loaded in prepared(source, recipe, ranks, device_batch_size, step):
                for piece, batch in zip(pieces, loaded, strict=True):
                    images, targets = mixer(batch.images, batch.labels, piece.parts, step)
                    places |= {
                        place: (image.numpy().tobytes(), target.numpy().tobytes())
                        for place, image, target in zip(piece.places, images, targets)
                    }
                    lambdas |= {round(target.max().item(), 5) for target in targets}
            mixed.append(places)
        assert len(mixed[0]) == 24 and all(places == mixed[0] for places in mixed)
    assert len(lambdas) > 5  # groups and updates draw their own


def test_without_mixing_only_labels_are_smoothed():
    images, labels = torch.randn(4, 3, SIZE, SIZE), torch.tensor([0, 1, 2, 2])
    got, targets = Mixer(small_recipe(mixup=0.0, cutmix=0.0, smoothing=0.3), 3)(images.clone(), labels, [(0, 4)], 0)
    assert torch.equal(got, images)
    torch.testing.assert_close(targets, torch.eye(3)[labels] * 0.7 + 0.1)


# --- One update ---


def gradients(recipe, ranks=1, device_batch_size=10**6, step=0, amp_scale=None):
    """What DDP leaves in .grad: the mean over ranks. And the batch's mean loss."""
    source = open_source("digits", "train")
    torch.manual_seed(1)
    model = build("deit_tiny_gka_patch16_224", 10, SIZE, drop_path_rate=recipe.drop_path_of("tiny"), **SHAPE).train()
    total, loss = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}, 0.0
    for rank, (pieces, loaded) in enumerate(prepared(source, recipe, ranks, device_batch_size, step)):
        model.zero_grad()
        waiting = iter(loaded)
        how = {} if amp_scale is None else {"scale": amp_scale}
        update = accumulate_gradients(
            model,
            pieces,
            lambda size, waiting=waiting: next(waiting),
            Mixer(recipe, 10),
            step,
            runtime(rank, ranks),
            **how,
        )
        loss += update.loss.item()
        for name, parameter in model.named_parameters():
            total[name] += parameter.grad / ranks
        assert next(waiting, None) is None
    return total, loss


def assert_close_gradients(one, other, tolerance):
    for name in one:
        assert (one[name] - other[name]).norm() <= tolerance * one[name].norm(), name


def test_an_update_has_the_same_gradient_in_one_piece_in_many_and_on_ranks():
    recipe = small_recipe(batch_size=24, group_size=8, drop_path=0.0, amp="float32")
    for step in (0, 1):
        one, loss = gradients(recipe, step=step)
        assert all(gradient.norm() > 0 for gradient in one.values())
        for ranks, device_batch_size in ((1, 4), (2, 10**6), (3, 6), (5, 2)):
            other, other_loss = gradients(recipe, ranks, device_batch_size, step)
            assert_close_gradients(one, other, 2e-5)
            assert other_loss == pytest.approx(loss, rel=1e-6)


def test_the_loss_is_soft_cross_entropy_of_the_mixed_batch():
    recipe = small_recipe(batch_size=24, group_size=24, drop_path=0.0, amp="float32")
    ((pieces, loaded),) = prepared(open_source("digits", "train"), recipe)
    torch.manual_seed(1)
    model = build("deit_tiny_gka_patch16_224", 10, SIZE, drop_path_rate=0.0, **SHAPE).train()
    images, targets = Mixer(recipe, 10)(*loaded[0][:2], pieces[0].parts, 0)
    expected = -(targets * model(images).log_softmax(1)).sum() / 24
    expected.backward()
    got, loss = gradients(recipe)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_close_gradients({name: parameter.grad for name, parameter in model.named_parameters()}, got, 1e-5)


def test_stochastic_depth_is_drawn_from_the_updates_number():
    recipe = small_recipe(batch_size=24, group_size=8, drop_path=0.5, amp="float32")
    one, other = gradients(recipe)[0], gradients(recipe)[0]
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(
        not torch.equal(one[name], value)
        for name, value in gradients(small_recipe(batch_size=24, group_size=8, drop_path=0.0))[0].items()
    )


def test_reduced_precision_gives_nearly_the_same_gradient():
    recipe = dict(batch_size=24, group_size=8, drop_path=0.0)
    exact, _ = gradients(small_recipe(**recipe, amp="float32"))
    half, _ = gradients(small_recipe(**recipe, amp="bfloat16"))
    assert_close_gradients(exact, half, 0.1)
    assert any(not torch.equal(exact[name], half[name]) for name in exact)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, _ = gradients(small_recipe(**recipe, amp="float16"), amp_scale=scaler.scale)
    assert_close_gradients(exact, {name: value / 1024 for name, value in scaled.items()}, 0.05)
    with autocast(CPU, "auto"):
        assert not torch.is_autocast_enabled("cpu")
    with autocast(CPU, "bfloat16"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_bandwidths_are_the_models():
    model = build("deit_tiny_gka_patch16_224", 10, SIZE, sigma_squared=4.0, **SHAPE)
    assert list(bandwidths(model)) == [(layer, pytest.approx([2.0, 2.0])) for layer in range(2)]
    assert list(bandwidths(build("deit_tiny_patch16_224", 10, SIZE, **SHAPE))) == []


# --- Evaluation ---


class Table(nn.Module):
    """Image i, a constant of i, has row i of a table of logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, images):
        return self.logits[images[:, 0, 0, 0].long()]


class Everyone(Runtime):
    """Ranks one after another; the last has the sum."""

    total: torch.Tensor | None = None

    def sum(self, tensor):
        Everyone.total = tensor if self.rank == 0 else Everyone.total + tensor
        return Everyone.total


def constants(labels, numbers):
    images = torch.tensor(numbers, dtype=torch.float32)[:, None, None, None].expand(-1, 3, 2, 2)
    return Batch(images, torch.tensor([labels[number] for number in numbers], dtype=torch.long), [], 0.0)


def test_accuracy_by_hand():
    logits = [
        [9.0, 5, 4, 3, 2, 1, 0],
        [0.0, 1, 2, 3, 4, 5, 6],
        [6.0, 5, 4, 3, 2, 1, 0],
        [0.0, 0, 0, 0, 0, 0, 50],
        [6.0, 5, 4, 3, 2, 1, 0],
    ]
    labels = [0, 2, 5, 6, 4]  # right at once; fifth; sixth; right at once; fifth
    loss = sum(math.log(sum(math.exp(value) for value in row)) - row[label] for row, label in zip(logits, labels)) / 5
    expected = {"top1": 40.0, "top5": 80.0, "loss": pytest.approx(loss, rel=1e-6), "images": 5, "broken": 0}
    models, advanced = {"": Table(logits).train(), "turned": Table([row[::-1] for row in logits])}, []
    for split in ([[0, 1, 2, 3, 4]], [[0], [1, 2], [3, 4]], [[4, 3, 2], [1, 0]]):
        found = evaluate(models, [constants(labels, numbers) for numbers in split], runtime(), advance=advanced.append)
        assert found[""] == expected and found["turned"]["top1"] == 0.0 and found["turned"]["images"] == 5
    assert not models[""].training and sum(len(batch.labels) for batch in advanced) == 15
    for rank, numbers in enumerate([[0, 3], [1, 4], [2], []]):
        values = evaluate(models, [constants(labels, numbers)] if numbers else [], Everyone(rank, 4, CPU))
    assert values[""] == expected


def test_top5_of_three_classes_is_everything():
    values = evaluate({"": Table([[0.0, 1.0, 2.0]] * 3)}, [constants([0, 1, 2], [0, 1, 2])], runtime())[""]
    assert values["top1"] == pytest.approx(100 / 3) and values["top5"] == 100.0


# --- Optimiser, schedule, average ---


def micro():
    torch.manual_seed(3)
    return build("deit_tiny_gka_patch16_224", 5, SIZE, **SHAPE)


def test_the_papers_learning_rates():
    optimizer = make_optimizer(micro(), Recipe())
    schedule = make_schedule(optimizer, Recipe(), 714)

    def rate(update):
        schedule.step_update(update)
        rates = {group["lr"] for group in optimizer.param_groups}
        assert len(rates) == 1
        return rates.pop()

    assert rate(0) == pytest.approx(1e-6)
    assert rate(1785) == pytest.approx(1e-6 + (1.75e-3 - 1e-6) / 2)  # half of the warm-up
    assert rate(5 * 714) == pytest.approx(1.7488e-3, rel=1e-5)
    assert rate(150 * 714) == pytest.approx((1.75e-3 + 1e-6) / 2)
    assert rate(300 * 714 - 1) == pytest.approx(1e-6, rel=1e-4)
    for update in (3, 1000, 5 * 714 + 1, 100 * 714, 299 * 714):
        first = rate(update)
        rate(7)
        assert rate(update) == first  # remembers nothing
        if update >= 5 * 714:
            assert first == pytest.approx(1e-6 + (1.75e-3 - 1e-6) * (1 + math.cos(math.pi * update / (300 * 714))) / 2)


def test_what_is_decayed():
    model = micro()
    optimizer = make_optimizer(model, Recipe(weight_decay=0.07, opt_betas=(0.8, 0.95)))
    assert type(optimizer) is torch.optim.AdamW
    names = {parameter: name for name, parameter in model.named_parameters()}
    decays = {
        names[parameter]: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]
    }
    assert set(decays) == set(names.values())
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.95)} and {
        group["eps"] for group in optimizer.param_groups
    } == {1e-8}
    expected = {name for name in decays if name.endswith(".weight") and "norm" not in name}
    assert {name for name, decay in decays.items() if decay == 0.07} == expected and len(expected) == 8
    assert {name for name, decay in decays.items() if decay == 0.0} == set(decays) - expected
    assert {"pos_embed", "cls_token", "blocks.0.attn.log_sigma", "blocks.0.norm1.weight", "head.bias"} <= set(
        decays
    ) - expected


def walk(model, average, steps, warmup):
    """Weights after each of some random steps."""
    history = []
    for step in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter)
        average.update(model, step=step + 1 if warmup else None)  # as the trainer does
        history.append({name: parameter.clone() for name, parameter in model.named_parameters()})
    return history


def test_the_average_starts_as_a_plain_mean():
    model = micro()
    average = make_average(model, Recipe())
    history = walk(model, average, 20, True)
    for name, value in average.module.named_parameters():
        torch.testing.assert_close(
            value, torch.stack([weights[name] for weights in history]).mean(0), rtol=1e-4, atol=1e-5
        )
    decays = [average.get_decay(step) for step in (24_999, 25_000, 25_001, 200_000)]
    assert decays[0] < 0.99996 and decays[1] == pytest.approx(0.99996) and decays[2:] == [0.99996, 0.99996]


def test_the_average_without_warm_up_is_deits():
    model = micro()
    average, start = (
        make_average(model, Recipe(model_ema_warmup=False, model_ema_decay=0.9)),
        {n: p.clone() for n, p in model.named_parameters()},
    )
    history = walk(model, average, 4, False)
    for name, value in average.module.named_parameters():
        expected = 0.9**4 * start[name] + sum(0.1 * 0.9 ** (3 - k) * weights[name] for k, weights in enumerate(history))
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    assert make_average(model, Recipe(model_ema_warmup=False)).get_decay(None) == 0.99996
    assert make_average(model, Recipe(model_ema_decay=0.0)) is None


def test_optimizer_state_as_tensors_continues_bit_identically(tmp_path):
    from safetensors.torch import load_file, save_file

    images, labels = torch.randn(8, 3, SIZE, SIZE), torch.randint(5, (8,))

    def steps(model, optimizer, first, last):
        schedule = make_schedule(optimizer, small_recipe(), 4)
        for step in range(first, last):
            schedule.step_update(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    whole = micro().eval()
    optimizer = make_optimizer(whole, small_recipe())
    assert state_tensors(optimizer, whole) == {}
    steps(whole, optimizer, 0, 3)
    save_file(state_tensors(optimizer, whole), tmp_path / "optimizer.safetensors")
    again = build("deit_tiny_gka_patch16_224", 5, SIZE, **SHAPE).eval()
    again.load_state_dict({name: value.clone() for name, value in whole.state_dict().items()})
    other = make_optimizer(again, small_recipe())
    load_state_tensors(other, again, load_file(tmp_path / "optimizer.safetensors"))
    steps(whole, optimizer, 3, 6)
    steps(again, other, 3, 6)
    mine, theirs = state_tensors(optimizer, whole), state_tensors(other, again)
    assert len(mine) == 3 * len(list(whole.parameters())) and mine["step/head.bias"] == 6
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_seeds_depend_on_everything():
    assert (
        len({seed_of(0, "image", 1, 2), seed_of(1, "image", 1, 2), seed_of(0, "mix", 1, 2), seed_of(0, "image", 2, 1)})
        == 4
    )
    assert 0 <= seed_of(0) < 2**63 and seed_of(0, "a") == seed_of(0, "a")
