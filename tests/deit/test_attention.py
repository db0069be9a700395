"""Attention layers against the paper's equations, by themselves and with what we add: offsets, bandwidths.

All in float64: what float32 and bfloat16 round is tested on whole models (test_models.py) and on the operator.
Legend: B batch, N tokens, H heads, D head_dim, C = H * D.
"""

import copy
import math

import pytest
import torch
from torch import nn

from deit_gka.model.attention import ATTENTION
from gka import testing
from tiny_vit import kinds, small

SHAPES = [(2, 7, 2, 3), (1, 31, 3, 8), (3, 1, 2, 5), (1, 50, 1, 64)]  # B, N, H, D
EPS = torch.finfo(torch.float64).eps


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# The definition


def exponents(layer, x):
    """The logarithms of the affinities, (B, H, N, N): paper eq. 3, or Q K^T / sqrt(D)."""

    def heads(features):
        return features.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)

    if layer.kind == "gka":
        scaled = heads(x if layer.log_scale is None else x * layer.log_scale.exp())
        distance2 = (scaled[:, :, :, None] - scaled[:, :, None]).square().sum(-1)
        return -distance2 / (2 * layer.log_sigma.exp().square()[:, None, None])
    matrix, width = layer.qk if hasattr(layer, "qk") else layer.qkv, 2 * x.shape[-1]
    queries, keys = map(heads, (x @ matrix.weight[:width].T + matrix.bias[:width]).chunk(2, dim=-1))
    return queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])


def by_definition(layer, x, visible, holder):
    """The layer's output, (B, N, C): paper eq. 4 and 7. visible: factors on the affinities; rows of 0 stay 0.

    holder: (H, N), whose value a token holds on each head; None = its own.
    """
    affinity = exponents(layer, x).exp() * visible
    sums = affinity.sum(-1, keepdim=True)
    values = x
    if layer.kind == "softmax":
        values = x @ layer.qkv.weight[2 * x.shape[-1] :].T + layer.qkv.bias[2 * x.shape[-1] :]
    elif layer.kind == "vlt":
        values = x + layer.value_bias
    values = values.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
    if holder is not None:
        values = torch.stack([values[:, head, places] for head, places in enumerate(holder)], dim=1)
    mixed = affinity / torch.where(sums == 0, 1, sums) @ values
    return mixed.transpose(1, 2).flatten(2) @ layer.proj.weight.T + layer.proj.bias


def spread(layer):
    """The layer with unequal bandwidths, sigma^2 not a power of two, and biases that are not zero."""
    for name, parameter in layer.double().named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
        elif name == "log_scale":
            nn.init.normal_(parameter, std=0.5)
    if layer.kind == "gka":
        layer.log_sigma.data.copy_(testing.make_log_sigma(layer.num_heads, layer.head_dim))
    return layer


def make_layer(kind, shape, **settings):
    batch, tokens, heads, dim = shape
    layer = spread(ATTENTION[kind](heads * dim, heads, qkv_bias=True, **settings))
    return layer, torch.randn(batch, tokens, heads * dim)


def check(layer, x, visible=1.0, holder=None, **call):
    """y and all gradients are those of the definition, up to rounding. call: how the layer is called.

    A sum of n terms rounds by at most n eps of the sum of their sizes, and an exponential is off by as much as its
    argument. A gradient sums up, over pairs of tokens and over channels, products of an entry of grad_y, of an entry of
    x and of weights; it may cancel, to 0 for sigma of a single token and for b_K, which the softmax ignores.
    """
    grad_y, (batch, tokens, width) = torch.randn_like(x), x.shape

    def with_gradients(function):
        twin, leaf = copy.deepcopy(layer), x.clone().requires_grad_()
        y = function(twin, leaf)
        y.backward(grad_y)
        return {"y": y.detach(), "dx": leaf.grad, **{name: p.grad for name, p in twin.named_parameters()}}

    want = with_gradients(lambda layer, x: by_definition(layer, x, visible, holder))
    got = with_gradients(lambda layer, x: layer(x, **call))
    terms = batch * tokens * (tokens + width) * (1 + exponents(layer, x).abs().max().item())
    for name, exact in want.items():
        off, size = (got[name] - exact).norm(), exact.norm() + grad_y.norm() * x.norm()
        assert off <= terms * EPS * size, f"{name} is off by {off / exact.norm():.1e}"


# Our kinds


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@kinds
def test_layers_equal_their_definitions(kind, shape, fused, is_causal):
    layer, x = make_layer(kind, shape)
    assert layer.fused_attn is fused
    visible = torch.ones(shape[1], shape[1])
    check(layer, x, visible.tril() if is_causal else visible, is_causal=is_causal)


@kinds
def test_dropout_acts_in_training_only(kind):
    layer, x = make_layer(kind, (2, 9, 2, 8), attn_drop=0.4)
    weights = []
    layer.attn_drop.register_forward_hook(lambda module, inputs, output: weights.extend((*inputs, output)))
    y, (before, after) = layer(x), weights
    remaining = after != 0
    assert 0.4 < remaining.double().mean() < 0.8
    torch.testing.assert_close(after[remaining], before[remaining] / 0.6)
    values = layer.values(x.unflatten(-1, (2, 8)))
    torch.testing.assert_close(y, layer.proj((after @ values.transpose(1, 2)).transpose(1, 2).flatten(2)))
    check(layer.eval(), x)
    layer, x = make_layer(kind, (2, 9, 2, 8), proj_drop=0.5)
    y, want = layer(x), layer.eval()(x)
    assert 0.3 < (y != 0).double().mean() < 0.7
    torch.testing.assert_close(y[y != 0], 2 * want[y != 0])


# Masks


@pytest.mark.parametrize("mask", ["pairs", "heads", "padding", "hidden", "added"])
@kinds
def test_masks_renormalise_rows(kind, mask, fused):
    """A mask as users pass it, and as factors on the paper's affinities (eq. 7). A row that hides everything is 0."""
    batch, tokens, heads, _ = shape = (3, 11, 2, 8)
    layer, x = make_layer(kind, shape)
    real = torch.arange(tokens) < torch.tensor([tokens - 2, tokens, tokens - 1])[:, None]  # of every image
    pairs, itself = torch.rand(batch, heads, tokens, tokens) < 0.5, torch.eye(tokens, dtype=torch.bool)
    attn_mask = {
        "pairs": pairs[0, 0] | itself,
        "heads": pairs | itself,
        "padding": real[:, None, None],
        "hidden": (real[:, :, None] & real[:, None])[:, None],  # padding reads nothing
        "added": torch.randn(tokens, tokens).masked_fill(pairs[0, 0], -math.inf),
    }[mask]
    check(layer, x, attn_mask.exp() if mask == "added" else attn_mask.double(), attn_mask=attn_mask)


# Spatial offsets

SEEN = {"N": (0, 0), "L": (0, -1), "R": (0, 1), "U": (-1, 0), "B": (1, 0), "D": (-1, -1)}  # row, column
LAYOUTS = {
    "class token": ("LUD", dict()),
    "none": ("RBN", dict(class_token=False, global_pool="avg")),
    "registers": ("UR", dict(reg_tokens=3)),
    "not square": ("DLB", dict(img_size=(48, 80))),
    "one row": ("LUR", dict(img_size=(16, 96))),
}


def check_offsets(model, pattern):
    """The first layer, on inputs of its own, holds the values of its neighbours."""
    layer, grid, prefix = spread(model.blocks[0].attn), model.patch_embed.grid_size, model.num_prefix_tokens

    def holder(letter, token):
        row, column = divmod(token - prefix, grid[1])
        down, right = SEEN[letter]
        inside = 0 <= row + down < grid[0] and 0 <= column + right < grid[1]
        return prefix + (row + down) * grid[1] + column + right if token >= prefix and inside else token

    x = torch.randn(2, prefix + math.prod(grid), model.embed_dim)
    letters = [pattern[head % len(pattern)] for head in range(layer.num_heads)]
    check(layer, x, holder=[[holder(letter, token) for token in range(x.shape[1])] for letter in letters])


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
