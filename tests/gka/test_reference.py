"""The oracle itself: against explicit sums, and the oracle and plain PyTorch of the error budget against it."""

from functools import partial

import pytest
import torch

import explicit_sums
from gka import gaussian_attention, testing
from gka.masking import Mask
from operator_cases import IMPLS, foreign

MASKS = pytest.mark.parametrize("causal,window", [(0, None), (1, None), (1, 2), (0, 2), (1, 0), (1, 99)])


@MASKS
@pytest.mark.parametrize("num_keys", [None, 6], ids=["own", "foreign"])
@pytest.mark.parametrize("shape", [(2, 5, 2, 3), (1, 1, 1, 1), (1, 5, 3, 8)])
def test_reference_is_the_paper(shape, num_keys, causal, window):
    """Equations 3, 4 and 7; queries and foreign keys, whose rows are softmaxes, are aligned at the end."""
    batch, tokens, heads, head_dim = shape
    x, keys, values = (
        testing.make_features("normal", (batch, n, heads, head_dim), torch.float64, seed)
        for seed, n in enumerate((tokens, num_keys or tokens, num_keys or tokens))
    )
    log_sigma, eps = torch.linspace(-0.4, 0.7, heads, dtype=torch.float64), 0.0 if num_keys else 1e-3
    tensors = (x, keys, values, log_sigma) if num_keys else (x, x, x, log_sigma)
    want, _ = explicit_sums.attend(*(t.numpy() for t in tensors), causal, eps, torch.zeros(shape).numpy(), window)
    features = dict(keys=keys, values=values) if num_keys else {}
    got = gaussian_attention(x, log_sigma, causal=bool(causal), window=window, eps=1e-3, impl="reference", **features)
    torch.testing.assert_close(got, torch.from_numpy(want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_foreign_keys_survive_underflow(impl):
    """All affinities are e^-(5e5): with eps they would give zero, as a softmax they give the nearest key."""
    x, keys = torch.zeros(1, 1, 1, 16), torch.zeros(1, 2, 1, 16)
    keys[0, :, 0, 0] = torch.tensor([1000.0, 1001.0])
    torch.testing.assert_close(gaussian_attention(x, torch.zeros(1), keys=keys, impl=impl), keys[:, :1])


@MASKS
@pytest.mark.parametrize("with_values", [False, True], ids=["own values", "values"])
@pytest.mark.parametrize("is_foreign", [False, True], ids=["own", "foreign"])
def test_the_oracle_and_plain_pytorch_are_the_reference(is_foreign, with_values, causal, window):
    """In all gradients. A wrong oracle would widen its own budget: plain PyTorch's error is measured against it."""
    mask, float64 = Mask(bool(causal), window), torch.float64
    if is_foreign:
        problem = foreign(5, 9, 4, mask, with_values, dtype=float64)
    else:
        problem = testing.Problem.seeded("normal", (2, 9, 2, 4), float64, with_values=with_values, mask=mask, eps=1e-3)
    attend = partial(gaussian_attention, causal=mask.causal, window=window, eps=1e-3, impl="reference")
    want = testing.run(attend, problem.double()).named()
    for results, tolerance in ((testing.oracle(problem), 1e-12), (testing.plain(problem.double()), 1e-11)):
        assert results.named().keys() == want.keys()
        for name, value in results.named().items():
            torch.testing.assert_close(value, want[name], rtol=1e-10, atol=tolerance)
