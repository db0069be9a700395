"""Attention layers against the paper's equations in float64, by themselves and with what we add: offsets, bandwidths.

Legend: B batch, N tokens, H heads, D head_dim, C = H * D.
"""

import copy
import math

import pytest
import timm
import torch
from torch import nn

from deit_gka.model.attention import ATTENTION
from gka import testing
from tiny_vit import kinds, small

SHAPES = [(2, 7, 2, 3), (1, 31, 3, 8), (3, 1, 2, 5), (1, 50, 1, 64)]  # B, N, H, D
ALL_VISIBLE = torch.ones(())


# The definition


def queries_and_keys(layer, x):
    """Of a softmax or value-less layer, (B, H, N, D) each."""
    matrix, width = layer.qk if hasattr(layer, "qk") else layer.qkv, 2 * x.shape[-1]
    joined = x @ matrix.weight[:width].T + matrix.bias[:width]
    return (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in joined.chunk(2, dim=-1))


def weights_by_definition(layer, x, visible):
    """W, (B, H, N, N): paper eq. 3, 4 and 7, or softmax(Q K^T / sqrt(D)). visible: factors on the affinities."""
    if layer.kind == "gka":
        scaled = x if layer.log_scale is None else x * layer.log_scale.exp()
        heads = scaled.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        distance2 = (heads[:, :, :, None] - heads[:, :, None]).square().sum(-1)
        sigma = layer.log_sigma.to(x.dtype).exp()
        affinity = torch.exp(-distance2 / (2 * sigma.square()[:, None, None])) * visible.to(x.dtype)
        return affinity / affinity.sum(-1, keepdim=True)
    queries, keys = queries_and_keys(layer, x)
    logits = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1]) + visible.log().to(x.dtype)
    exp = (logits - logits.amax(-1, keepdim=True)).exp()
    return exp / exp.sum(-1, keepdim=True)


def by_definition(layer, x, visible=ALL_VISIBLE, holder=None):
    """The layer's output, (B, N, C). holder: (H, N), whose value a token holds on each head; None = its own."""
    values = x
    if layer.kind == "softmax":
        values = x @ layer.qkv.weight[2 * x.shape[-1] :].T + layer.qkv.bias[2 * x.shape[-1] :]
    elif getattr(layer, "value_bias", None) is not None:
        values = x + layer.value_bias
    values = values.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
    if holder is not None:
        values = torch.stack([values[:, head, places] for head, places in enumerate(holder)], dim=1)
    mixed = weights_by_definition(layer, x, visible) @ values
    return mixed.transpose(1, 2).flatten(2) @ layer.proj.weight.T + layer.proj.bias


def spread(layer):
    """The layer with unequal bandwidths, sigma^2 not a power of two, and biases that are not zero."""
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
        elif name == "log_scale":
            nn.init.normal_(parameter, std=0.5)
    if layer.kind == "gka":
        layer.log_sigma.data.copy_(testing.make_log_sigma(layer.num_heads, layer.proj.in_features // layer.num_heads))
    return layer


def make_layer(kind, shape, **settings):
    batch, tokens, heads, dim = shape
    layer = spread(ATTENTION[kind](heads * dim, heads, qkv_bias=True, **settings))
    return layer, torch.randn(batch, tokens, heads * dim)


def with_gradients(function, layer, x, grad_y, dtype):
    """y and its gradients by x and by every parameter, of function(layer, x) in dtype."""
    layer, x = copy.deepcopy(layer).to(dtype), x.to(dtype, copy=True).requires_grad_()
    y = function(layer, x)
    y.backward(grad_y.to(dtype))
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def check(layer, x, visible=ALL_VISIBLE, holder=None, **call):
    """y and all gradients are those of the definition, to 1e-4 of their norms. call: how the layer is called."""
    grad_y = torch.randn_like(x)
    want = with_gradients(lambda layer, x: by_definition(layer, x, visible, holder), layer, x, grad_y, torch.float64)
    got = with_gradients(lambda layer, x: layer(x, **call), layer, x, grad_y, torch.float32)
    for name, reference in want.items():
        assert got[name].dtype == torch.float32
        # Nothing to learn: about sigma from one token, and about b_K, which the softmax ignores.
        rounding = 1e-6 * grad_y.norm() if reference.norm() <= 1e-12 * x.shape[0] * grad_y.norm() else 0.0
        assert (got[name] - reference).norm() <= 1e-4 * reference.norm() + rounding, name


# Our kinds


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@kinds
def test_layers_equal_their_definitions(kind, shape, fused, is_causal):
    layer, x = make_layer(kind, shape)
    assert layer.fused_attn is fused
    visible = torch.ones(shape[1], shape[1], dtype=torch.float64)
    visible = visible.tril() if is_causal else visible
    check(layer, x, visible, is_causal=is_causal)


@kinds
def test_dropout_acts_in_training_only(kind):
    layer, x = make_layer(kind, (2, 9, 2, 8), attn_drop=0.4)
    weights = []
    layer.attn_drop.register_forward_hook(lambda module, inputs, output: weights.extend((*inputs, output)))
    y, (before, after) = layer(x), weights
    remaining = after != 0
    assert 0.4 < remaining.float().mean() < 0.8
    torch.testing.assert_close(after[remaining], before[remaining] / 0.6)
    values = layer.own_values(x.unflatten(-1, (2, 8)))
    torch.testing.assert_close(y, layer.proj((after @ values.transpose(1, 2)).transpose(1, 2).flatten(2)))
    torch.testing.assert_close(layer.eval()(x), by_definition(layer, x), rtol=1e-4, atol=1e-5)
    layer, x = make_layer(kind, (2, 9, 2, 8), proj_drop=0.5)
    y, want = layer(x), layer.eval()(x)
    assert 0.3 < (y != 0).float().mean() < 0.7
    torch.testing.assert_close(y[y != 0], 2 * want[y != 0])


# Masks


def tokens_seen(mask: str, shape):
    """A mask as users pass it, and the same as factors on the paper's affinities (eq. 7)."""
    batch, tokens, heads, _ = shape
    itself = torch.eye(tokens, dtype=torch.bool)
    if mask == "added":  # to the logits; -inf hides
        mask = torch.randn(tokens, tokens).masked_fill((torch.rand(tokens, tokens) < 0.3) & ~itself, -math.inf)
        return mask, mask.double().exp()
    if mask == "pairs":
        mask = (torch.rand(tokens, tokens) < 0.5) | itself
    elif mask == "heads":
        mask = (torch.rand(batch, heads, tokens, tokens) < 0.5) | itself
    else:  # keys that are padding, per image; the last tokens are
        lengths = torch.tensor([tokens - 2, tokens, tokens - 1])
        mask = (torch.arange(tokens) < lengths[:, None])[:, None, None]
    return mask, mask.double()


@pytest.mark.parametrize("mask", ["pairs", "padding", "heads", "added"])
@kinds
def test_masks_renormalise_rows(kind, mask):
    shape = (3, 11, 2, 8)
    layer, x = make_layer(kind, shape)
    attn_mask, visible = tokens_seen(mask, shape)
    check(layer, x, visible, attn_mask=attn_mask)


@pytest.mark.parametrize("form", ["bool", "added"])
@kinds
def test_rows_whose_mask_hides_everything_are_0_as_in_timms_fused_softmax(kind, form, fused):
    """Images of 2 and 4 tokens: what stands at padding is W_O's bias, and its gradient nothing but that."""
    layer, x = make_layer(kind, (2, 4, 2, 8))
    real = torch.arange(4) < torch.tensor([2, 4])[:, None]
    visible = (real[:, :, None] & real[:, None])[:, None]
    attn_mask = visible if form == "bool" else torch.zeros(2, 1, 4, 4).masked_fill(~visible, -math.inf)
    x.requires_grad_()
    y = layer(x, attn_mask=attn_mask)
    torch.testing.assert_close(y[0, 2:], layer.proj.bias.expand(2, 16))
    torch.testing.assert_close(y[:1, :2], layer(x[:1, :2]), rtol=1e-4, atol=1e-5)
    if fused:  # explicit, timm's is NaN
        timms = timm.layers.Attention(16, num_heads=2)
        torch.testing.assert_close(timms(x, attn_mask=attn_mask)[0, 2:], timms.proj.bias.expand(2, 16))
    y.square().sum().backward()
    assert not x.grad[0, 2:].any() and x.grad[0, :2].all()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


# Spatial offsets

SEEN = {"N": (0, 0), "L": (0, -1), "R": (0, 1), "U": (-1, 0), "B": (1, 0), "D": (-1, -1)}  # row, column
LAYOUTS = {
    "class token": ("LUD", dict()),
    "none": ("RBN", dict(class_token=False, global_pool="avg")),
    "registers": ("UR", dict(reg_tokens=3)),
    "not square": ("DLB", dict(img_size=(48, 80))),
    "one row": ("LUR", dict(img_size=(16, 96))),
}


def token_of(letter, token, grid, prefix):
    """The token whose value `token` holds on a head with that letter."""
    row, column = divmod(token - prefix, grid[1])
    down, right = SEEN[letter]
    inside = 0 <= row + down < grid[0] and 0 <= column + right < grid[1]
    return prefix + (row + down) * grid[1] + column + right if token >= prefix and inside else token


def check_offsets(model, pattern):
    """The first layer, on inputs of its own, holds the values of its neighbours."""
    layer, grid, prefix = spread(model.blocks[0].attn), model.patch_embed.grid_size, model.num_prefix_tokens
    x = torch.randn(2, prefix + math.prod(grid), model.embed_dim)
    letters = [pattern[head % len(pattern)] for head in range(layer.num_heads)]
    holder = [[token_of(letter, token, grid, prefix) for token in range(x.shape[1])] for letter in letters]
    check(layer, x, holder=holder)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ATTENTION)
def test_heads_hold_the_values_of_their_neighbours(kind, layout, fused):
    pattern, settings = LAYOUTS[layout]
    check_offsets(small(attention=kind, spatial_offsets=pattern, **settings), pattern)


def test_another_grid_is_followed_or_refused():
    model = small(spatial_offsets="LUD")
    model.set_input_size((32, 64))
    check_offsets(model, "LUD")
    with pytest.raises(ValueError, match="need 1 tokens and 2 x 4 patches, got 5 tokens"):
        model.blocks[0].attn(torch.randn(1, 5, 24))
    for setting in (dict(dynamic_img_size=True), dict(patch_drop_rate=0.5)):
        with pytest.raises(ValueError, match="need all patches of one grid"):
            small(spatial_offsets="LUD", **setting)


# A bandwidth for every channel


def test_the_kernel_compares_scaled_features_and_mixes_unscaled_values(fused):
    layer, x = make_layer("gka", (2, 7, 2, 4), channel_bandwidths=True)
    check(layer, x)
    layer.reset_parameters()
    assert not layer.log_scale.any()
