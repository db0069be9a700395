"""Deletion curves, and what patches look at head by head: numbers that one can work out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from deit_gka.data.transforms import eval_transform
from deit_gka.figures.deletion import deletion_curve, draw_deletion, orders, without
from deit_gka.figures.measures import Tokens
from deit_gka.figures.patch_to_patch import grey_patch, query_distances, query_maps, without_own
from deit_gka.figures.rollout import rollout
from deit_gka.figures.subjects import of_timm, subjects_of
from figure_runs import GKA, SOFTMAX, TINY, tiny_subjects
from tiny_vision import photo

WIDE = "img_size=[8,16]"  # 2 × 4 patches


@pytest.fixture
def subject():
    """A model on noise of 8 × 16 pixels, whose probability of class 1 is how much of the patch (1, 2) is left."""
    (subject,) = tiny_subjects(GKA, WIDE)
    pixels = np.random.default_rng(0).random((8, 16, 3)).astype(np.float32)
    pixels[4:, 8:12] = 1.0

    def probabilities(images):
        left = (images[:, 4:, 8:12] == 1).float().mean((1, 2, 3))
        return torch.stack([(1 - left) / 2, left, (1 - left) / 2], dim=1)

    return replace(subject, pixels=pixels, probabilities=probabilities)


def test_the_first_patches_of_the_order_are_deleted(subject):
    order = torch.tensor([6, 0, 3, 1, 2, 4, 5, 7])
    images = without(subject, order, [0, 1, 3, 8])
    mean = subject.pixels.mean((0, 1))
    np.testing.assert_array_equal(images[0], subject.pixels)
    expected = subject.pixels.copy()
    expected[4:, 8:12] = mean
    np.testing.assert_allclose(images[1], expected, rtol=1e-6)
    expected[:4, :4] = expected[:4, 12:] = mean
    np.testing.assert_allclose(images[2], expected, rtol=1e-6)
    np.testing.assert_allclose(images[3], np.broadcast_to(mean, (8, 16, 3)), rtol=1e-6)


@pytest.mark.parametrize("place, area", [(0, 1 / 16), (3, 7 / 16), (7, 15 / 16)])
def test_the_area_says_when_the_patch_that_counts_is_deleted(subject, place, area):
    order = torch.tensor([other for other in range(8) if other != 6])
    order = torch.cat([order[:place], torch.tensor([6]), order[place:]])
    shares, curve = deletion_curve(subject, order)
    np.testing.assert_allclose(shares, np.arange(9) / 8)
    np.testing.assert_array_equal(curve, shares <= place / 8)
    assert np.trapezoid(curve, shares) == pytest.approx(area)


def test_orders_are_those_of_the_attention(subject):
    found, tokens = orders(subject), subject.tokens
    weights = [layer.weights for layer in subject.layers]
    for name, row in (("rollout", rollout(weights, tokens)[0, 1:]), ("CLS", weights[-1].mean(0)[0, 1:])):
        assert (row[found[name][0]].diff() <= 0).all() and sorted(found[name][0].tolist()) == list(range(8))
    assert len(found["random"]) > 1 and len({tuple(order.tolist()) for order in found["random"]}) > 1
    assert all(torch.equal(again, order) for again, order in zip(orders(subject)["random"], found["random"]))


def test_the_curves_of_a_model_start_at_its_own_probability(figures, tmp_path):
    subjects = [*tiny_subjects(GKA, "num_classes=3"), *tiny_subjects(SOFTMAX, "num_classes=3")]
    (figure,) = draw_deletion(subjects, tmp_path)
    axis = figures["deletion.png"].axes[0]
    assert len(axis.lines) == len(figure.rows) == 6
    for line, row, subject in zip(axis.lines, figure.rows, [subject for subject in subjects for _ in range(3)]):
        whole = subject.probabilities(torch.as_tensor(subject.pixels)[None])
        assert line.get_ydata()[0] == pytest.approx(float(whole.max())) == row["probability of the whole image"]
        assert whole.sum() == pytest.approx(1) and line.get_xdata()[-1] == 1
        assert row["area under the curve"] == pytest.approx(np.trapezoid(line.get_ydata(), line.get_xdata()))
        assert f"{row['area under the curve']:#.3g}" in line.get_label() and row["model"] in line.get_label()


def test_the_probabilities_are_the_models_own():
    drawn, image = of_timm(GKA, [*TINY[1:], WIDE, "num_classes=3"]), photo(0)
    (subject,) = subjects_of(drawn, {"stripes": image})
    found = subject.probabilities(torch.as_tensor(subject.pixels)[None])
    normalised = eval_transform((8, 16), **drawn.settings)(image)
    torch.testing.assert_close(found, drawn.model(normalised[None]).softmax(-1).detach())


# Patch-to-patch by head


def test_the_distance_of_a_query_is_in_pixels():
    tokens = Tokens((2, 3), (4, 8), 2)
    weights = torch.full((2, 8, 8), 1 / 8)
    (row, column), number = tokens.queries()[3], tokens.token(*tokens.queries()[3])
    weights[1, number] = 0
    weights[1, number, 0] = 0.5  # a token before the patches has no place
    weights[1, number, tokens.token(row + 1, column)] = 0.5
    maps = query_maps(weights, tokens)
    assert maps.shape == (2, 4, 2, 3) and query_distances(maps, tokens)[1, 3] == pytest.approx(4)
    mean = np.mean([np.hypot(4 * (row - i), 8 * (column - j)) for i in range(2) for j in range(3)])
    assert query_distances(maps, tokens)[0, 3] == pytest.approx(float(mean))


def test_the_scale_leaves_the_patch_itself_out():
    tokens = Tokens((2, 3), (4, 8), 1)
    weights = torch.eye(7)[None] + 0.01 * torch.rand(2, 7, 7)
    kept = without_own(query_maps(weights, tokens), tokens)
    assert kept.shape == (2 * 4 * 5,) and kept.max() < 0.5
    picture = grey_patch(np.zeros((8, 24, 3), dtype=np.uint8), (1, 2), (4, 8))
    assert (picture[4:, 16:] > 100).all() and picture[:4].max() == 0 and picture[:, :16].max() == 0
