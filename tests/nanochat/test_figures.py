"""The figures of language models: W of every kind and its check, the numbers read off it."""

import dataclasses

import numpy as np
import pytest
import torch

from gka import gaussian_weights
from nanochat_gka.figures import measures
from nanochat_gka.figures.distances import medians_and_sigmas
from nanochat_gka.figures.maps import extract
from nanochat_gka.figures.subjects import TextSubject
from nanochat_gka.figures.words import choose, find
from tiny import one_line_error
from tiny_gpt import SHAPE, VARIANTS, awake

TOKENS = 21  # more than both windows of SHAPE, 8 and 16
IDS = torch.arange(TOKENS) * 7 % SHAPE.vocab_size


def tiny_model(**form):
    model = awake(dataclasses.replace(SHAPE, **form))
    with torch.no_grad():
        for layer in model.attentions:
            if layer.kind.has_bandwidth:
                layer.log_sigma += torch.linspace(-1, 0.5, len(layer.log_sigma))
    return model


# W


@pytest.mark.parametrize("form", VARIANTS, ids=str)
def test_weights_follow_from_the_equations(form):
    """GKA's from features, bandwidths, window and offsets alone. Those of other kinds give the output (`error`)."""
    model = tiny_model(**form)
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    for number, layer in enumerate(layers := extract(model, IDS)):
        assert layer.error < 1e-5 and layer.kind == model.config.layer_attention(number)
        assert layer.window == (16 if number in (1, 3) or number == len(layers) - 1 else 8)
        assert not layer.weights[:, ~((j <= i) & (j >= i - layer.window))].any()
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones(4, TOKENS))
        if layer.kind == "gka":
            sigma, keys = layer.sigma.log(), layer.keys[None]
            [expected] = gaussian_weights(layer.features[None], sigma, keys=keys, causal=True, window=layer.window)
            torch.testing.assert_close(layer.weights, expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(layer.sigma, model.attentions[number].log_sigma.exp().detach())
            assert layer.initial_sigma == pytest.approx(2.0 if model.config.head_offsets else 4.0)
        else:
            assert layer.sigma is layer.features is layer.keys is layer.initial_sigma is None


def test_head_offsets_say_which_token_a_slot_holds():
    first = extract(tiny_model(attention="gka", head_offsets="NPS"), IDS)[0]
    assert first.value_offsets.tolist() == [0, 1, 0, 0] and first.key_offsets.tolist() == [0, 0, 1, 0]
    before = torch.arange(TOKENS).sub(1).clamp(min=0)
    for head, moved in enumerate([False, False, True, False]):
        expected = first.features[before if moved else slice(None), head]
        torch.testing.assert_close(first.keys[:, head], expected, atol=0, rtol=0)
    torch.testing.assert_close(first.reads.sum(-1), torch.ones(4, TOKENS))
    shifted = torch.zeros(TOKENS, TOKENS)  # the head that pairs key j with value j - 1
    for slot in range(TOKENS):
        shifted[:, max(0, slot - 1)] += first.weights[1, :, slot]
    torch.testing.assert_close(first.reads[1], shifted)
    assert first.reads[1].diagonal()[1:].max() == 0 < first.weights[1].diagonal().min()
    torch.testing.assert_close(first.reads[[0, 2, 3]], first.weights[[0, 2, 3]], atol=0, rtol=0)


def test_the_default_projection_of_untrained_models_proves_the_weights_too():
    """W_O starts at 0: what the heads mixed is compared, before it."""
    model = tiny_model(attention="GA")
    for layer in model.attentions:
        torch.nn.init.zeros_(layer.c_proj.weight)
    assert all(0 < layer.error < 1e-5 for layer in extract(model, IDS))
    model.attentions[1].attend = lambda rotary, queries, stored: torch.zeros_like(queries)
    with one_line_error("recomputed W of layer 2 does not give the model's output"):
        extract(model, IDS)


# Measures


WEIGHTS = torch.tensor([[1, 0, 0], [0.25, 0.75, 0], [0.2, 0.3, 0.5]])


@pytest.mark.parametrize(
    "measure, expected",
    [
        (measures.self_weight, (0.75 + 0.5) / 2),
        (measures.previous_weight, (0.25 + 0.3) / 2),
        (measures.first_weight, (0.25 + 0.2) / 2),
        (measures.attended_distance, (0.25 + 2 * 0.2 + 0.3) / 2),
        (measures.effective, (0.25**-0.25 * 0.75**-0.75 + 0.2**-0.2 * 0.3**-0.3 * 0.5**-0.5) / 2),
    ],
)
def test_measures_against_values_by_hand(measure, expected):
    assert float(measure(WEIGHTS)) == pytest.approx(expected)
    assert measure(WEIGHTS.expand(2, 4, 3, 3)).shape == (2, 4)


def subject_of(**form):
    model = tiny_model(**form)
    words = [f"word{number}" for number in range(TOKENS)]
    return TextSubject("tiny", "tiny", model.config, "words", words, extract(model, IDS), [])


def test_bandwidths_are_compared_with_the_features_distances():
    subject = subject_of(attention="GA")
    medians, sigmas = medians_and_sigmas(subject)
    assert np.isnan(medians[[1, 3]]).all() and np.isnan(sigmas[[1, 3]]).all()
    features = subject.layers[2].features[:, 1]
    pairs = [float((features[i] - features[j]).norm()) for i in range(TOKENS) for j in range(i)]
    assert medians[2, 1] == pytest.approx(sorted(pairs)[104])  # of 210, torch takes the lower one in the middle
    np.testing.assert_allclose(sigmas[2], subject.layers[2].sigma)


# Words and pictures


def test_queries_are_found_by_their_words():
    words = ["<|bos|>", "the", " list", " of", " the", " list", ",", " of", "."]
    assert find(words, ["the", "list"]) == [4, 5] and find(words, [","]) == [6]
    with pytest.raises(KeyError, match="cat"):
        find(words, ["list", "cat"])
    assert choose(words) == [4, 5, 7] and choose(list("abcdef")) == [2, 3, 5] and choose(["a"]) == [0]
