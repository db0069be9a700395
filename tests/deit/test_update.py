"""One update: mixing, loss and gradient do not depend on processes and pieces."""

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup

from deit_gka.data.batch import Images, assemble
from deit_gka.data.order import Order
from deit_gka.data.seeds import seed_of
from deit_gka.data.sources import open_source
from deit_gka.data.transforms import train_transform
from deit_gka.model.checkpoints import build
from deit_gka.training.engine import Mixer, accumulate_gradients, autocast
from tiny_images import CPU, runtime, small_recipe
from tiny_vision import SHAPE, SIZE

WHOLE = 10**6  # a device_batch_size


def prepared(recipe, ranks=1, device_batch_size=WHOLE, step=0):
    """For each rank: (pieces, their batches) of one update on digits."""
    source, ranks_of = open_source("digits", "train"), []
    for rank in range(ranks):
        order = Order(source, recipe, runtime(rank, ranks), device_batch_size)
        images = Images(source, train_transform(recipe), training=True)
        units = (images.__getitems__(keys) for keys in order.batches(step, step + 1))
        ranks_of.append((order.pieces, [assemble(units, len(piece.places)) for piece in order.pieces]))
        assert next(units, None) is None
    return ranks_of


def network(drop_path=0.0):
    torch.manual_seed(1)
    return build("deit_tiny_gka_patch16_224", 10, SIZE, drop_path_rate=drop_path, **SHAPE).train()


# Mixing


def test_a_group_is_mixed_as_timm_does():
    recipe, kinds = small_recipe(batch_size=16, group_size=16, seed=3), set()
    for step in range(12):
        images, labels = torch.randn(16, 3, SIZE, SIZE), torch.randint(10, (16,))
        timms = Mixup(0.8, 1.0, prob=1.0, switch_prob=0.5, mode="batch", label_smoothing=0.1, num_classes=10)
        np.random.seed(seed_of(3, "mix", step, 2) % 2**32)
        reference = timms(images.clone(), labels)
        np.random.seed(step)
        got = Mixer(recipe, 10)(images.clone(), labels, [(2, 16)], step)
        assert torch.equal(got[0], reference[0]) and torch.equal(got[1], reference[1])
        kinds.add("cutmix" if (got[0] == images).any() else "mixup")
    assert kinds == {"cutmix", "mixup"}


# Loss and gradient


def gradients(ranks=1, device_batch_size=WHOLE, step=0, amp_scale=None, **settings):
    """What DDP leaves in .grad: the mean over ranks. And the batch's mean loss."""
    recipe = small_recipe(**{**dict(batch_size=24, group_size=8, drop_path=0.0, amp="float32"), **settings})
    model = network(recipe.drop_path_of("tiny"))
    total, loss = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}, 0.0
    how = {} if amp_scale is None else {"scale": amp_scale}
    for rank, (pieces, loaded) in enumerate(prepared(recipe, ranks, device_batch_size, step)):
        model.zero_grad()
        waiting = iter(loaded)
        mixer = Mixer(recipe, 10)
        loss += accumulate_gradients(
            model, pieces, lambda size, waiting=waiting: next(waiting), mixer, step, runtime(rank, ranks), **how
        ).item()
        for name, parameter in model.named_parameters():
            total[name] += parameter.grad / ranks
        assert next(waiting, None) is None
    return total, loss


def assert_close_gradients(one, other, tolerance):
    for name in one:
        assert (one[name] - other[name]).norm() <= tolerance * one[name].norm(), name


def differ(one, other):
    return any(not torch.equal(one[name], other[name]) for name in one)


def test_gradient_does_not_depend_on_pieces_and_ranks():
    for step, settings in ((0, ((1, 4), (2, WHOLE))), (1, ((3, 6), (5, 2)))):
        one, loss = gradients(step=step)
        assert all(gradient.norm() > 0 for gradient in one.values())
        for ranks, device_batch_size in settings:
            other, other_loss = gradients(ranks, device_batch_size, step)
            assert_close_gradients(one, other, 2e-5)
            assert other_loss == pytest.approx(loss, rel=1e-6)


def test_loss_is_soft_cross_entropy():
    recipe = small_recipe(batch_size=24, group_size=24, drop_path=0.0, amp="float32")
    ((pieces, loaded),) = prepared(recipe)
    model = network()
    images, targets = Mixer(recipe, 10)(*loaded[0][:2], pieces[0].parts, 0)
    expected = -(targets * model(images).log_softmax(1)).sum() / 24
    expected.backward()
    got, loss = gradients(group_size=24)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_close_gradients({name: parameter.grad for name, parameter in model.named_parameters()}, got, 1e-5)


def test_stochastic_depth_depends_on_the_update():
    one, again, next_update, without = (gradients(**how)[0] for how in (
        dict(drop_path=0.5), dict(drop_path=0.5), dict(drop_path=0.5, step=1), dict()))  # fmt: skip
    assert not differ(one, again) and differ(one, next_update) and differ(one, without)


def test_reduced_precision_gradient_is_close():
    exact, half = gradients()[0], gradients(amp="bfloat16")[0]
    assert_close_gradients(exact, half, 0.1)
    assert differ(exact, half)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, _ = gradients(amp="float16", amp_scale=scaler.scale)
    assert_close_gradients(exact, {name: value / 1024 for name, value in scaled.items()}, 0.05)
    with autocast(CPU, "auto"):
        assert not torch.is_autocast_enabled("cpu")
