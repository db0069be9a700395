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
    """One update of a small model on digits by some ranks.

    gradients: what DDP leaves in .grad, the mean over ranks. loss: of the batch. model: as it was; batches: of rank 0.
    """

    def __init__(self, ranks=1, device_batch_size=NO_LIMIT, step=0, scale=1.0, dtype=torch.float64, **settings):
        recipe = small_recipe(**{**dict(batch_size=24, group_size=8, drop_path=0.0, amp="float32"), **settings})
        source, self.mixer, self.loss = open_source("digits", "train"), Mixer(recipe, 10), 0.0
        torch.manual_seed(1)
        rate = recipe.drop_path_of("tiny")
        self.model = build("deit_tiny_gka_patch16_224", 10, SIZE, drop_path_rate=rate, **SHAPE).to(dtype).train()
        self.gradients = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        for rank in reversed(range(ranks)):
            order = Order(source, recipe, runtime(rank, ranks), device_batch_size)
            images = Images(source, train_transform(recipe), training=True)
            units = (images.__getitems__(keys) for keys in order.batches(step, step + 1))
            self.pieces, self.batches = order.pieces, []

            def fetch(size, units=units):
                batch = assemble(units, size)
                self.batches.append(batch._replace(images=batch.images.to(dtype)))
                return self.batches[-1]._replace(images=self.batches[-1].images.clone())  # mixed in place

            self.model.zero_grad()
            how = dict(scale=lambda loss: scale * loss, objective=Objective(recipe))
            how["runtime"] = runtime(rank, ranks)
            self.loss += accumulate_gradients(self.model, order.pieces, fetch, self.mixer, step, **how).item()
            assert next(units, None) is None
            for name, p in self.model.named_parameters():
                self.gradients[name] += p.grad / ranks


def differ(one, other):
    return any(not torch.equal(one.gradients[name], other.gradients[name]) for name in one.gradients)


def test_gradient_does_not_depend_on_pieces_and_ranks():
    for step, settings in ((0, ((1, 4), (2, NO_LIMIT))), (1, ((3, 6), (5, 2)))):
        one = Update(step=step)
        assert all(gradient.norm() > 0 for gradient in one.gradients.values())
        for ranks, device_batch_size in settings:
            other = Update(ranks, device_batch_size, step)
            torch.testing.assert_close(other.gradients, one.gradients)
            assert other.loss == pytest.approx(one.loss, rel=1e-6)


def test_loss_is_soft_cross_entropy():
    update = Update(group_size=24)
    (batch,), (piece,) = update.batches, update.pieces
    images, targets = update.mixer(batch.images, batch.labels, piece.parts, 0)
    update.model.zero_grad()
    expected = -(targets * update.model(images).log_softmax(1)).sum() / 24
    expected.backward()
    assert update.loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in update.model.named_parameters():
        torch.testing.assert_close(update.gradients[name], parameter.grad)


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
