"""The mean of exponents that the CPU kernel's forward pass keeps, and what its backward pass makes of it."""

from dataclasses import replace

import pytest
import torch

from gka import testing
from gka.impl.cpu import build, call
from gka.kernel import log_kernel
from gka.masking import Mask

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
MASKS = [Mask(), Mask(causal=True), Mask(window=40), Mask(causal=True, window=40)]
TOKENS = 331  # not a multiple of any tile, and several blocks


def problem(mask: Mask, eps: float) -> testing.Problem:
    return testing.Problem.seeded("clusters", (1, TOKENS, 2, 24), mask=mask, eps=eps)


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_rows_keep_their_sums_and_moments(mask, number, threads):
    """With two heads for four threads a head is computed in parts. Of a symmetric mask the sum of moments is right."""
    threads(number)
    case = problem(mask, 0.25)
    before, after = (-1 if limit is None else limit for limit in mask.reach)
    *_, rows, _, _ = call.forward(case.x, None, None, case.log_sigma, before, after, False, case.eps, True)
    x = case.x.double()
    exponents = log_kernel(x, x, case.log_sigma.double())
    visible = mask.dense(TOKENS, TOKENS, x.device)
    k = exponents.exp() if visible is None else exponents.exp() * visible
    torch.testing.assert_close(rows[..., 0], k.sum(-1) + case.eps, rtol=1e-5, atol=0)
    want, got = (k * exponents / torch.log(torch.tensor(2.0))).sum(-1), rows[..., 1]
    if mask.reach[0] == mask.reach[1]:
        want, got = want.sum(-1), got.sum(-1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_dlog_sigma_has_what_eps_adds_to_the_sums_of_m(mask):
    """M of a query adds up to eps g.y, which the mean exponent is multiplied by; with a large eps that shows."""
    case = replace(problem(mask, 3.0), log_sigma=torch.tensor([0.6, 1.3]))
    before, after = (-1 if limit is None else limit for limit in mask.reach)
    y, level, rest, _ = call.forward(case.x, None, None, case.log_sigma, before, after, False, case.eps, True)
    options = (before, after, False, case.eps)
    _, got, *_ = call.backward(case.grad_y, case.x, None, None, case.log_sigma, y, level, rest, *options)
    torch.testing.assert_close(got.double(), testing.oracle(case).dlog_sigma, rtol=1e-4, atol=1e-4)
