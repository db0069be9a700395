"""The methods of Table 1: each against its own equation in float64, causal forms, costs, known limits."""

import math

import pytest
import torch

from runs.neighbours.layers import DIM, cost
from runs.neighbours.methods import (
    METHODS,
    MixingLayer,
    Skyformer,
    orthogonal_features,
    positive_exponents,
)

HEADS, HEAD_DIM = 3, 8
CASES = [(name, causal) for name, method in METHODS.items() for causal in (False, True)[: 1 + method.about.causal]]
CAUSAL = [name for name, causal in CASES if causal]
OWN_SIZES = {"nystromformer": 5, "skyformer": 6, "linformer": 5, "krause": 7, "performer": 11, "kernelized-rpe": 9}


def build(name, tokens, causal=False, size=None, head_dim=HEAD_DIM):
    torch.manual_seed(0)
    mixing = METHODS[name](HEADS, head_dim, tokens, causal=causal, size=size or OWN_SIZES.get(name))
    with torch.no_grad():  # what starts at a constant must matter too
        for parameter in mixing.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixing


def inputs(name, tokens, dtype=torch.float64, head_dim=HEAD_DIM, batch=2):
    """q, k and v; one tensor for a method without projections."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (batch, HEADS, tokens, head_dim)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in "qkv"]
    return drawn if METHODS[name].about.projections else [drawn[0]] * 3


@pytest.mark.parametrize("tokens, built_for", [(1, 1), (2, 2), (63, 63), (197, 197), (33, 40)])
@pytest.mark.parametrize("name, causal", CASES)
def test_a_method_is_its_equation(name, causal, tokens, built_for):
    """Shorter inputs use a part of the parameters; distances of relative positions stay the same distances."""
    mixing, given = build(name, built_for, causal).double(), inputs(name, tokens)
    torch.testing.assert_close(mixing(*given), mixing.exact(*given), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_forms_do_not_see_later_tokens(name):
    """Exactly; by Fourier transforms up to their rounding. 150 tokens are more than a chunk and a window."""
    tokens, seen = 150, 131
    mixing = build(name, tokens, causal=True).double()
    q, k, v = inputs(name, tokens)
    before = mixing(q, k, v)[:, :, :seen]
    for tensor in (q, k, v):
        tensor[:, :, seen:] = 3 * torch.randn_like(tensor[:, :, seen:])
    after = mixing(q, k, v)[:, :, :seen]
    if name == "kernelized-rpe":
        torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)
    else:
        assert torch.equal(after, before)


def test_costs_are_those_of_the_equations():
    """By hand, for one sequence: linear maps, and what mixes."""
    tokens, landmarks, head_dim = 197, 64, DIM // 3
    linear_maps = {"parameters": 4 * (DIM**2 + DIM), "flops": 2 * tokens * 4 * DIM**2}
    linformer = cost("linformer", tokens)
    assert linformer["parameters"] == linear_maps["parameters"] + 2 * landmarks * tokens  # E and F
    assert linformer["flops"] == linear_maps["flops"] + 4 * 2 * landmarks * tokens * DIM
    linear = cost("linear-transformer", tokens)
    assert linear["flops"] == linear_maps["flops"] + 2 * 2 * tokens * DIM * (head_dim + 1)
    assert cost("krause", tokens)["other_flops"] == 3 * 27 * tokens * DIM
    means, ours = cost("non-local-means", tokens), cost("gka", tokens)
    assert means["parameters"] == DIM**2 + DIM and means["flops"] == ours["flops"]


def test_causal_forms_that_do_not_exist_are_refused():
    for name in sorted(set(METHODS) - set(CAUSAL)):
        with pytest.raises(ValueError, match="has no causal form"):
            build(name, 10, causal=True)


# What the methods are known for


def softmax(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_positive_random_features_approach_the_exponential():
    """Performer, lemma 1: the mean over omega of phi(x).phi(y) is exp(x.y)."""
    torch.manual_seed(0)
    x, y = 0.2 * torch.randn(2, 16)
    off = {}
    for features in (64, 65536):
        omega = orthogonal_features(features, 16)
        phi_x, phi_y = positive_exponents(x, omega).exp(), positive_exponents(y, omega).exp()
        off[features] = abs((phi_x @ phi_y / features / (x @ y).exp()).item() - 1)
    assert off[65536] < min(0.02, off[64])


def test_orthogonal_features_are_orthogonal_in_blocks():
    torch.manual_seed(0)
    block = orthogonal_features(20, 8)[8:16]
    products = block @ block.mT
    torch.testing.assert_close(products - torch.diag(products.diag()), torch.zeros(8, 8), atol=1e-5, rtol=0)


def test_nystromformer_with_all_tokens_as_landmarks_is_softmax():
    """The weights of few tokens are far from singular: the inverse converges."""
    given = inputs("nystromformer", 6)
    given[0] = given[1] = 2.5 * given[1]
    torch.testing.assert_close(
        build("nystromformer", 6, size=6).double()(*given), softmax(*given), rtol=1e-4, atol=1e-4
    )


def test_linformer_that_compresses_nothing_is_softmax():
    mixing, given = build("linformer", 12, size=12).double(), inputs("linformer", 12)
    with torch.no_grad():
        for parameter in mixing.parameters():
            parameter.copy_(torch.eye(12))
    torch.testing.assert_close(mixing(*given), softmax(*given))


def test_kernelized_rpe_follows_its_positions():
    """A bias that leaves one distance reads the token at that distance."""
    mixing, (q, k, v) = build("kernelized-rpe", 20).double(), inputs("kernelized-rpe", 20)
    with torch.no_grad():
        mixing.bias.fill_(-60.0)
        mixing.bias[:, 19 - 2] = 0.0  # j - i = -2
    torch.testing.assert_close(mixing(q, k, v)[:, :, 2:], v[:, :, :-2], rtol=1e-6, atol=1e-6)


def test_krause_reads_the_grid_around_a_patch():
    """Patch 1 + 3 * 7 + 3 of a 7 x 7 grid sees patches two rows and columns away, and not three."""
    mixing, (q, k, v) = build("krause", 50, size=50).double(), inputs("krause", 50)
    patch, reached = 1 + 3 * 7 + 3, {0} | {1 + row * 7 + column for row in range(1, 6) for column in range(1, 6)}
    with torch.no_grad():
        mixing.log_sigma.fill_(4.0)  # so wide that all neighbours count
    v.requires_grad_()
    mixing(q, k, v)[0, 0, patch].sum().backward()
    assert set(v.grad[0, 0].abs().sum(-1).nonzero().flatten().tolist()) == reached


def test_krause_keeps_the_nearest_keys():
    mixing, (q, k, v) = build("krause", 40, causal=True, size=3).double(), inputs("krause", 40)
    v.requires_grad_()
    mixing(q, k, v)[0, 0, 30].sum().backward()
    kept = set(v.grad[0, 0].abs().sum(-1).nonzero().flatten().tolist())
    assert kept == set((q[0, 0, 30] - k[0, 0, :31]).norm(dim=-1).topk(3, largest=False).indices.tolist())


def test_skyformer_with_all_rows_as_landmarks_is_the_kernel():
    """Up to gamma; with few well separated tokens the kernel is near the identity, and 0.1 of it is missing."""
    q = 6 * inputs("skyformer", 5)[0]
    v = inputs("skyformer", 5)[2]
    k = q + 20 * torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    k[..., 0, :] = q[..., 0, :] + 1.5
    mixed = build("skyformer", 5, size=10).double()(q, k, v)
    wanted = Skyformer.kernel(q, k) @ v
    near = wanted.abs() > 1e-3
    ratio = (mixed / wanted)[near]
    assert near.any() and ((ratio > 1 / (1 + Skyformer.GAMMA) - 0.35) & (ratio < 1.05)).all()


def test_non_local_means_is_one_head_with_a_fixed_bandwidth():
    layer = MixingLayer(METHODS["non-local-means"](HEADS, HEAD_DIM, 10))
    assert {name for name, _ in layer.named_parameters()} == {"proj.weight", "proj.bias"}
    same = torch.ones(1, HEADS, 4, HEAD_DIM) * math.pi
    torch.testing.assert_close(layer.mixing(same, same, same), same)
