"""The numbers behind the figures: layouts of tokens, rollout, distances, widths, deletion curves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from deit_gka.data.transforms import eval_transform
from deit_gka.figures.depth import relative_bandwidths
from deit_gka.figures.explanation import choose_tokens, few_weights
from deit_gka.figures.maps import Tokens, attended_distances, place_name
from deit_gka.figures.rollout import LEAST_SHARE, deletion_curve, draw_deletion, largest_ratio, on_patches, rollout
from deit_gka.figures.rollout import without as without_patches
from deit_gka.figures.rows import query_maps
from deit_gka.figures.subjects import of_timm, subjects_of
from figure_runs import GKA, TINY, tiny_subjects
from tiny_vision import photo
from trainkit_gka.figures.measures import diagonal_mass, entropy, median_distance

NO_CLASS = ("attn_layer=gka", "class_token=False", "global_pool=avg")
LAYOUTS = {  # a model, its arguments, the tokens before the patches, whether the first is a class token
    "class": (GKA, (), 1, True),
    "distilled": ("deit_tiny_gka_distilled_patch16_224", (), 2, True),
    "registers": (GKA, ("reg_tokens=4",), 5, True),
    "none": ("vit_tiny_patch16_224", NO_CLASS, 0, False),
    "registers alone": ("vit_tiny_patch16_224", (*NO_CLASS, "reg_tokens=2"), 2, False),
}


@pytest.mark.parametrize("name, settings, prefix, has_class", LAYOUTS.values(), ids=LAYOUTS)
def test_tokens_before_the_patches_are_counted(name, settings, prefix, has_class):
    (subject,) = tiny_subjects(name, "img_size=[8,12]", *settings)
    tokens, weights = subject.tokens, subject.layers[0].weights
    assert tokens == Tokens((2, 3), (4, 4), prefix, has_class) and tokens.count == weights.shape[-1]
    read = weights[:, 0] if has_class else weights[:, prefix:].mean(1)
    torch.testing.assert_close(tokens.read(weights), read)
    assert tokens.patches(read)[1, 1, 2] == read[1, prefix + 5]


def test_the_four_queries_are_the_papers():
    square, weights = Tokens((14, 14), (16, 16)), torch.rand(3, 197, 197)
    assert square.queries() == [(3, 3), (7, 7), (10, 10), (3, 10)]
    assert place_name(*square.queries()[3]) == "row 4, column 11"  # counted from 1
    maps, distances = query_maps(weights, square)
    assert maps.shape == (3, 4, 14, 14) and maps[1, 3, 5, 6] == weights[1, 53, 1 + 14 * 5 + 6]
    assert torch.equal(distances[:, 3], attended_distances(weights, square)[:, 52])


# Rollout


@pytest.mark.parametrize("discard", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("has_class", [True, False])
def test_rollout_is_the_product_from_the_last_layer_to_the_first(discard, has_class):
    """A class token is never discarded; the first of the patches may be."""
    tokens = Tokens((2, 3), (4, 4)) if has_class else Tokens((1, 7), (4, 4), prefix=0, has_class=False)
    layers, expected = [(2 * torch.randn(2, 7, 7)).softmax(-1) for _ in range(3)], np.eye(7)
    for weights in layers:
        mean = weights.double().mean(0).numpy()
        threshold = np.quantile(mean, discard)
        augmented = np.zeros((7, 7))
        for i, j in np.ndindex(7, 7):
            weight = mean[i, j] if mean[i, j] >= threshold or (has_class and j == 0) else 0
            augmented[i, j] = 0.5 * weight + 0.5 * (i == j)
        expected = augmented / augmented.sum(1, keepdims=True) @ expected
    np.testing.assert_allclose(rollout(layers, tokens, discard).numpy(), expected)


def test_an_empty_rollout_has_the_largest_ratio_that_leaves_something():
    tokens, layers = Tokens((2, 3), (4, 4)), [(2 * torch.randn(1, 7, 7)).softmax(-1) for _ in range(2)]
    for layer in layers:
        layer[:, 0] = torch.tensor([0.94] + [0.01] * 6)  # its weights of patches are among the smallest
    shares = [on_patches(layers, tokens, ratio / 100)[1] for ratio in range(100)]
    expected = max(ratio for ratio, share in enumerate(shares) if share > LEAST_SHARE)
    assert largest_ratio(layers, tokens, 0.99) == expected / 100 < 0.99
    assert largest_ratio(layers, tokens, 0.1) == 0.1


# Distances, widths and the operator


def test_attended_distance_of_known_weights():
    """Of heads that look at the patch itself, at all tokens alike, and at the patch above or below and a token before
    the patches, which has no place."""
    tokens = Tokens((2, 3), (4, 8), 2)
    weights = torch.stack([torch.eye(8), torch.full((8, 8), 1 / 8), torch.zeros(8, 8)])
    weights[2, :, 0] = 0.75
    for row, column in np.ndindex(2, 3):
        weights[2, tokens.token(row, column), tokens.token(1 - row, column)] = 0.25
    centres = [(4 * row, 8 * column) for row, column in np.ndindex(2, 3)]
    uniform = [np.mean([np.hypot(a[0] - b[0], a[1] - b[1]) for b in centres]) for a in centres]
    expected = torch.stack([torch.zeros(6), torch.tensor(uniform).float(), torch.full((6,), 4.0)])
    torch.testing.assert_close(attended_distances(weights, tokens), expected)


def test_bandwidths_are_relative_to_the_median_distance_of_different_tokens():
    features = torch.tensor([[0.0], [1.0], [3.0]])[:, None] * torch.tensor([1.0, 10.0])[:, None]
    torch.testing.assert_close(median_distance(features), torch.tensor([2.0, 20.0]))
    (subject,) = tiny_subjects(GKA, "attention=GA")
    relative, first = relative_bandwidths(subject), subject.layers[0]
    np.testing.assert_allclose(relative[0], (first.sigma / median_distance(first.features)).numpy())
    assert np.isnan(relative[1]).all() and np.isnan(subject.sigmas[1]).all()  # softmax has none


def test_a_few_tokens_have_the_kernel_of_the_equations():
    features = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    affinities, weights = few_weights(features, sigma=2.0)
    expected = torch.tensor([1.0, np.exp(-25 / 8), np.exp(-1 / 8)]).double()
    torch.testing.assert_close(affinities[0], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(weights[0], expected / expected.sum(), rtol=1e-6, atol=0)
    assert choose_tokens(torch.tensor([[9.0], [0.0], [5.0], [1.0], [2.0]]), query=3, first=1, count=3) == [3, 4, 2]
    both = torch.stack([torch.eye(5), torch.full((5, 5), 0.2)])
    torch.testing.assert_close(diagonal_mass(both), torch.tensor([1.0, 0.2]))
    torch.testing.assert_close(entropy(both)[:, 0], torch.tensor([0.0, np.log(5.0)]).float())


# Deletion curves


@pytest.fixture
def subject():
    """A model on noise of 2 x 4 patches, whose probability of class 1 is how much of the patch (1, 2) is left."""
    (subject,) = tiny_subjects(GKA, "img_size=[8,16]")
    pixels = np.random.default_rng(0).random((8, 16, 3)).astype(np.float32)
    pixels[4:, 8:12] = 1.0

    def probabilities(images):
        remaining = (images[:, 4:, 8:12] == 1).float().mean((1, 2, 3))
        return torch.stack([(1 - remaining) / 2, remaining, (1 - remaining) / 2], dim=1)

    return replace(subject, pixels=pixels, probabilities=probabilities)


def test_the_first_patches_of_the_order_are_deleted(subject):
    images = without_patches(subject, torch.tensor([6, 0, 3, 1, 2, 4, 5, 7]), [0, 1, 3, 8])
    expected, mean = np.stack([subject.pixels] * 4), subject.pixels.mean((0, 1))
    expected[1:, 4:, 8:12] = expected[2:, :4, :4] = expected[2:, :4, 12:] = expected[3] = mean
    np.testing.assert_allclose(images, expected, rtol=1e-6)


@pytest.mark.parametrize("place, area", [(0, 1 / 16), (3, 7 / 16), (7, 15 / 16)])
def test_the_area_says_when_the_patch_that_counts_is_deleted(subject, place, area):
    order = [patch for patch in range(8) if patch != 6]
    shares, curve = deletion_curve(subject, torch.tensor([*order[:place], 6, *order[place:]]))
    np.testing.assert_allclose(shares, np.arange(9) / 8)
    np.testing.assert_array_equal(curve, shares <= place / 8)
    assert np.trapezoid(curve, shares) == pytest.approx(area)


def test_the_curves_begin_at_the_models_own_probability(figures, tmp_path):
    drawn, image = of_timm(GKA, [*TINY[1:], "num_classes=3"]), photo(0)
    (figure,) = draw_deletion(subjects_of(drawn, {"stripes": image}), tmp_path)
    highest = drawn.model(eval_transform(16, **drawn.settings)(image)[None]).softmax(-1).max().item()
    for line, row in zip(figures["deletion.png"].axes[0].lines, figure.rows, strict=True):
        assert line.get_ydata()[0] == pytest.approx(highest) == row["probability of the whole image"]
        assert row["area under the curve"] == pytest.approx(np.trapezoid(line.get_ydata(), line.get_xdata()))
    assert len(figure.rows) == 3
