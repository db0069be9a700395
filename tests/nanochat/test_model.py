"""The models as a whole: every kind of attention, hybrids, head offsets, windows, loading."""

import copy
import dataclasses

import pytest
import torch

from gka import gaussian_attention
from nanochat_gka.model.accounting import meta_model, parameter_counts
from nanochat_gka.model.attention import build_attention
from nanochat_gka.model.blocks import Rotary, norm
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.context import Context
from nanochat_gka.model.gpt import build
from nanochat_gka.training import memory
from nanochat_gka.training.optim import OptimConfig, parameter_groups
from sharding import check_trains_as_in_bfloat16, process_group
from tiny_gpt import SHAPE, VARIANTS, awake


def whole(x):
    """The context of whole sequences, for a layer that is called without its model."""
    context = Context()
    context.begin(x.shape[1])
    return context


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_later_tokens_change_nothing(variant):
    model = awake(dataclasses.replace(SHAPE, **variant))
    ids = torch.randint(70, (2, 16))
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 70
    assert torch.equal(model(ids)[:, :9], model(changed)[:, :9])
    assert not torch.allclose(model(ids)[:, 9:], model(changed)[:, 9:])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_parameter_learns(variant):
    """And is of one group of the optimiser, and counted before the model is built."""
    model = awake(dataclasses.replace(SHAPE, **variant))
    ids = torch.randint(70, (2, 17))
    model(ids[:, :-1], ids[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    names = [name for group in parameter_groups(model, OptimConfig()) for name in group.names]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    assert sum(memory.parameters(model.config)) == parameter_counts(model)["total"]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_model_that_is_cast_to_bfloat16_computes_decodes_and_learns(variant):
    """As other people's tools treat models: within the rounding that bfloat16 costs, with float32 logits."""
    exact = awake(dataclasses.replace(SHAPE, **variant))
    model = copy.deepcopy(exact).to(torch.bfloat16)
    ids = torch.randint(70, (2, 16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    whole, cache = model(ids), model.new_cache(2, 16)
    parts = torch.cat([model(ids[:, :8], context=cache), model(ids[:, 8:], context=cache)], dim=1)
    for logits in (whole, parts):
        assert logits.dtype == torch.float32
        assert (logits - exact(ids)).norm() < 0.03 * logits.norm()
    model(ids, ids).backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_rows_give_no_logits(variant):
    model = awake(dataclasses.replace(SHAPE, **variant))
    logits = model(torch.zeros(0, 16, dtype=torch.long))
    assert logits.shape == (0, 16, 70)
    logits.sum().backward()


@pytest.mark.parametrize("variant", [dict(attention="gka"), dict(attention="GA", value_embeds="all")], ids=str)
def test_fsdp_in_bfloat16(variant, tmp_path):
    ids = torch.randint(70, (2, 17))
    with process_group(tmp_path):
        model = awake(dataclasses.replace(SHAPE, **variant))
        check_trains_as_in_bfloat16(model, lambda m: m.transformer.h, lambda m: m(ids[:, :-1], ids[:, 1:]))


def tables(positions: int, width: int) -> Rotary:
    rotary = Rotary(positions, width)
    rotary.init_weights()
    return rotary


def one_layer(number=0, **fields):
    """A gka layer with a bandwidth for every head, its rotary embedding, a block input (2, 16, 64), and its heads."""
    fields = {"attention": "gka", "window_pattern": "L", **fields}
    layer = build_attention(dataclasses.replace(SHAPE, **fields), layer=number)
    layer.init_weights()
    with torch.no_grad():
        layer.log_sigma.copy_(torch.tensor([0.3, 0.5, 0.7, 0.9]))
    x = torch.randn(2, 16, 64)
    return layer, tables(16, 16), x, x.view(2, 16, 4, 16)


def test_gka_is_the_papers_section_5_1():
    """In float64: rotate, normalise; K = exp(-|x_i - x_j|^2 / 2 sigma^2) over j <= i; rows to one; mix the same x."""
    layer, rotary, x, heads = one_layer()
    features = norm(rotary(heads, slice(0, 16))).double().transpose(1, 2)  # (B, H, T, D)
    distances = (features[:, :, :, None] - features[:, :, None]).square().sum(-1)
    kernel = torch.exp(-distances / (2 * layer.log_sigma.double().exp().square()[:, None, None])).tril()
    want = (kernel / kernel.sum(-1, keepdim=True)) @ features
    torch.testing.assert_close(
        layer.mix(x, None, rotary, whole(x)).double(), want.transpose(1, 2), rtol=1e-5, atol=1e-5
    )


# Of the four heads, by how many tokens keys and values are late.
BY_HAND = {"NPS": [(0, 0), (0, 1), (1, 0), (0, 0)], "PNSSP": [(0, 1), (0, 0), (1, 0), (1, 0)]}


@pytest.mark.parametrize("pattern", BY_HAND)
@pytest.mark.parametrize("form", ["rotated", "normalised"])
def test_head_offsets_shift_keys_or_values(form, pattern):
    """Against the definition: head by head, keys and values shifted by hand, distances to the shifted keys."""
    layer, rotary, x, heads = one_layer(1, head_offsets=pattern, gka_values=form)
    features = norm(rotary(heads, slice(0, 16)))
    values = {"rotated": features, "normalised": norm(heads)}[form]
    got = layer.mix(x, None, rotary, whole(x))
    for head, (late_keys, late_values) in enumerate(BY_HAND[pattern]):
        one = slice(head, head + 1)
        want = gaussian_attention(
            features[:, :, one],
            layer.log_sigma[one],
            keys=features[:, [max(0, j - late_keys) for j in range(16)], one],
            values=values[:, [max(0, j - late_values) for j in range(16)], one],
            causal=True,
            impl="reference",
        )
        torch.testing.assert_close(got[:, :, one], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", BY_HAND)
@pytest.mark.parametrize("kind", ["softmax", "vlt"])
def test_controls_have_the_same_offsets(kind, pattern):
    """Softmax and VLT heads, against those without offsets on keys and values that are shifted by hand."""
    torch.manual_seed(1)
    config = dataclasses.replace(SHAPE, attention=kind, head_offsets=pattern, offset_layers="all", window_pattern="L")
    shifted, plain = (build_attention(one, 1) for one in (config, dataclasses.replace(config, head_offsets="N")))
    queries, keys, values = torch.randn(3, 2, 16, 4, 16)
    got = shifted.attend(None, queries, (keys, values))
    for head, delays in enumerate(BY_HAND[pattern]):
        keys_of_head, values_of_head = (
            tensor[:, [max(0, j - late) for j in range(16)]] for tensor, late in zip((keys, values), delays)
        )
        want = plain.attend(None, queries, (keys_of_head, values_of_head))
        torch.testing.assert_close(got[:, :, head], want[:, :, head])
    gka_alone = dataclasses.replace(config, attention="GA", head_offsets="PS", offset_layers="gka")
    assert [attn.pairing is not None for attn in meta_model(gka_alone).attentions] == [True, False, True, False]


@pytest.mark.parametrize("attention, values", [("gka", "normalised"), ("softmax", "rotated")])
def test_a_saved_shape_keeps_its_form(attention, values):
    """Softmax models, of which values say nothing, were saved with a value of it."""
    saved = dataclasses.asdict(dataclasses.replace(SHAPE, attention=attention)) | {"gka_values": "normalised"}
    config = GPTConfig.from_saved(saved)
    assert (config.attention, config.gka_values) == (attention, values)
    assert GPTConfig.from_saved(dataclasses.asdict(config)) == config


def test_starting_bandwidths():
    for fields, sigma_squared in ((dict(), 16.0), (dict(head_offsets="PS"), 4.0), (dict(sigma_squared=3.0), 3.0)):
        model = build(dataclasses.replace(SHAPE, attention="gka", **fields), "cpu")
        for sigma in model.bandwidths().values():
            torch.testing.assert_close(sigma.square(), torch.full((4,), sigma_squared))


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(n_head=5, n_kv_head=5), "even whole number"),
        (dict(attention="lin"), "or a pattern of their letters such as GGGA"),
        (dict(window_pattern=""), "window_pattern must be made of the letters S, L"),
        (dict(head_offsets="PQ"), "head_offsets must be made of the letters N, P, S"),
        (dict(head_offsets="P2S"), "got 'P2S'"),
        (dict(head_offsets="PS"), "head_offsets is for gka layers, and attention=softmax has none in 4 layers; off"),
        (dict(gka_values="raw"), "gka_values must be one of rotated, normalised, got 'raw'"),
    ],
)
def test_bad_shapes(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **fields)


@pytest.mark.parametrize("kind, values", [("gka", "rotated"), ("gka", "normalised"), ("softmax", "")])
def test_channel_bandwidths_and_head_gates_are_their_equations(kind, values):
    """From the equations, in float64: features = norm(rotary(norm(x) exp(a))), values without a; 2 sigmoid(0.1 G x)."""
    form = dict(gka_values=values) if kind == "gka" else dict(offset_layers="all")
    config = dataclasses.replace(SHAPE, attention=kind, channel_bandwidths=True, head_gates=True, **form)
    layer = build_attention(config, layer=3)
    layer.init_weights()
    with torch.no_grad():
        for parameter in (layer.channel_log_scales, layer.head_gate.weight, layer.c_proj.weight):
            parameter.normal_()
        if kind == "gka":
            layer.log_sigma.uniform_(0, 1)
    layer, x = layer.double(), torch.randn(2, 16, 64, dtype=torch.float64)
    rotary = tables(16, 16).double()
    y = layer(x, None, rotary, whole(x))

    def normed(t):
        return t / (t.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()

    def rotated(t):
        cos, sin = (table[:, :16].reshape(1, 16, 1, 8) for table in (rotary.cos, rotary.sin))
        one, two = t[..., :8], t[..., 8:]
        return torch.cat([one * cos + two * sin, two * cos - one * sin], dim=-1)

    def heads(t):
        return t.reshape(2, 16, 4, 16)

    scales = layer.channel_log_scales.exp()
    if kind == "gka":
        own = normed(heads(x))
        features = normed(rotated(own * scales.reshape(4, 16)))
        mixed = normed(rotated(own)) if values == "rotated" else own
        distances = (features[:, :, None] - features[:, None]).square().sum(-1)  # (B, i, j, H)
        logits = -distances / (2 * (2 * layer.log_sigma).exp())
    else:
        queries, keys = (normed(rotated(heads((x * scales) @ w.weight.T))) for w in (layer.c_q, layer.c_k))
        mixed = heads(x @ layer.c_v.weight.T)
        logits = torch.einsum("bihd,bjhd->bijh", queries, keys) / 16**0.5
    later = torch.arange(16)[None] > torch.arange(16)[:, None]
    weights = logits.masked_fill(later[None, :, :, None], float("-inf")).softmax(2)
    gates = 2 / (1 + (-0.1 * x @ layer.head_gate.weight.T).exp())
    expected = (torch.einsum("bijh,bjhd->bihd", weights, mixed) * gates[..., None]).flatten(2) @ layer.c_proj.weight.T
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
