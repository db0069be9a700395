"""The numbers behind the figures: W and its check, rollout, distances, widths, layouts of tokens."""

import numpy as np
import pytest
import torch

import tiny_vit
from deit_gka.figures.bandwidths import relative_bandwidths, widths
from deit_gka.figures.explanation import choose_tokens, few_weights
from deit_gka.figures.maps import attention_layers, attention_maps
from deit_gka.figures.matrices import matrix_picture, off_diagonal, subsample
from deit_gka.figures.measures import (
    Tokens,
    attended_distance,
    diagonal_mass,
    effective_tokens,
    entropy,
    median_distance,
)
from deit_gka.figures.patch_to_patch import query_maps
from deit_gka.figures.rollout import rollout
from deit_gka.figures.sheet import Subject, linear, logarithmic, overlay
from deit_gka.figures.subjects import Drawn, subjects_of
from deit_gka.model.checkpoints import build
from gka import gaussian_weights
from tiny_vision import photo
from trainkit_gka.cli import UserError

TINY = dict(embed_dim=16, depth=2, num_heads=2, patch_size=4, img_size=[8, 12])
LAYOUTS = {
    "class": ("deit_tiny_gka_patch16_224", {}, Tokens((2, 3), (4, 4), 1, True)),
    "distilled": ("deit_tiny_gka_distilled_patch16_224", {}, Tokens((2, 3), (4, 4), 2, True)),
    "registers": ("deit_tiny_gka_patch16_224", dict(reg_tokens=4), Tokens((2, 3), (4, 4), 5, True)),
    "none": (
        "vit_tiny_patch16_224",
        dict(attn_layer="gka", class_token=False, global_pool="avg"),
        Tokens((2, 3), (4, 4), 0, False),
    ),
    "registers alone": (
        "vit_tiny_patch16_224",
        dict(attn_layer="gka", class_token=False, reg_tokens=2, global_pool="avg"),
        Tokens((2, 3), (4, 4), 2, False),
    ),
}


def random_weights(*shape: int) -> torch.Tensor:
    return (2 * torch.randn(*shape)).softmax(-1)


def subject_of(name: str, **settings) -> Subject:
    model = build(name, **{**TINY, **settings})
    return subjects_of(Drawn("tiny", "tiny", model, {"crop_pct": 1.0}), {"stripes": photo(0)})[0]


# W


@pytest.mark.parametrize("attention", ["A", "V", "G", "GA", "GVGA"])
def test_the_recomputed_weights_give_the_output_of_every_kind(attention, images):
    model = tiny_vit.create("gka", attention=attention, depth=4)
    for kind, layer in zip((attention * 4)[:4], attention_maps(model, images)):
        assert layer.error < 1e-5 and layer.weights.shape == (2, 3, 5, 5)
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones(2, 3, 5))
        assert (layer.sigma is not None) == (kind == "G") == (layer.features is not None)


@pytest.mark.parametrize("settings", [dict(qk_norm=True), dict(scale_attn_norm=True)], ids=str)
def test_variants_of_softmax_attention_of_timm_are_recomputed(settings):
    model = build("vit_tiny_patch16_224", **TINY, **settings)
    assert all(layer.error < 1e-5 for layer in attention_maps(model, torch.randn(1, 3, 8, 12)))


def test_the_weights_are_the_operators():
    subject = subject_of("deit_tiny_gka_patch16_224", sigma_squared=2.0)
    for layer in subject.layers:
        assert layer.initial_sigma == pytest.approx(2**0.5) and layer.sigma.tolist() == pytest.approx([2**0.5] * 2)
        weights = gaussian_weights(layer.features[None], layer.sigma.log(), eps=0.0)
        torch.testing.assert_close(layer.weights, weights[0])


def test_attention_that_does_something_else_is_refused(images):
    model = tiny_vit.create()
    model.blocks[1].attn.register_forward_hook(lambda layer, args, output: 2 * output)
    with pytest.raises(UserError, match=r"layer 2 \(GKA\) does not give the model's output"):
        attention_maps(model, images)
    with pytest.raises(UserError, match="attention of ResNet is not known"):
        attention_layers(build("resnet18"))


# Tokens


@pytest.mark.parametrize("name, settings, expected", LAYOUTS.values(), ids=LAYOUTS)
def test_tokens_before_the_patches_are_counted(name, settings, expected):
    subject = subject_of(name, **settings)
    tokens, weights = subject.tokens, subject.layers[0].weights
    assert tokens == expected and tokens.count == weights.shape[-1]
    read = weights[:, 0] if tokens.has_class else weights[:, tokens.prefix :].mean(1)
    torch.testing.assert_close(tokens.read(weights), read)
    assert ("mean row" in tokens.reader) == (not tokens.has_class)
    assert tokens.patches(read)[1, 1, 2] == read[1, tokens.prefix + 5]


def test_the_four_queries_are_the_papers():
    square = Tokens((14, 14), (16, 16))
    assert square.queries() == [(3, 3), (7, 7), (10, 10), (3, 10)]
    assert square.token(3, 10) == 1 + 14 * 3 + 10
    assert Tokens((2, 3), (4, 4)).queries() == [(0, 0), (1, 1), (1, 2), (0, 2)]
    weights = random_weights(3, 197, 197)
    maps = query_maps(weights.mean(0), square)
    assert maps.shape == (4, 14, 14)
    torch.testing.assert_close(maps[3, 5, 6], weights[:, 53, 1 + 14 * 5 + 6].mean())


# Rollout


@pytest.mark.parametrize("discard", [0.0, 0.5, 0.9])
def test_rollout_is_the_product_from_the_last_layer_to_the_first(discard):
    tokens = Tokens((2, 3), (4, 4))
    layers = [random_weights(2, 7, 7) for _ in range(3)]
    expected = np.eye(7)
    for weights in layers:
        mean = weights.double().mean(0).numpy()
        threshold = np.quantile(mean, discard)
        augmented = np.zeros((7, 7))
        for i in range(7):
            for j in range(7):
                kept = mean[i, j] if mean[i, j] >= threshold or j == 0 else 0
                augmented[i, j] = 0.5 * kept + 0.5 * (i == j)
            augmented[i] /= augmented[i].sum()
        expected = augmented @ expected
    result = rollout(layers, tokens, discard)
    np.testing.assert_allclose(result.numpy(), expected)
    np.testing.assert_allclose(result.sum(-1).numpy(), 1)
    assert not torch.allclose(result, rollout(layers[::-1], tokens, discard))


@pytest.mark.parametrize("has_class", [True, False])
def test_a_token_that_loses_its_whole_row_keeps_itself(has_class):
    """Row 1 is flat, so all of it is below the quantile; with a class token its weight of that stays."""
    weights = torch.eye(6) * 0.94 + 0.01
    weights[1] = 1 / 6
    weights[:, 1] = weights[:, 1].clamp(max=0.15)
    tokens = Tokens((1, 5), (4, 4), 1) if has_class else Tokens((2, 3), (4, 4), 0, False)
    row = rollout([weights[None]], tokens, 0.9)[1]
    assert row.sum() == pytest.approx(1) and (row[0] > 0) == has_class
    assert row[1] == pytest.approx(0.5 / (0.5 + 0.5 / 6) if has_class else 1)
    assert row[2:].eq(0).all()


def test_nothing_is_discarded_from_uniform_attention():
    uniform, tokens = torch.full((1, 5, 5), 0.2), Tokens((2, 2), (4, 4))
    torch.testing.assert_close(rollout([uniform], tokens, 0.9), rollout([uniform], tokens))


# Numbers that describe W


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


def test_widths_of_the_identity_and_of_uniform_attention():
    both = torch.stack([torch.eye(5), torch.full((5, 5), 0.2)])
    torch.testing.assert_close(effective_tokens(both), torch.tensor([1.0, 5.0]))
    torch.testing.assert_close(diagonal_mass(both), torch.tensor([1.0, 0.2]))
    torch.testing.assert_close(entropy(both)[:, 0], torch.tensor([0.0, np.log(5.0)]).float())


def test_median_distance_is_over_pairs_of_different_tokens():
    features = torch.tensor([[0.0], [1.0], [3.0]])[:, None] * torch.tensor([1.0, 10.0])[:, None]
    torch.testing.assert_close(median_distance(features), torch.tensor([2.0, 20.0]))


def test_layers_without_bandwidth_have_none_in_the_figure_of_sigma():
    subject = subject_of("deit_tiny_gka_patch16_224", attention="GA")
    relative = relative_bandwidths(subject)
    assert np.isfinite(relative[0]).all() and np.isnan(relative[1]).all() and np.isnan(subject.sigmas[1]).all()
    assert subject.has_sigma and not subject_of("deit_tiny_patch16_224").has_sigma
    assert ((widths(subject) >= 1) & (widths(subject) <= 7)).all()
    np.testing.assert_allclose(
        relative[0], (subject.layers[0].sigma / median_distance(subject.layers[0].features)).numpy()
    )


# Pictures


def test_matrices_are_subsampled_evenly_and_lose_their_diagonal():
    weights = torch.arange(197.0)[:, None] + torch.arange(197.0) / 1000
    some = subsample(weights, 50)
    assert some.shape == (50, 50) and some[0, 0] == 0 and some[-1, -1] == weights[-1, -1]
    assert subsample(weights, -1) is weights and subsample(weights, 500) is weights
    assert off_diagonal(torch.arange(9.0).view(3, 3)).tolist() == [1, 2, 3, 5, 6, 7]


def test_the_picture_of_a_matrix_has_a_grey_diagonal_and_the_class_token_apart():
    weights = random_weights(80, 80)
    picture = matrix_picture(weights, linear(weights), prefix=1)
    assert picture.shape == (82, 82, 3)  # two lines for the class token, one between: 2 + 1 + 79
    assert (picture[2] == 255).all() and (picture[:, 2] == 255).all()
    grey = picture[0, 0]
    assert (picture[:2, :2] == grey).all() and (picture[range(3, 82), range(3, 82)] == grey).all()
    assert matrix_picture(weights, linear(weights), prefix=0).shape == (80, 80, 3)


@pytest.mark.parametrize("values", [torch.zeros(4), torch.full((4,), 0.2), torch.tensor([1e-30, 0.5])], ids=str)
def test_scales_take_values_that_are_all_the_same(values):
    for norm in (linear(values), logarithmic(values)):
        assert norm.vmin < norm.vmax and np.isfinite(norm(values.numpy())).all()
    assert overlay(np.ones((8, 12, 3)), values.repeat(3).view(-1, 3), linear(values)).shape == (8, 12, 3)


def test_a_few_tokens_have_the_kernel_of_the_equations():
    features = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    affinities, weights = few_weights(features, sigma=2.0)
    expected = torch.tensor([1.0, np.exp(-25 / 8), np.exp(-1 / 8)]).double()
    torch.testing.assert_close(affinities[0], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(weights[0], expected / expected.sum(), rtol=1e-6, atol=0)
    assert choose_tokens(torch.tensor([[9.0], [0.0], [5.0], [1.0], [2.0]]), query=3, first=1, count=3) == [3, 4, 2]
    assert choose_tokens(torch.zeros(4, 2), query=2, first=1) == [2, 1, 3]
