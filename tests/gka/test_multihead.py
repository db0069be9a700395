"""The layer in torch's own transformer: padded batches, masks, training and evaluation, decoder, saving."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from gka import GaussianKernelAttention, GaussianMultiheadAttention, replace_multihead
from operator_cases import filled

LENGTHS = torch.tensor([9, 4, 1])
PADDING = torch.arange(9) >= LENGTHS[:, None]


def encoder(preset=None, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **options)
    return filled(replace_multihead(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options), preset=preset))


@pytest.mark.parametrize(
    "options", [dict(), dict(norm_first=True), dict(activation="gelu"), dict(preset="text")], ids=str
)
def test_padding_ids_do_not_move_real_tokens(options):
    """In training and, where torch has a fast path, in evaluation; equal to every sequence alone."""
    model, x = encoder(**options), torch.randn(3, 9, 32)
    other = torch.where(PADDING[..., None], torch.randn(3, 9, 32) * 10, x)
    for mode in (model.train(), model.eval()):
        with torch.set_grad_enabled(mode.training):
            y, again = (mode(t, src_key_padding_mask=PADDING) for t in (x, other))
            assert torch.equal(y[~PADDING], again[~PADDING])
            for row, length in enumerate(LENGTHS):
                torch.testing.assert_close(y[row, :length], mode(x[row : row + 1, :length])[0], rtol=1e-4, atol=1e-5)


def test_it_computes_what_the_layer_computes():
    layer, torchs = GaussianKernelAttention(32, 4), GaussianMultiheadAttention(32, 4)
    torchs.out_proj.load_state_dict(layer.proj.state_dict())
    x, context, mask = torch.randn(3, 9, 32), torch.randn(3, 5, 32), torch.rand(9, 9) < 0.7
    mask.fill_diagonal_(True)
    first = lambda t: t.transpose(0, 1)  # noqa: E731  torch's default order
    y, weights = torchs(first(x), first(x), first(x), attn_mask=~mask, average_attn_weights=False)
    want, want_weights = layer(x, attn_mask=mask, need_weights=True)
    same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    same((first(y), weights), (want, want_weights))
    floats = torch.zeros(9, 9).masked_fill(~mask, float("-inf"))
    by_head = floats.expand(12, 9, 9)
    for mask in (floats, by_head):
        same(torchs(first(x), first(x), first(x), attn_mask=mask)[0], y)
    y, weights = torchs(first(x), first(context), first(context), key_padding_mask=PADDING[:, :5])
    want, want_weights = layer(x, context, key_padding_mask=PADDING[:, :5], need_weights=True)
    same((first(y), weights), (want, want_weights.mean(1)))


@pytest.mark.parametrize("preset", ["text", "image"])
def test_a_preset_is_that_of_the_layer(preset):
    """Without rotary positions, as models around torch's layer add their own; the patches are a square."""
    torchs = GaussianMultiheadAttention(32, 4, preset=preset)
    layer = filled(GaussianKernelAttention(32, 4, preset=preset, rotary=False, bias=True))
    torchs.load_state_dict({name.replace("proj.", "out_proj."): t for name, t in layer.state_dict().items()})
    x, mask = torch.randn(3, 10, 32), torch.ones(10, 10).triu(1).bool()
    options = dict(attn_mask=mask) if preset == "text" else {}
    y, weights = copy.deepcopy(torchs)(*[x.transpose(0, 1)] * 3, **options, average_attn_weights=False)
    want = layer(x, attn_mask=~mask, need_weights=True) if options else layer(x, need_weights=True)
    torch.testing.assert_close((y.transpose(0, 1), weights), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", [None, "text"])
def test_causal_masks_of_encoders_and_decoders(preset):
    """nn.Transformer whole: what comes later does not reach what is earlier."""
    torch.manual_seed(0)
    model = replace_multihead(nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True), preset=preset)
    gated = [name.split(".")[-2] for name, part in filled(model).named_modules() if name.endswith("head_gate")]
    assert gated == ["self_attn"] * 4 * (preset == "text")
    source, target = torch.randn(2, 7, 32), torch.randn(2, 9, 32)
    causal = nn.Transformer.generate_square_subsequent_mask(9)
    y = model(source, target, tgt_mask=causal)
    later = target.clone()
    later[:, 5:] = torch.randn(2, 4, 32)
    again = model(source, later, tgt_mask=causal)
    assert torch.equal(y[:, :5], again[:, :5]) and not torch.equal(y[:, 5:], again[:, 5:])
    assert not any(isinstance(module, nn.MultiheadAttention) for module in model.modules())


def test_what_it_cannot_replace_is_named():
    with pytest.raises(ValueError, match="0 has keys or values of another width"):
        replace_multihead(nn.Sequential(nn.MultiheadAttention(32, 4, kdim=16)))
    model = replace_multihead(nn.Sequential(nn.MultiheadAttention(32, 4)))
    for none in (nn.Linear(32, 32), model):  # in the second they are replaced already
        with pytest.raises(ValueError, match="the model has no torch"):
            replace_multihead(none)
    layer, x, other = GaussianMultiheadAttention(32, 4, preset="text"), torch.zeros(3, 2, 32), torch.ones(3, 2, 32)
    for foreign, reason in (((other, other), "takes no context"), ((x, other), "values must be the keys")):
        with pytest.raises(ValueError, match=reason):
            layer(x, *foreign)
    with pytest.raises(ValueError, match="0 and minus infinity alone"):
        GaussianMultiheadAttention(32, 4)(*[torch.zeros(3, 2, 32)] * 3, key_padding_mask=torch.ones(2, 3))


def test_a_model_that_is_refused_stays_as_it_was():
    good = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    model = nn.ModuleList([good, nn.MultiheadAttention(32, 4, add_bias_kv=True)])
    x, before = torch.randn(2, 9, 32), [type(part) for part in model.modules()]
    y = good.eval()(x)
    for refused, options in (model, {}), (good, dict(sigma_squared=-1.0)), (good, dict(preset="texts")):
        with pytest.raises(ValueError, match=r"adds keys of its own|sigma_squared|preset"):
            replace_multihead(refused, **options)
        assert before == [type(part) for part in model.modules()]
        assert good.use_nested_tensor and torch.equal(good(x), y)


def test_the_hint_of_a_causal_mask_counts_for_as_many_keys_as_queries():
    layer, x = GaussianMultiheadAttention(32, 4, batch_first=True), torch.randn(2, 3, 32)
    context = torch.randn(2, 5, 32)
    mask = torch.ones(3, 5).triu(1).bool()
    y, again = (layer(x, context, context, attn_mask=mask, is_causal=hint)[0] for hint in (True, False))
    assert torch.equal(y, again)
    with pytest.raises(ValueError, match="needs attn_mask"):
        layer(x, context, context, is_causal=True)


def test_a_layer_in_two_places_stays_one():
    model = nn.Module()
    model.first = model.second = nn.MultiheadAttention(32, 4)
    replace_multihead(model.eval())
    assert model.first is model.second and isinstance(model.first, GaussianMultiheadAttention)
    assert not model.first.training
