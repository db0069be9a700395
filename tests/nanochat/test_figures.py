"""The figures of language models: W of every kind and its check, the numbers read off it."""

import dataclasses

import numpy as np
import pytest
import torch

from gka import gaussian_weights
from nanochat_gka.figures.bandwidths import medians_and_sigmas
from nanochat_gka.figures.heads import MEASURES
from nanochat_gka.figures.maps import extract
from nanochat_gka.figures.rows import choose
from nanochat_gka.figures.subjects import TextSubject
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


def later(tensor, delays):
    """Of (T, H, ...): the entries of every head so many tokens later."""
    tokens = (torch.arange(TOKENS)[:, None] - delays).clamp(min=0)
    return tensor[tokens, torch.arange(len(delays))]


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
        one_hot = torch.eye(TOKENS)[:, None].expand(TOKENS, 4, TOKENS)  # the token of every slot's value
        reads = torch.einsum("hij,jht->hit", layer.weights, later(one_hot, layer.value_offsets))
        torch.testing.assert_close(layer.reads, reads)
        if layer.kind == "gka":
            sigma, keys = layer.sigma.log(), later(layer.features, layer.key_offsets)[None]
            [expected] = gaussian_weights(layer.features[None], sigma, keys=keys, causal=True, window=layer.window)
            torch.testing.assert_close(layer.weights, expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(layer.sigma, model.attentions[number].log_sigma.exp().detach())
            assert layer.initial_sigma == pytest.approx(2.0 if model.config.head_offsets else 4.0)
        else:
            assert layer.sigma is layer.features is layer.initial_sigma is None


def test_head_offsets_are_those_of_the_pattern():
    first = extract(tiny_model(attention="gka", head_offsets="NPS"), IDS)[0]
    assert first.value_offsets.tolist() == [0, 1, 0, 0] and first.key_offsets.tolist() == [0, 0, 1, 0]


def test_the_default_projection_of_untrained_models_proves_the_weights_too():
    """W_O starts at 0: the mixed heads are compared, before it."""
    model = tiny_model(attention="GA")
    for layer in model.attentions:
        torch.nn.init.zeros_(layer.c_proj.weight)
    assert all(0 < layer.error < 1e-5 for layer in extract(model, IDS))
    model.attentions[1].attend = lambda rotary, queries, stored: torch.zeros_like(queries)
    with one_line_error("layer 2 does not give the model's output"):
        extract(model, IDS)


WEIGHTS = torch.tensor([[1, 0, 0], [0.25, 0.75, 0], [0.2, 0.3, 0.5]])
BY_HAND = {
    "effective tokens": (0.25**-0.25 * 0.75**-0.75 + 0.2**-0.2 * 0.3**-0.3 * 0.5**-0.5) / 2,
    "weight of itself": (0.75 + 0.5) / 2,
    "weight of the token before": (0.25 + 0.3) / 2,
    "weight of the first token": (0.25 + 0.2) / 2,
    "mean distance (tokens)": (0.25 + 2 * 0.2 + 0.3) / 2,
}


def test_measures_against_values_by_hand():
    measured = {name: measure(WEIGHTS.expand(2, 4, 3, 3)) for name, measure in MEASURES.items()}
    torch.testing.assert_close(measured, {name: torch.full((2, 4), value) for name, value in BY_HAND.items()})


def test_bandwidths_are_compared_with_the_features_distances():
    model = tiny_model(attention="GA")
    subject = TextSubject("tiny", "tiny", model.config, "", [""] * TOKENS, extract(model, IDS), {})
    medians, sigmas = medians_and_sigmas(subject)
    assert np.isnan(medians[[1, 3]]).all() and np.isnan(sigmas[[1, 3]]).all()
    features = subject.layers[2].features[:, 1]
    pairs = [float((features[i] - features[j]).norm()) for i in range(TOKENS) for j in range(i)]
    assert medians[2, 1] == pytest.approx(sorted(pairs)[104])  # of 210, torch takes the lower one in the middle
    np.testing.assert_allclose(sigmas[2], subject.layers[2].sigma)


def test_queries_are_chosen_among_repeated_words():
    words = ["<|bos|>", "the", " list", " of", " the", " list", ",", " of", "."]
    assert choose(words) == [4, 5, 7] and choose(list("abcdef")) == [2, 3, 5] and choose(["a"]) == [0]
