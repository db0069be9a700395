"""The numbers behind the figures: layouts of tokens, rollout, distances, widths, deletion curves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from deit_gka.data.transforms import eval_transform
from deit_gka.figures.bandwidths import relative_bandwidths
from deit_gka.figures.deletion import deletion_curve, draw_deletion, without
from deit_gka.figures.explanation import choose_tokens, few_weights
from deit_gka.figures.measures import Tokens, attended_distance
from deit_gka.figures.patch_to_patch import query_distances, query_maps
from deit_gka.figures.rollout import LEAST_SHARE, largest_ratio, on_patches, rollout
from deit_gka.figures.subjects import of_timm, subjects_of
from figure_runs import GKA, TINY, tiny_subjects
from tiny_vision import photo
from trainkit_gka.figures.measures import diagonal_mass, entropy, median_distance

NO_CLASS = ("attn_layer=gka", "class_token=False", "global_pool=avg")
LAYOUTS = {
    "class": (GKA, (), Tokens((2, 3), (4, 4), 1, True)),
    "distilled": ("deit_tiny_gka_distilled_patch16_224", (), Tokens((2, 3), (4, 4), 2, True)),
    "registers": (GKA, ("reg_tokens=4",), Tokens((2, 3), (4, 4), 5, True)),
    "none": ("vit_tiny_patch16_224", NO_CLASS, Tokens((2, 3), (4, 4), 0, False)),
    "registers alone": ("vit_tiny_patch16_224", (*NO_CLASS, "reg_tokens=2"), Tokens((2, 3), (4, 4), 2, False)),
}


def random_weights(*shape: int) -> torch.Tensor:
    return (2 * torch.randn(*shape)).softmax(-1)


# Tokens


@pytest.mark.parametrize("name, settings, expected", LAYOUTS.values(), ids=LAYOUTS)
def test_tokens_before_the_patches_are_counted(name, settings, expected):
    (subject,) = tiny_subjects(name, "img_size=[8,12]", *settings)
    tokens, weights = subject.tokens, subject.layers[0].weights
    assert tokens == expected and tokens.count == weights.shape[-1]
    read = weights[:, 0] if tokens.has_class else weights[:, tokens.prefix :].mean(1)
    torch.testing.assert_close(tokens.read(weights), read)
    assert tokens.patches(read)[1, 1, 2] == read[1, tokens.prefix + 5]


def test_the_four_queries_are_the_papers():
    square = Tokens((14, 14), (16, 16))
    assert square.queries() == [(3, 3), (7, 7), (10, 10), (3, 10)]
    assert square.query_names()[3] == "row 4, column 11"  # counted from 1
    weights = random_weights(3, 197, 197)
    maps = query_maps(weights.mean(0), square)
    assert maps.shape == (4, 14, 14)
    torch.testing.assert_close(maps[3, 5, 6], weights[:, 53, 1 + 14 * 5 + 6].mean())


# Rollout


@pytest.mark.parametrize("discard", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("has_class", [True, False])
def test_rollout_is_the_product_from_the_last_layer_to_the_first(discard, has_class):
    """A class token is never discarded; the first of the patches may be."""
    tokens = Tokens((2, 3), (4, 4)) if has_class else Tokens((1, 7), (4, 4), prefix=0, has_class=False)
    layers = [random_weights(2, 7, 7) for _ in range(3)]
    expected = np.eye(7)
    for weights in layers:
        mean = weights.double().mean(0).numpy()
        threshold = np.quantile(mean, discard)
        augmented = np.zeros((7, 7))
        for i in range(7):
            for j in range(7):
                weight = mean[i, j] if mean[i, j] >= threshold or (has_class and j == 0) else 0
                augmented[i, j] = 0.5 * weight + 0.5 * (i == j)
            augmented[i] /= augmented[i].sum()
        expected = augmented @ expected
    np.testing.assert_allclose(rollout(layers, tokens, discard).numpy(), expected)


def test_an_empty_rollout_has_the_largest_ratio_that_leaves_something():
    tokens, layers = Tokens((2, 3), (4, 4)), [random_weights(1, 7, 7) for _ in range(2)]
    for layer in layers:
        layer[:, 0] = torch.tensor([0.94] + [0.01] * 6)  # its weights of patches are among the smallest
    shares = [float(on_patches(layers, tokens, ratio / 100)[1:].sum()) for ratio in range(100)]
    expected = max(ratio for ratio, share in enumerate(shares) if share > LEAST_SHARE)
    assert largest_ratio(layers, tokens, 0.99) == expected / 100 < 0.99
    assert largest_ratio(layers, tokens, 0.1) == 0.1


# Distances and widths


def test_attended_distance_of_known_weights():
    tokens = Tokens((2, 3), (4, 8), 2)
    weights = torch.zeros(3, 8, 8)
    weights[0] = torch.eye(8)
    weights[1, :, :] = 1 / 8
    for row in range(2):  # every patch looks at the one below or above it, and at a token before the patches
        for column in range(3):
            weights[2, tokens.token(row, column), tokens.token(1 - row, column)] = 0.25
            weights[2, tokens.token(row, column), 0] = 0.75
    centres = [(4 * row, 8 * column) for row in range(2) for column in range(3)]
    mean = np.mean([np.hypot(a[0] - b[0], a[1] - b[1]) for a in centres for b in centres])
    torch.testing.assert_close(attended_distance(weights, tokens), torch.tensor([0.0, float(mean), 4.0]))


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


def test_bandwidths_are_relative_to_the_median_distance_of_different_tokens():
    features = torch.tensor([[0.0], [1.0], [3.0]])[:, None] * torch.tensor([1.0, 10.0])[:, None]
    torch.testing.assert_close(median_distance(features), torch.tensor([2.0, 20.0]))
    (subject,) = tiny_subjects(GKA, "attention=GA")
    relative = relative_bandwidths(subject)
    first = subject.layers[0]
    np.testing.assert_allclose(relative[0], (first.sigma / median_distance(first.features)).numpy())
    assert np.isnan(relative[1]).all() and np.isnan(subject.sigmas[1]).all()  # softmax has none


def test_the_diagonal_and_the_entropy_of_the_identity_and_of_uniform_attention():
    both = torch.stack([torch.eye(5), torch.full((5, 5), 0.2)])
    torch.testing.assert_close(diagonal_mass(both), torch.tensor([1.0, 0.2]))
    torch.testing.assert_close(entropy(both)[:, 0], torch.tensor([0.0, np.log(5.0)]).float())


def test_a_few_tokens_have_the_kernel_of_the_equations():
    features = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    affinities, weights = few_weights(features, sigma=2.0)
    expected = torch.tensor([1.0, np.exp(-25 / 8), np.exp(-1 / 8)]).double()
    torch.testing.assert_close(affinities[0], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(weights[0], expected / expected.sum(), rtol=1e-6, atol=0)
    assert choose_tokens(torch.tensor([[9.0], [0.0], [5.0], [1.0], [2.0]]), query=3, first=1, count=3) == [3, 4, 2]


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
    order = [other for other in range(8) if other != 6]
    shares, curve = deletion_curve(subject, torch.tensor([*order[:place], 6, *order[place:]]))
    np.testing.assert_allclose(shares, np.arange(9) / 8)
    np.testing.assert_array_equal(curve, shares <= place / 8)
    assert np.trapezoid(curve, shares) == pytest.approx(area)


def test_the_curves_begin_at_the_models_own_probability(figures, tmp_path):
    drawn, image = of_timm(GKA, [*TINY[1:], "num_classes=3"]), photo(0)
    (figure,) = draw_deletion(subjects_of(drawn, {"stripes": image}), tmp_path)
    pixels = eval_transform(16, **drawn.settings)(image)
    highest = drawn.model(pixels[None]).softmax(-1).max().item()
    assert len(figures["deletion.png"].axes[0].lines) == len(figure.rows) == 3
    for line, row in zip(figures["deletion.png"].axes[0].lines, figure.rows):
        assert line.get_ydata()[0] == pytest.approx(highest) == row["probability of the whole image"]
        assert row["area under the curve"] == pytest.approx(np.trapezoid(line.get_ydata(), line.get_xdata()))
