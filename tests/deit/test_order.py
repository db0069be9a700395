"""Which images an update has: the same for any number of processes, pieces and restarts."""

import itertools
import threading
from collections import Counter

import pytest
from timm.data.distributed_sampler import RepeatAugSampler

import tiny
from deit_gka.data.order import Order, deal, read_ahead
from deit_gka.data.seeds import seed_of
from tiny_images import Numbers, drawn, runtime, small_recipe, union
from trainkit_gka.cli import UserError

RANKS = (1, 2, 3, 5, 7, 8)
GROUPS = [(48, 8), (56, 8), (50, 8), (16, 16), (1792, 256)]  # 50 is not a multiple of 8: one group


@pytest.mark.parametrize("batch_size,group_size", GROUPS)
def test_every_place_is_dealt_once_and_in_pairs(batch_size, group_size):
    groups = batch_size // group_size if batch_size % group_size == 0 else 1
    n = batch_size // groups
    for ranks, device_batch_size in itertools.product(RANKS, (2, 3, 10, 256, 10**6)):
        places = []
        for rank in range(ranks):
            share = runtime(rank, ranks).share(batch_size // 2)
            pieces = deal(batch_size, group_size, share, device_batch_size)
            sizes = [len(piece.places) for piece in pieces]
            assert max(sizes) <= device_batch_size and max(sizes) - min(sizes) <= 2
            assert len(sizes) == -(-len(share) // (device_batch_size // 2))  # no more than are needed
            for piece in pieces:
                begin = 0
                for group, length in piece.parts:
                    part = piece.places[begin : begin + length]
                    assert {place % groups for place in part} == {group}  # every G-th image, as G GPUs have them
                    inside = [place // groups for place in part]
                    assert all(a + b == n - 1 for a, b in zip(inside, reversed(inside)))
                    begin += length
                assert begin == len(piece.places)
                places += piece.places
        assert sorted(places) == list(range(batch_size))


def test_images_and_seeds_do_not_depend_on_ranks():
    source, recipe = Numbers(125), small_recipe()
    one = drawn(Order(source, recipe, runtime(), 10**6), 0, 7)
    assert all(sorted(update) == list(range(40)) for update in one)
    for ranks, device_batch_size in ((1, 6), (3, 10), (7, 2)):
        orders = [Order(source, recipe, runtime(rank, ranks), device_batch_size) for rank in range(ranks)]
        assert union([drawn(order, 0, 7) for order in orders]) == one


def test_order_can_start_at_any_update():
    order = Order(Numbers(125), small_recipe(), runtime(1, 3), 8)  # 3 updates an epoch
    updates = drawn(order, 0, 9)
    assert order.steps_per_epoch == 3
    for start, stop in itertools.combinations(range(10), 2):
        assert drawn(order, start, stop) == updates[start:stop]


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


def test_too_few_images_are_one_line():
    with pytest.raises(UserError, match=r"39 .* --batch-size"):
        Order(Numbers(39), small_recipe(), runtime(), 256)
    with pytest.raises(UserError, match="--batch-size 4"):
        Order(Numbers(39), small_recipe(batch_size=4), runtime(0, 3), 256)


def test_read_ahead_passes_items_and_errors_and_ends():
    before = set(threading.enumerate())

    def numbers():
        yield from range(100)
        raise OSError("the network is gone")

    items = read_ahead(numbers(), 2)
    assert [next(items) for _ in range(100)] == list(range(100))
    with pytest.raises(OSError, match="the network is gone"):
        next(items)
    assert list(read_ahead(iter("abc"), 1)) == ["a", "b", "c"]
    unfinished = read_ahead(numbers(), 10)
    assert next(unfinished) == 0
    unfinished.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(tiny.HANG_AFTER)
        assert not thread.is_alive()
