"""The CPU kernel's sums over more than 2,048 tokens, which keep what rounding takes from them."""

from functools import partial

import pytest
import torch

from gka import gaussian_attention, testing
from gka.impl.cpu import build
from gka.testing import Problem, make_features

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
attend = partial(gaussian_attention, impl="cpu")


@pytest.mark.parametrize("keys", [2048, 2049])
@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
def test_sums_keep_to_the_budget_where_rests_begin(keys, with_values):
    x, others, values, grad_y = (make_features("normal", (1, n, 1, 16), seed=n) for n in (20, keys, keys + 1, 21))
    values = values[:, :keys] if with_values else None
    for queries, of_keys, of_values, grad in [(x, others, values, grad_y[:, :20]), (others, x, None, others)]:
        testing.check(attend, Problem(queries, torch.ones(1), keys=of_keys, values=of_values, grad_y=grad, eps=0.0))


def test_what_rounding_took_from_far_keys_does_not_count_when_near_ones_come():
    """K of the last keys is 2^29 times that of the others, relative to which y was added up until then."""
    x = torch.zeros(1, 20, 1, 16)
    keys = make_features("normal", (1, 4000, 1, 16))
    keys = keys / keys.norm(dim=-1, keepdim=True)
    keys[:, :3800] *= 6.4  # half of its square is 20.5
    problem = Problem(x, torch.zeros(1), keys=keys, eps=0.0)
    want, got = testing.oracle(problem).y, attend(x, torch.zeros(1), keys=keys)
    assert (got - want).norm() < 3e-7 * want.norm()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_an_infinite_value_gives_an_infinite_mean(bad):
    x, keys, values = (make_features("normal", (1, n, 1, 16), seed=n) for n in (20, 4000, 4001))
    values = values[:, :4000].clone()
    values[0, 100, 0, 5] = bad
    y = attend(x, torch.ones(1), keys=keys, values=values)
    torch.testing.assert_close(y[..., 5], torch.full((1, 20, 1), bad), equal_nan=True)
    assert y[..., :5].isfinite().all() and y[..., 6:].isfinite().all()
