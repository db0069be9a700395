"""The CPU kernel with numbers at an end: bandwidths, NaN and infinity, denormals, gradients that are exactly 0."""

from functools import partial

import pytest
import torch

import operator_cases
from gka import gaussian_attention
from gka.bandwidth import LOG_SIGMA_BOUND
from gka.impl.cpu import build
from gka.testing import make_features

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
attend = partial(gaussian_attention, impl="cpu")
gradients = partial(operator_cases.gradients, impl="cpu")


def test_extreme_bandwidths_stay_finite():
    """sigma -> 0 is the identity, sigma -> infinity the mean; outside the clamp the gradient is 0."""
    x = make_features("normal", (1, 60, 2, 16))
    for log_sigma, want in [(-100.0, x), (100.0, x.mean(1, keepdim=True).expand_as(x))]:
        y, dx, dlog_sigma = gradients(x, torch.full((2,), log_sigma))
        torch.testing.assert_close(y, want)
        assert dx.isfinite().all() and torch.equal(dlog_sigma, torch.zeros(2))
    assert gradients(x, torch.full((2,), LOG_SIGMA_BOUND))[2].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_show_and_do_not_leak_into_other_heads_or_earlier_units(bad):
    """They do reach the queries of the same unit of 16 that do not see them: a weight of 0 times NaN is NaN."""
    x = make_features("normal", (2, 50, 2, 20))
    x[1, 30, 1, 3] = bad
    for keys in (None, x.clone()):
        y = attend(x, torch.zeros(2), keys=keys, causal=True)
        assert y[1, 30, 1].isnan().any() and y[1, 40, 1].isnan().any()
        assert y[0].isfinite().all() and y[:, :, 0].isfinite().all() and y[1, :16].isfinite().all()
    decoded = attend(x[:, -2:], torch.zeros(2), keys=x, causal=True)
    assert decoded[1, :, 1].isnan().any() and decoded[0].isfinite().all()
    _, dx, dlog_sigma = gradients(x, torch.zeros(2), causal=True)
    assert dx[1, :, 1].isnan().any() and dx[0].isfinite().all() and dlog_sigma.isnan().tolist() == [False, True]


def test_gradients_of_tokens_that_see_only_themselves_are_exactly_zero():
    for length, mask in [(100, dict(window=0)), (1, {}), (1, dict(causal=True))]:
        x, values = (make_features("normal", (1, length, 2, 64), seed=seed).requires_grad_() for seed in (0, 1))
        y = attend(x, torch.full((2,), 2.0), values=values, **mask)
        (dx,) = torch.autograd.grad(y, x, make_features("normal", y.shape, seed=2))
        assert dx.count_nonzero() == 0


def test_tokens_that_hardly_see_another_are_rounded_once():
    """K is 1 for the token itself and 0 for others: y and dx are x and grad_y divided by the row's sum."""
    x, grad_y = (make_features("normal", (1, 50, 2, 64), seed=seed) for seed in (0, 1))
    row_sum = 1.0 + torch.tensor(1e-3).double()
    for mask in (dict(), dict(causal=True), dict(window=20), dict(causal=True, window=5)):
        leaf = x.clone().requires_grad_()
        y = attend(leaf, torch.full((2,), -1.0), eps=1e-3, **mask)
        (dx,) = torch.autograd.grad(y, leaf, grad_y)
        assert torch.equal(dx, (grad_y.double() / row_sum).float())
        if mask.get("causal"):  # else the mean is subtracted and added
            assert torch.equal(y, (x.double() / row_sum).float())


def test_a_bad_query_reaches_the_values_that_it_sees_and_no_others():
    x, keys, values = (make_features("normal", (1, 50, 1, 20), seed=seed).requires_grad_() for seed in range(3))
    weight = torch.ones(50)
    weight[30] = torch.nan
    y = attend(x * weight[:, None, None], torch.zeros(1), keys=keys, values=values, causal=True, window=9)
    (gradient,) = torch.autograd.grad(y.sum(), values)
    assert gradient.isnan().any(-1).flatten().nonzero().flatten().tolist() == list(range(21, 31))


def test_denormal_numbers_work_again_afterwards():
    x = make_features("normal", (1, 20, 2, 16))
    gradients(x, torch.zeros(2))
    attend(x[:, :1], torch.zeros(2), keys=x)
    assert (torch.tensor([1e-38]) / 10).item() > 0


def test_products_that_overflow_give_infinite_gradients():
    """Not NaN, which is what rounding takes from a difference of infinite numbers."""
    x, keys, values, grad_y = (make_features("normal", (1, n, 1, 16), seed=n) for n in (1, 20, 21, 22))
    values = values[:, :20].clone()
    values[0, 3, 0, :2], grad_y[:, :, :, :2] = 3e38, 3.0
    keys.requires_grad_()
    y = attend(x, torch.ones(1), keys=keys, values=values)
    (dkeys,) = torch.autograd.grad(y, keys, grad_y[:, :1])
    assert dkeys[0, 4:].isinf().any()
