"""What the CPU kernel adds up: rows of few keys to the last digit, rows of more than 2,048 with what rounding takes
from them.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from gka import gaussian_attention, testing
from gka.api import EPS
from gka.impl.cpu import build
from gka.masking import Mask
from gka.testing import Problem, make_features
from operator_cases import foreign

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
attend = partial(gaussian_attention, impl="cpu")

# Queries that see few keys: every number is the exact one, rounded once

CASES = [  # queries, keys, mask
    (1, None, Mask()),
    (12, None, Mask()),
    (12, None, Mask(causal=True)),
    (150, None, Mask(causal=True, window=7)),
    (150, None, Mask(window=3)),
    (100, None, Mask(window=0)),
    (5, 5, Mask()),
    (7, 12, Mask(causal=True)),
    (90, 12, Mask()),
    (70, 140, Mask(causal=True, window=4)),
]


def problem(queries: int, keys: int | None, mask: Mask, own_values: bool, head_dim: int) -> Problem:
    if keys is not None:
        return foreign(queries, keys, head_dim, mask, not own_values)
    fields = dict(with_values=not own_values, mask=mask, eps=float(torch.tensor(EPS)))
    return Problem.seeded("normal", (2, queries, 3, head_dim), log_sigma=torch.tensor([0.1, 0.9, 1.7]), **fields)


def compute(case: Problem) -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize("queries,keys,mask", CASES)
def test_threads_do_not_change_a_bit(threads, queries, keys, mask):
    case = problem(queries, keys, mask, False, 20)
    threads(1)
    alone = compute(case)
    threads(4)
    assert all(torch.equal(tensor, alone[name]) for name, tensor in compute(case).items())


# More than 2,048 tokens


@pytest.mark.parametrize("keys", [2048, 2049])
@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
def test_sums_keep_to_the_budget_where_rests_begin(keys, with_values):
    x, many, values, grad_y = (make_features("normal", (1, n, 1, 16), seed=n) for n in (20, keys, keys + 1, 21))
    values = values[:, :keys] if with_values else None
    for queries, of_keys, of_values, grad in [(x, many, values, grad_y[:, :20]), (many, x, None, many)]:
        testing.check(attend, Problem(queries, torch.ones(1), keys=of_keys, values=of_values, grad_y=grad, eps=0.0))


def test_what_rounding_took_from_far_keys_does_not_count_when_near_ones_come():
    """K of the last keys is 2^29 times that of the others, relative to which y was added up until then.

    The exponents of far keys, about 20, are rounded to 2^-20, so K of the 200 near keys errs by as much in all, 2^-24
    in the mean; y is a quarter as long as a key: 2^-22. The bound is twice that.
    """
    x = torch.zeros(1, 20, 1, 16)
    keys = make_features("normal", (1, 4000, 1, 16))
    keys = keys / keys.norm(dim=-1, keepdim=True)
    keys[:, :3800] *= 6.4  # half of its square is 20.5
    problem = Problem(x, torch.zeros(1), keys=keys, eps=0.0)
    want, got = testing.oracle(problem).y, attend(x, torch.zeros(1), keys=keys)
    assert (got - want).norm() < 2**-21 * want.norm()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_an_infinite_value_gives_an_infinite_mean(bad):
    x, keys, values = (make_features("normal", (1, n, 1, 16), seed=n) for n in (20, 4000, 4001))
    values = values[:, :4000].clone()
    values[0, 100, 0, 5] = bad
    y = attend(x, torch.ones(1), keys=keys, values=values)
    torch.testing.assert_close(y[..., 5], torch.full((1, 20, 1), bad), equal_nan=True)
    assert y[..., :5].isfinite().all() and y[..., 6:].isfinite().all()
