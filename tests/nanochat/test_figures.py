"""The figures of language models: W of every kind and its check, the numbers read off it."""

import dataclasses

import pytest
import torch

from gka import gaussian_attention
from nanochat_gka.figures.maps import extract
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


def projected(model, ids):
    """What the projections of softmax and VLT layers gave: layer -> queries and keys, (H, T, D)."""
    seen = {}
    hooks = [
        getattr(layer, name).register_forward_hook(
            lambda _, args, output, place=(layer.layer, name): seen.update({place: output})
        )
        for layer in model.attentions
        for name in ("c_q", "c_k")
        if hasattr(layer, name)
    ]
    with torch.no_grad():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    heads = {place: output[0].unflatten(-1, (SHAPE.n_head, -1)) for place, output in seen.items()}
    positions = slice(0, len(ids))
    turned = {place: model.rotary(features[None], positions)[0] for place, features in heads.items()}
    return {place: (f / f.square().mean(-1, keepdim=True).sqrt()).transpose(0, 1) for place, f in turned.items()}


# W


@pytest.mark.parametrize("form", VARIANTS, ids=str)
def test_weights_follow_from_the_equations(form):
    """Softmax from its queries and keys; GKA from features, bandwidths, window and offsets alone."""
    model = tiny_model(**form)
    queries_and_keys, layers = projected(model, IDS), extract(model, IDS)
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    for number, layer in enumerate(layers):
        assert layer.error < 1e-5 and layer.kind == model.config.layer_attention(number)
        assert layer.window == (16 if number in (1, 3) or number == len(layers) - 1 else 8)
        visible = (j <= i) & (j >= i - layer.window)
        assert not layer.weights[:, ~visible].any()
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones(4, TOKENS))
        if layer.kind == "gka":
            _, expected = gaussian_attention(
                layer.features[None], layer.sigma.log(), keys=layer.keys[None], causal=True, window=layer.window,
                return_weights=True,
            )  # fmt: skip
            expected = expected[0]
            torch.testing.assert_close(layer.sigma, model.attentions[number].log_sigma.exp().detach())
            assert layer.initial_sigma == pytest.approx(2.0 if model.config.head_offsets else 4.0)
        else:
            queries, keys = (queries_and_keys[number, name] for name in ("c_q", "c_k"))
            for head in layer.key_offsets.nonzero()[:, 0].tolist():
                keys[head, 1:] = keys[head, :-1].clone()
            scores = (queries @ keys.transpose(1, 2) / SHAPE.head_dim**0.5).exp() * visible
            expected = scores / scores.sum(-1, keepdim=True)
            assert layer.sigma is layer.features is layer.keys is layer.initial_sigma is None
        torch.testing.assert_close(layer.weights, expected, atol=1e-5, rtol=1e-4)


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


def test_a_layer_that_puts_out_something_else_is_refused():
    model = tiny_model(attention="GA")
    model.attentions[2].register_forward_hook(lambda layer, args, output: 1.01 * output)
    with one_line_error("layer 3 does not give the model's output"):
        extract(model, IDS)
    assert len(model.attentions[2]._forward_hooks) == 1  # the hooks of the extraction are gone, this one is not


@pytest.mark.parametrize("count", [0, 161])
def test_texts_that_do_not_fit_are_refused(count):
    with one_line_error(f"the text must have 1 to 160 tokens, it has {count}"):
        extract(tiny_model(), [1] * count)
