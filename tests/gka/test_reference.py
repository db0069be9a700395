"""The oracle itself: against the equations in plain Python arithmetic, and its gradients by finite differences."""

import math
from functools import partial
from itertools import product

import pytest
import torch

from gka import gaussian_attention, gaussian_weights, testing
from gka.api import EPS
from gka.masking import Mask
from operator_cases import foreign

MASKS = [(False, None), (True, None), (True, 2), (False, 2), (True, 0), (True, 99)]


def by_hand(x, keys, values, log_sigma, causal, window, eps):
    """Equations 3, 4 and 7, one scalar at a time: no tensor operation shared with the code under test."""
    y, num_keys, dim = torch.zeros(x.shape, dtype=torch.float64), keys.shape[1], x.shape[3]
    for b, row, h in product(*map(range, x.shape[:3])):
        sigma, i, affinity = math.exp(log_sigma[h]), row + num_keys - x.shape[1], []
        for j in range(num_keys):
            distance2 = sum((float(x[b, row, h, c]) - float(keys[b, j, h, c])) ** 2 for c in range(dim))
            hidden = (causal and j > i) or (window is not None and (j < i - window or j > i + window))
            affinity.append(0.0 if hidden else math.exp(-distance2 / (2 * sigma**2)))
        total = sum(affinity) + eps
        for c in range(dim):
            y[b, row, h, c] = sum(a / total * float(values[b, j, h, c]) for j, a in enumerate(affinity))
    return y


@pytest.mark.parametrize("causal,window", MASKS)
@pytest.mark.parametrize("shape", [(2, 7, 2, 3), (1, 1, 1, 1), (1, 5, 3, 8)])
def test_reference_is_the_paper(shape, causal, window):
    x = testing.make_features("normal", shape, torch.float64)
    log_sigma = torch.linspace(-0.4, 0.7, shape[2], dtype=torch.float64)
    got = gaussian_attention(x, log_sigma, causal=causal, window=window, eps=1e-3, impl="reference")
    torch.testing.assert_close(got, by_hand(x, x, x, log_sigma, causal, window, 1e-3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal,window", MASKS)
def test_foreign_keys_and_values_are_aligned_at_the_end(causal, window):
    shape = (2, 3, 2, 4)
    x = testing.make_features("normal", shape, torch.float64, 1)
    keys, values = (testing.make_features("normal", (2, 6, 2, 4), torch.float64, seed) for seed in (2, 3))
    log_sigma = torch.tensor([0.1, 0.5], dtype=torch.float64)
    got = gaussian_attention(x, log_sigma, keys=keys, values=values, causal=causal, window=window, impl="reference")
    torch.testing.assert_close(got, by_hand(x, keys, values, log_sigma, causal, window, 0.0), rtol=1e-12, atol=1e-12)


def test_foreign_keys_survive_underflow():
    """All affinities are e^-(5e5): with eps they would give zero, as a softmax they give the nearest key."""
    x, keys = torch.zeros(1, 1, 1, 2), torch.tensor([[1000.0, 0.0], [1001.0, 0.0]]).reshape(1, 2, 1, 2)
    for impl in ("reference", "sdpa"):
        y = gaussian_attention(x, torch.zeros(1), keys=keys, impl=impl)
        torch.testing.assert_close(y, keys[:, :1])


@pytest.mark.parametrize("causal,window", MASKS)
@pytest.mark.parametrize("with_values", [False, True])
def test_reference_gradients_by_finite_differences(causal, window, with_values):
    shape = (1, 5, 2, 3)
    x = testing.make_features("normal", shape, torch.float64).requires_grad_()
    values = testing.make_features("normal", shape, torch.float64, 1).requires_grad_() if with_values else None
    log_sigma = torch.tensor([-0.2, 0.4], dtype=torch.float64, requires_grad=True)

    def function(x, log_sigma, values=None):
        return gaussian_attention(x, log_sigma, values=values, causal=causal, window=window, impl="reference")

    assert torch.autograd.gradcheck(function, (x, log_sigma) if values is None else (x, log_sigma, values))


def test_weights_rows_sum_to_one_and_mix_the_values():
    x = testing.make_features("normal", (2, 9, 2, 4), torch.float64)
    log_sigma = torch.zeros(2, dtype=torch.float64)
    y, weights = (function(x, log_sigma, causal=True, eps=0.0) for function in (gaussian_attention, gaussian_weights))
    assert weights.shape == (2, 2, 9, 9)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 9, dtype=torch.float64))
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", weights, x), y)


@pytest.mark.parametrize("causal,window", MASKS)
def test_plain_pytorch_is_the_reference_up_to_rounding(causal, window):
    x, mask = testing.make_features("normal", (2, 9, 2, 4), torch.float64), Mask(causal, window)
    log_sigma = torch.zeros(2, dtype=torch.float64)
    want = gaussian_attention(x, log_sigma, causal=causal, window=window, impl="reference")
    got = testing.plain(testing.Problem(x, log_sigma, mask=mask, eps=EPS)).y
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    last = testing.plain_attention(x[:, -1:], log_sigma, keys=x, visible=mask.dense(9, 9, x.device)[-1:])
    torch.testing.assert_close(last, want[:, -1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal,window", MASKS)
@pytest.mark.parametrize("is_foreign", [False, True], ids=["own", "foreign"])
def test_the_oracle_is_the_reference_with_torchs_own_derivatives(is_foreign, causal, window):
    """A wrong oracle would widen its own budget: plain PyTorch's error is measured against it."""
    mask, shape = Mask(causal, window), (2, 9, 2, 4)
    if is_foreign:
        problem = foreign(5, 9, 4, mask, with_values=True, dtype=torch.float64)
    else:
        problem = testing.Problem.seeded("normal", shape, torch.float64, mask=mask, eps=1e-3)
    attend = partial(gaussian_attention, causal=causal, window=window, eps=1e-3, impl="reference")
    got, want = testing.run(attend, problem.double()).named(), testing.oracle(problem).named()
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-10, atol=1e-12)
