"""The layer with head offsets: against a loop over heads in float64, under padding, and under what compiles it."""

import pytest
import torch
from torch import nn

from gka import GaussianKernelAttention

LENGTHS = (9, 4)


def layer_and_tokens(**options):
    torch.manual_seed(0)
    layer = GaussianKernelAttention(24, 4, head_norm=True, channel_bandwidths=True, **options).double()
    with torch.no_grad():
        layer.log_scale.copy_(torch.linspace(-0.5, 0.5, 24))
        layer.log_sigma.copy_(torch.linspace(-1, 0.5, 4))
    return layer, torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)


def mixed_by_hand(layer, x, causal):
    """Tokens of one sequence (T, dim), a head at a time, from the definition."""
    values = nn.functional.rms_norm(x.view(len(x), 4, 6), (6,))
    features = nn.functional.rms_norm(values * layer.log_scale.exp().view(4, 6), (6,))
    before = [max(0, token - 1) for token in range(len(x))]
    heads = []
    for head, letter in enumerate("PSPS"):
        own, keys, value = features[:, head], features[:, head], values[:, head]
        keys, value = (keys, value[before]) if letter == "P" else (keys[before], value)
        apart = (own[:, None] - keys).square().sum(-1)
        kernel = torch.exp(-apart / (2 * layer.log_sigma[head].exp() ** 2))
        kernel = kernel.tril() if causal else kernel
        heads.append(kernel / kernel.sum(-1, keepdim=True) @ value)
    return layer.proj(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
def test_head_offsets_are_their_definition_with_padding_too(side, causal):
    """Outputs and all gradients; a NaN in padding reaches nothing."""
    layer, x = layer_and_tokens(causal=causal, head_offsets="ps")
    lengths, steps = torch.tensor(LENGTHS), torch.arange(9)
    padding = steps >= lengths[:, None] if side == "right" else steps < 9 - lengths[:, None]
    tokens = x.masked_fill(padding[..., None], torch.nan)
    y, weights = layer(tokens, key_padding_mask=padding, need_weights=True)
    want = [mixed_by_hand(layer, row[~hidden], causal) for row, hidden in zip(x, padding)]
    learned = [x, *layer.parameters()]
    expected = torch.autograd.grad(sum(one.square().sum() for one in want), learned)
    given = torch.autograd.grad(y[~padding].square().sum(), learned)
    for got, right in zip((y[~padding], *given), (torch.cat(want), *expected)):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(y[padding], layer.proj.bias.expand(int(padding.sum()), 24))
    assert not weights.transpose(1, 3)[padding].any()  # no query reads a hidden slot


def test_head_offsets_in_float32_take_the_fused_kernel_and_show_no_future():
    layer, x = layer_and_tokens(causal=True, head_offsets="PS")
    layer, x = layer.float(), x.detach().float()
    literal = GaussianKernelAttention(24, 4, head_norm=True, channel_bandwidths=True, causal=True, head_offsets="PS")
    literal.load_state_dict(layer.state_dict())
    literal.impl = "reference"
    torch.testing.assert_close(layer(x), literal(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
    concrete = dict(context=None, key_padding_mask=None, attn_mask=None, is_causal=False, need_weights=False)
    torch.testing.assert_close(torch.fx.symbolic_trace(layer, concrete_args=concrete)(x), layer(x))
    changed = x.clone()
    changed[:, 5:] = torch.randn(2, 4, 24)
    torch.testing.assert_close(layer(changed)[:, :5], layer(x)[:, :5])
    assert (layer(changed)[:, 5] - layer(x)[:, 5]).abs().min() > 0
    assert "head_offsets=PS" in repr(layer)


def test_context_gets_the_offsets_in_cross_attention():
    layer, x = layer_and_tokens(head_offsets="NP")
    context = torch.randn(2, 1, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x, context), layer(x, context.expand(2, 3, 24).contiguous()))


@pytest.mark.parametrize("letters", ["PX", "P2", 3])
def test_other_letters_are_refused(letters):
    with pytest.raises(ValueError, match="head_offsets must be made of the letters N, P, S"):
        GaussianKernelAttention(24, 4, head_offsets=letters)


def test_a_mask_of_another_shape_is_refused():
    layer, x = layer_and_tokens(head_offsets="PS")
    with pytest.raises(ValueError, match="key_padding_mask must have shape"):
        layer(x, key_padding_mask=torch.zeros(2, 8, dtype=torch.bool))
