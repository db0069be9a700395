"""Attention layers against the paper's equations in float64.

Legend: B batch, N tokens, H heads, D head_dim, C = H * D.
"""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import timm.layers
import timm.optim
import torch
from timm.utils import AttentionExtract
from torch import nn

import explicit_sums
from deit_gka.model.attention import ATTENTION
from gka import testing
from gka.api import EPS
from operator_cases import AUTO_ON_CPU
from tiny_vit import kinds, small

SHAPES = [(2, 7, 2, 3), (1, 31, 3, 8), (3, 1, 2, 5), (1, 50, 1, 64)]  # B, N, H, D


shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def gaussian_weights(x, sigma, visible=1.0):
    """W by the definitions of paper eq. 3, 4 and 7, (B, H, N, N), for x (B, N, H, D) and sigma (H,).

    visible: factors on the affinities.
    """
    heads = x.transpose(1, 2)
    distance2 = (heads[:, :, :, None] - heads[:, :, None]).square().sum(-1)
    affinity = torch.exp(-distance2 / (2 * sigma.square()[:, None, None])) * visible
    return affinity / affinity.sum(-1, keepdim=True)


def gaussian_by_definition(layer, x, visible):
    heads = x.unflatten(-1, (layer.num_heads, -1))
    mixed = gaussian_weights(heads, layer.log_sigma.to(x.dtype).exp(), visible) @ heads.transpose(1, 2)
    return mixed.transpose(1, 2).flatten(2) @ layer.proj.weight.T + layer.proj.bias


def value_less_by_definition(layer, x, logit_bias):
    """softmax(Q K^T / sqrt(D)) applied to x itself (paper section 4.4), heads joined, W_O."""
    w_q, w_k = layer.qk.weight.chunk(2)
    b_q, b_k = layer.qk.bias.chunk(2)
    queries, keys, values = (
        t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for t in (x @ w_q.T + b_q, x @ w_k.T + b_k, x + layer.value_bias)
    )
    logits = queries @ keys.transpose(-1, -2) / math.sqrt(values.shape[-1]) + logit_bias
    exp = (logits - logits.amax(-1, keepdim=True)).exp()
    return (exp / exp.sum(-1, keepdim=True) @ values).transpose(1, 2).flatten(2) @ layer.proj.weight.T + layer.proj.bias


def by_definition(kind, visible):
    """The definition of a kind as a function of (layer, x). visible: factors on the affinities."""
    if kind == "gka":
        return lambda layer, x: gaussian_by_definition(layer, x, visible.to(x.dtype))
    return lambda layer, x: value_less_by_definition(layer, x, visible.log().to(x.dtype))


def make_layer(kind, shape, **settings):
    """A layer with unequal bandwidths, sigma^2 not a power of two, and biases that are not zero."""
    batch, tokens, heads, dim = shape
    layer = ATTENTION[kind](heads * dim, heads, qkv_bias=True, **settings)
    for name, p in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(p)
    if kind == "gka":
        layer.log_sigma.data.copy_(testing.make_log_sigma(heads, dim))
    return layer, torch.randn(batch, tokens, heads * dim)


def with_gradients(function, layer, x, grad_y, dtype) -> SimpleNamespace:
    """y and its gradients by x and by every parameter, of function(layer, x) in dtype."""
    layer, x = copy.deepcopy(layer).to(dtype), x.to(dtype).requires_grad_()
    y = function(layer, x)
    y.backward(grad_y.to(dtype))
    return SimpleNamespace(y=y.detach(), dx=x.grad, **{name: p.grad for name, p in layer.named_parameters()})


def check(kind, layer, x, definition, call, eps=0.0):
    """At most twice the error of the definition in float32, plus what rounding of the exponents is worth, and eps."""
    grad_y = torch.randn_like(x)
    want, plain = (with_gradients(definition, layer, x, grad_y, dtype) for dtype in (torch.float64, torch.float32))
    got = with_gradients(call, layer, x, grad_y, torch.float32)
    split = (layer.num_heads, -1)
    if kind == "gka":
        heads, upstream = x.unflatten(-1, split), (grad_y @ layer.proj.weight.detach()).unflatten(-1, split)
        problem = testing.Problem(heads, layer.log_sigma.detach(), grad_y=upstream)
        floor = testing.exponent_ulp(problem)
        conditions = {"log_sigma": testing.log_sigma_condition(problem), "dx": 3.0}
    else:
        largest = (
            layer.qk(x).detach().unflatten(-1, (2, *split)).norm(dim=-1).amax((0, 1, 3)).prod()
            / (x.shape[-1] / layer.num_heads) ** 0.5
        )
        floor = torch.finfo(torch.float32).eps * (1 + largest.item())
        # W_Q's and W_K's gradients are sums over tokens of terms of either sign.
        conditions = dict.fromkeys(("qk.weight", "qk.bias"), x.shape[:2].numel() ** 0.5) | {"dx": 3.0}
    for name in vars(want):
        reference, value = getattr(want, name), getattr(got, name)
        assert value.dtype == torch.float32
        if (
            reference.norm() <= 1e-12 * x.shape[0] * grad_y.norm()
        ):  # one token: nothing to learn about sigma; b_K, which the softmax ignores
            assert value.norm() <= floor * grad_y.norm()
            continue
        floors = {name: (floor + eps) * conditions.get(name, 1.0)}
        wrong = testing.disagreement({name: value}, {name: reference}, {name: getattr(plain, name)}, floors)
        assert wrong is None, wrong


def tokens_seen(mask: str, shape):
    """A mask as users pass it, and the same as factors on the paper's affinities (eq. 7)."""
    batch, tokens, heads, _ = shape
    itself = torch.eye(tokens, dtype=torch.bool)
    if mask == "pairs":
        mask = (torch.rand(tokens, tokens) < 0.5) | itself
    elif mask == "padding":  # keys that are padding, per image; the last tokens are
        mask = (torch.arange(tokens) < torch.tensor([tokens - 2, tokens, tokens - 1])[:batch, None].clamp(min=1))[
            :, None, None
        ]
    elif mask == "heads":
        mask = (torch.rand(batch, heads, tokens, tokens) < 0.5) | itself
    else:  # added to the logits; -inf hides
        mask = torch.randn(tokens, tokens).masked_fill((torch.rand(tokens, tokens) < 0.3) & ~itself, float("-inf"))
        return mask, mask.double().exp()
    return mask, mask.double()


@pytest.fixture(params=[True, False], ids=["fused", "explicit"])
def fused(request):
    """Whether layers take the fused path; both are tried."""
    if not request.param:
        request.getfixturevalue("explicit")
    return request.param


@shapes
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@kinds
def test_layers_equal_their_definitions(kind, shape, fused, is_causal):
    layer, x = make_layer(kind, shape)
    assert layer.fused_attn is fused
    visible = torch.ones(shape[1], shape[1])
    # The explicit path of GKA and the CPU kernel add the paper's epsilon to row sums of at least 1.
    eps = EPS if kind == "gka" and (not fused or AUTO_ON_CPU == "cpu") else 0.0
    definition = by_definition(kind, visible.tril() if is_causal else visible)
    check(kind, layer, x, definition, lambda f, x: f(x, is_causal=is_causal), eps)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_second_derivatives_between_equal_tokens(is_causal, explicit):
    layer = ATTENTION["gka"](6, num_heads=2, proj_bias=False).double()
    nn.init.eye_(layer.proj.weight)
    x, grad_y, direction = (
        torch.randn(1, 5, 6, dtype=torch.float64)[:, index] for index in ([0, 1, 0, 2, 2], slice(None), slice(None))
    )
    x.requires_grad_()
    (gradient,) = torch.autograd.grad((layer(x, is_causal=is_causal) * grad_y).sum(), x, create_graph=True)
    (got,) = torch.autograd.grad((gradient * direction).sum(), x)

    heads, grad_heads, along = (t.detach().view(1, 5, 2, 3).numpy() for t in (x, grad_y, direction))
    tensors, directions = [heads] * 3 + [layer.log_sigma.detach().numpy()], [along] * 3 + [np.zeros(2)]
    *want, _ = explicit_sums.curvature(tensors, directions, is_causal, 0.0, grad_heads)
    torch.testing.assert_close(got, torch.from_numpy(sum(want)).view(1, 5, 6), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("mask", ["pairs", "padding", "heads", "added"])
@kinds
def test_masks_renormalise_rows(kind, mask):
    shape = (3, 11, 2, 8)
    layer, x = make_layer(kind, shape)
    attn_mask, visible = tokens_seen(mask, shape)
    check(kind, layer, x, by_definition(kind, visible), lambda f, x: f(x, attn_mask=attn_mask), eps=EPS)


@pytest.mark.parametrize("shift", [100.0, -100.0])
@kinds
def test_a_constant_mask_changes_nothing(kind, shift):
    layer, x = make_layer(kind, (1, 9, 2, 8))
    torch.testing.assert_close(layer(x, attn_mask=torch.full((9, 9), shift)), layer(x), rtol=1e-4, atol=1e-5)


@kinds
def test_masked_diagonal_among_distant_tokens_is_finite(kind):
    """All remaining affinities underflow in float32; outputs and gradients are finite all the same."""
    layer, x = make_layer(kind, (1, 4, 1, 8))
    x = (30 * x).requires_grad_()
    y = layer(x, attn_mask=~torch.eye(4, dtype=torch.bool))
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()


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
    timms = timm.layers.Attention(16, num_heads=2)
    assert timms.fused_attn is fused
    outputs = {layer: y, **({timms: timms(x, attn_mask=attn_mask)} if fused else {})}  # explicit, timm's is NaN
    for module, output in outputs.items():
        torch.testing.assert_close(output[0, 2:], module.proj.bias.expand(2, 16))
    torch.testing.assert_close(y[:1, :2], layer(x[:1, :2]), rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    assert not x.grad[0, 2:].any() and x.grad[0, :2].all()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


@kinds
def test_explicit_path_equals_fused_path(kind, images, explicit):
    model = small(kind).double().eval()
    timm.layers.set_fused_attn(True)
    fused = small(kind).double().eval()
    fused.load_state_dict(model.state_dict())
    assert [model.blocks[0].attn.fused_attn, fused.blocks[0].attn.fused_attn] == [False, True]
    torch.testing.assert_close(model(images.double()), fused(images.double()), rtol=10 * EPS, atol=10 * EPS)


def test_value_bias_is_an_output_bias():
    """Rows of W sum to 1, so W (x + b) W_O = W x W_O + b W_O."""
    with_bias = make_layer("vlt", (2, 9, 3, 5))[0].double()
    without = ATTENTION["vlt"](15, 3, qkv_bias=True, value_bias=False).double()
    state = with_bias.state_dict()
    state["proj.bias"] = state["proj.bias"] + state["proj.weight"] @ state.pop("value_bias")
    without.load_state_dict(state)
    x = torch.randn(2, 9, 15, dtype=torch.float64)
    torch.testing.assert_close(with_bias(x), without(x), rtol=1e-12, atol=1e-12)


@kinds
def test_attention_dropout_acts_in_training_only(kind):
    layer, x = make_layer(kind, (2, 9, 2, 8), attn_drop=0.4)
    weights = []
    layer.attn_drop.register_forward_hook(
        lambda module, inputs, output: weights.append((inputs[0].detach(), output.detach()))
    )
    y = layer(x)
    (before, after) = weights[0]
    kept = after != 0
    assert 0.4 < kept.float().mean() < 0.8
    torch.testing.assert_close(after[kept], before[kept] / 0.6)
    values = x.unflatten(-1, (2, 8)) + (layer.value_bias.unflatten(-1, (2, 8)) if kind == "vlt" else 0)
    torch.testing.assert_close(y, layer.proj((after @ values.transpose(1, 2)).transpose(1, 2).flatten(2)))
    definition = by_definition(kind, torch.ones(9, 9))
    torch.testing.assert_close(layer.eval()(x), definition(layer, x), rtol=1e-4, atol=1e-5)


@kinds
def test_projection_dropout(kind):
    layer, x = make_layer(kind, (2, 9, 2, 8), proj_drop=0.5)
    y, want = layer(x), layer.eval()(x)
    kept = y != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(y[kept], 2 * want[kept])


@kinds
def test_timm_extracts_attention_maps(kind, images, explicit):
    model = small(kind).eval()
    inputs = []
    model.blocks[0].norm1.register_forward_hook(lambda module, args, output: inputs.append(output))
    maps = AttentionExtract(model, method="hook")(images)
    assert list(maps) == [f"blocks.{i}.attn.attn_drop" for i in range(2)]
    for weights in maps.values():
        assert weights.shape == (2, 3, 5, 5) and (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
    if kind == "gka":
        want = gaussian_weights(inputs[0].unflatten(-1, (3, 8)), model.blocks[0].attn.log_sigma.exp())
        torch.testing.assert_close(maps["blocks.0.attn.attn_drop"], want, rtol=1e-5, atol=1e-5)
