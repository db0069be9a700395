"""The CPU kernel where queries see few keys: every number is the exact one, rounded once."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from gka import gaussian_attention, testing
from gka.api import EPS
from gka.impl.cpu import build
from gka.masking import Mask

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
attend = partial(gaussian_attention, impl="cpu")
CASES = [  # queries, keys, mask
    (1, None, Mask()),
    (12, None, Mask()),
    (12, None, Mask(causal=True)),
    (150, None, Mask(causal=True, window=7)),
    (150, None, Mask(window=3)),
    (5, 5, Mask()),
    (7, 12, Mask(causal=True)),
    (90, 12, Mask()),
    (70, 140, Mask(causal=True, window=4)),
]


def problem(queries: int, keys: int | None, mask: Mask, own_values: bool, head_dim: int) -> testing.Problem:
    def draw(tokens: int, seed: int) -> torch.Tensor:
        return testing.make_features("normal", (2, tokens, 3, head_dim), seed=seed)

    return testing.Problem(
        draw(queries, 0),
        torch.tensor([0.1, 0.9, 1.7]),
        keys=None if keys is None else draw(keys, 1),
        values=None if own_values else draw(keys or queries, 2),
        grad_y=draw(queries, 3),
        mask=mask,
        eps=float(torch.tensor(EPS)) if keys is None else 0.0,
    )


def compute(case: testing.Problem) -> dict[str, torch.Tensor]:
    return testing.run(partial(attend, causal=case.mask.causal, window=case.mask.window, eps=EPS), case).named()


@pytest.mark.parametrize("head_dim", [5, 20, 64, 128])
@pytest.mark.parametrize("own_values", [True, False], ids=["own", "values"])
@pytest.mark.parametrize("queries,keys,mask", CASES)
def test_every_number_is_the_exact_one_rounded(queries, keys, mask, own_values, head_dim):
    case = problem(queries, keys, mask, own_values, head_dim)
    exact, got = testing.oracle(case).named(), compute(case)
    for name, want in exact.items():
        # Rounding is half a unit of the last place; of sums that cancel, double precision leaves 1e-15 of their terms.
        torch.testing.assert_close(got[name].double(), want, rtol=2**-24 * 1.001, atol=1e-13, msg=name)


@pytest.mark.parametrize("head_dim", [5, 64, 128])
@pytest.mark.parametrize("own_values", [True, False], ids=["own", "values"])
@pytest.mark.parametrize("queries,keys,mask", [(1, 1, Mask()), (1, 8, Mask()), (3, 7, Mask(causal=True, window=2))])
def test_decoding_rounds_once_too(queries, keys, mask, own_values, head_dim):
    """As many keys as a register of AVX2 has lanes; without gradients a kernel of its own computes so few queries."""
    case = replace(problem(queries, keys, mask, own_values, head_dim), grad_y=None)
    torch.testing.assert_close(compute(case)["y"].double(), testing.oracle(case).y, rtol=2**-24 * 1.001, atol=0)


def test_decoding_of_few_keys_survives_distance():
    """Far keys: every weight would be 0, were the largest score not taken away first."""
    x, log_sigma = testing.make_features("normal", (1, 1, 2, 16)), torch.full((2,), -2.0)
    keys = testing.make_features("normal", (1, 7, 2, 16), seed=1) + 30
    case = testing.Problem(x, log_sigma, keys=keys)
    torch.testing.assert_close(compute(case)["y"].double(), testing.oracle(case).y, rtol=2**-24 * 1.001, atol=0)


def test_a_bandwidth_beyond_its_bound_has_no_gradient():
    case = replace(problem(9, None, Mask(), True, 16), log_sigma=torch.tensor([25.0, 0.5, -25.0]))
    assert [bool(gradient) for gradient in compute(case)["dlog_sigma"]] == [False, True, False]


@pytest.mark.parametrize("queries,keys,mask", CASES)
def test_threads_do_not_change_a_bit(threads, queries, keys, mask):
    case = problem(queries, keys, mask, False, 20)
    threads(1)
    alone = compute(case)
    threads(4)
    assert all(torch.equal(tensor, alone[name]) for name, tensor in compute(case).items())
