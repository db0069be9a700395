"""The layer with head offsets: against a loop over heads in float64, under padding, and under what compiles it."""

import pytest
import torch
from torch import nn

from gka import GaussianKernelAttention, dispatch
from gka.masking import Mask

# Of sequences of 9 and 4 tokens; the last has a token of padding between them.
PADDED = {
    "right": torch.tensor([[False] * 9, [False] * 4 + [True] * 5]),
    "left": torch.tensor([[False] * 9, [True] * 5 + [False] * 4]),
    "between": torch.tensor([[False] * 9, [True, False, True, True, False, False, True, True, False]]),
}


class Padded(nn.Module):
    """A layer whose padding is an argument like the others, as torch.jit.trace wants it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, padding):
        return self.layer(x, key_padding_mask=padding)


def layer_and_tokens(**options):
    torch.manual_seed(0)
    layer = GaussianKernelAttention(24, 4, head_norm=True, channel_bandwidths=True, **options).double()
    with torch.no_grad():
        layer.log_scale.copy_(torch.linspace(-0.5, 0.5, 24))
        layer.log_sigma.copy_(torch.linspace(-1, 0.5, 4))
    return layer, torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)


def mixed_by_hand(layer, x, causal, window):
    """Tokens of one sequence (T, dim), a head at a time, from the definition."""
    values = nn.functional.rms_norm(x.view(len(x), 4, 6), (6,))
    features = nn.functional.rms_norm(values * layer.log_scale.exp().view(4, 6), (6,))
    before = [max(0, token - 1) for token in range(len(x))]
    heads = []
    for head, letter in enumerate("PSPS"):
        queries, keys, value = features[:, head], features[:, head], values[:, head]
        keys, value = (keys, value[before]) if letter == "P" else (keys[before], value)
        apart = (queries[:, None] - keys).square().sum(-1)
        kernel = torch.exp(-apart / (2 * layer.log_sigma[head].exp() ** 2))
        seen = Mask(causal, window).dense(len(x), len(x), x.device)
        kernel = kernel * seen
        heads.append(kernel / kernel.sum(-1, keepdim=True) @ value)
    return layer.proj(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("causal,window", [(True, None), (False, None), (True, 2), (False, 1)])
@pytest.mark.parametrize("padded", PADDED)
def test_head_offsets_are_their_definition_with_padding_too(padded, causal, window):
    """Outputs and all gradients; a NaN in padding reaches nothing."""
    layer, x = layer_and_tokens(causal=causal, window=window, head_offsets="ps")
    padding = PADDED[padded]
    tokens = x.masked_fill(padding[..., None], torch.nan)
    y, weights = layer(tokens, key_padding_mask=padding, need_weights=True)
    want = [mixed_by_hand(layer, row[~hidden], causal, window) for row, hidden in zip(x, padding)]
    learned = [x, *layer.parameters()]
    expected = torch.autograd.grad(sum(one.square().sum() for one in want), learned)
    gradients = torch.autograd.grad(y[~padding].square().sum(), learned)
    for got, right in zip((y[~padding], *gradients), (torch.cat(want), *expected)):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(y[padding], layer.proj.bias.expand(int(padding.sum()), 24))
    rows = weights.sum(-1).transpose(1, 2)
    torch.testing.assert_close(rows[~padding], torch.ones_like(rows[~padding]))
    assert not rows[padding].any() and not weights.transpose(1, 3)[padding].any()  # no query reads a hidden slot


@pytest.mark.parametrize("padded", PADDED)
def test_a_mask_of_ones_own_goes_with_the_tokens_that_are_packed(padded):
    """That says what `causal` says: places are not changed."""
    layer, x = layer_and_tokens(causal=True, head_offsets="PS")
    masked, _ = layer_and_tokens(head_offsets="PS")
    earlier = torch.ones(9, 9, dtype=torch.bool).tril()
    want = layer(x, key_padding_mask=PADDED[padded], need_weights=True)
    for mask in (earlier, torch.zeros(2, 1, 9, 9).masked_fill(~earlier, -torch.inf)):
        got = masked(x, key_padding_mask=PADDED[padded], attn_mask=mask, need_weights=True)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_a_padded_causal_layer_with_offsets_takes_the_fused_kernel_compiled_too(monkeypatch):
    """Where no token sees padding nothing is hidden but by the causal mask, which every kernel serves."""
    layer, x = layer_and_tokens(causal=True, head_offsets="PS")
    layer, x, taken = layer.float(), x.detach().float(), []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *arguments: taken.append(choose(*arguments)) or taken[-1])
    fused = layer.chosen_impl(9)
    for padding in PADDED.values():
        layer(x, key_padding_mask=padding)
    assert taken == [fused] * len(PADDED)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for padding in PADDED.values():
        torch.testing.assert_close(compiled(x, key_padding_mask=padding), layer(x, key_padding_mask=padding))


@pytest.mark.parametrize("head_offsets", ["", "PS"])
def test_a_trace_made_with_padding_on_the_right_serves_padding_elsewhere(head_offsets):
    layer, x = layer_and_tokens(causal=True, head_offsets=head_offsets)
    layer, x = layer.float(), x.detach().float()
    traced = torch.jit.trace(Padded(layer), (x, PADDED["right"]))
    for padding in PADDED.values():
        torch.testing.assert_close(traced(x, padding), layer(x, key_padding_mask=padding))


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
    padded = torch.cat([torch.full((2, 1, 24), torch.nan, dtype=torch.float64), context, context], dim=1)
    padding = torch.tensor([[True, False, False]] * 2)
    torch.testing.assert_close(layer(x, padded, key_padding_mask=padding), layer(x, context))
    with pytest.raises(ValueError, match="padded context need a layer that is not causal"):
        layer(x, padded, key_padding_mask=padding, is_causal=True)


@pytest.mark.parametrize("letters", ["PX", "P2", 3])
def test_other_letters_are_refused(letters):
    with pytest.raises(ValueError, match="head_offsets must be made of the letters N, P, S"):
        GaussianKernelAttention(24, 4, head_offsets=letters)
    with pytest.raises(ValueError, match="head_offsets PSNNS has 5 letters but there are 4 heads"):
        GaussianKernelAttention(24, 4, head_offsets="PSNNS")


def test_a_mask_of_another_shape_is_refused():
    layer, x = layer_and_tokens(head_offsets="PS")
    with pytest.raises(ValueError, match="key_padding_mask must have shape"):
        layer(x, key_padding_mask=torch.zeros(2, 8, dtype=torch.bool))
