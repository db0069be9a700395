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
from deit_gka.training.distillation import Objective
from deit_gka.training.engine import Mixer, accumulate_gradients
from tiny_images import runtime, small_recipe
from tiny_vision import SHAPE, SIZE

NO_LIMIT = 10**6  # a device_batch_size


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


class Update:
    """One update of a small model on digits, on one process (tests of the trainer have several).

    gradients: of the batch. loss: of the batch. model: as it was; batches: of the pieces.
    """

    def __init__(self, device_batch_size=NO_LIMIT, step=0, scale=1.0, dtype=torch.float64, **settings):
        recipe = small_recipe(**{**dict(batch_size=24, group_size=8, drop_path=0.0, amp="float32"), **settings})
        source, self.mixer, self.batches = open_source("digits", "train"), Mixer(recipe, 10), []
        torch.manual_seed(1)
        rate = recipe.drop_path_of("tiny")
        self.model = build("deit_tiny_gka_patch16_224", 10, SIZE, drop_path_rate=rate, **SHAPE).to(dtype).train()
        order = Order(source, recipe, runtime(), device_batch_size)
        images = Images(source, train_transform(recipe), training=True)
        units, self.pieces = map(images.__getitems__, order.batches(step, step + 1)), order.pieces

        def fetch(size):
            batch = assemble(units, size)
            self.batches.append(batch._replace(images=batch.images.to(dtype)))
            return self.batches[-1]._replace(images=self.batches[-1].images.clone())  # mixed in place

        how = dict(runtime=runtime(), scale=lambda loss: scale * loss, objective=Objective(recipe))
        self.loss = accumulate_gradients(self.model, self.pieces, fetch, self.mixer, step, **how).item()
        assert next(units, None) is None
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}


def differ(one, other):
    return any(not torch.equal(one.gradients[name], other.gradients[name]) for name in one.gradients)


@pytest.mark.parametrize("group_size", [24, 8])
def test_loss_and_gradient_are_those_of_soft_cross_entropy_in_any_pieces(group_size):
    whole = Update(group_size=group_size)
    (batch,), (piece,) = whole.batches, whole.pieces
    images, targets = whole.mixer(batch.images, batch.labels, piece.parts, 0)
    whole.model.zero_grad()
    expected = -(targets * whole.model(images).log_softmax(1)).sum() / 24
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in whole.model.named_parameters()}
    for update in (whole, Update(4, group_size=group_size), Update(10, group_size=group_size)):
        assert update.loss == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(update.gradients, gradients)


def test_stochastic_depth_depends_on_the_update():
    one, again, next_update = (Update(drop_path=0.5, step=step) for step in (0, 0, 1))
    assert not differ(one, again) and differ(one, next_update) and differ(one, Update())


@pytest.mark.parametrize("amp, dtype", [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_gradient_in_reduced_precision_is_close(amp, dtype):
    """About 12 results in each of 2 blocks are rounded on the way there and back, each by at most half an eps.

    In float16 the loss is scaled.
    """
    exact, scale = Update(), 1024.0 if amp == "float16" else 1.0
    half = Update(amp=amp, scale=scale, dtype=torch.float32)
    assert differ(exact, half)
    for name, gradient in exact.gradients.items():
        error = (half.gradients[name] / scale - gradient).norm() / gradient.norm()
        assert error <= 2 * 2 * 12 * torch.finfo(dtype).eps / 2, name
