"""The CPU kernel in bfloat16 with foreign keys, whose weights may all be smaller than a float can be."""

from functools import partial

import pytest
import torch

from gka import gaussian_attention, testing
from gka.bandwidth import LOG_SIGMA_BOUND
from gka.impl.cpu import build, call, op
from gka.masking import Mask
from gka.testing import Problem, make_features, make_log_sigma
from operator_cases import NO_PRODUCTS, PRODUCTS, foreign, multiplied_by

READY = build.obstacle() is None and call.has_bfloat16()
pytestmark = pytest.mark.skipif(not READY, reason=build.obstacle() or NO_PRODUCTS)

# No window or length is a multiple of a block of 32 x 32; 290 queries and 301 keys are mixed in two chunks.
MASKS = [(False, None), (True, None), (True, 21), (False, 9), (True, 0), (False, 0), (True, 117), (False, 77)]
SIZES = [(1, 1, 8), (9, 21, 16), (33, 33, 80), (31, 96, 20), (290, 301, 8), (64, 130, 128)]
BFLOAT16_EPS = torch.finfo(torch.bfloat16).eps
attend = partial(gaussian_attention, impl="cpu")
problem = partial(foreign, dtype=torch.bfloat16)


@pytest.fixture(params=PRODUCTS, autouse=True)
def products(request):
    """Both ways in which the kernels multiply."""
    with multiplied_by(request.param):
        yield


def route(mask: Mask):
    return partial(attend, causal=mask.causal, window=mask.window)


def features(tokens: int, seed: int, heads: int = 2, head_dim: int = 32, batch: int = 1) -> torch.Tensor:
    return make_features("normal", (batch, tokens, heads, head_dim), torch.bfloat16, seed)


def gradients(x, keys, values, log_sigma, **options):
    """[y, dx, dkeys, dvalues if there are values, dlog_sigma] of the sum of squares."""
    leaves = [t.detach().requires_grad_() for t in (x, keys, values, log_sigma) if t is not None]
    others = dict(zip(("keys", "values"), leaves[1:-1]))
    y = attend(leaves[0], leaves[-1], **others, **options)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)]


def row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Of each token and head, relative."""
    return (got.double() - want).norm(dim=-1) / want.norm(dim=-1)


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("causal,window", MASKS)
def test_outputs_and_gradients_keep_to_the_budget(causal, window, with_values):
    mask = Mask(causal, window)
    for sizes in SIZES:
        testing.check(route(mask), problem(*sizes, mask, with_values))
    if mask == Mask():  # may have fewer keys than queries
        testing.check(route(mask), problem(70, 21, 16, mask, with_values))


@pytest.mark.parametrize("head_dim", [1, 8, 15, 16, 17, 31, 32, 33, 64, 96, 127])
def test_channels_are_padded(head_dim):
    for with_values in (False, True):
        testing.check(route(Mask(causal=True)), problem(20, 40, head_dim, Mask(causal=True), with_values))


@pytest.mark.parametrize("kind", ["unit_norm", "clusters", "x50", "+50", "all+5", "all+100"])
@pytest.mark.parametrize("causal", [False, True])
def test_any_features_keep_to_the_budget(kind, causal):
    for with_values in (False, True):
        testing.check(route(Mask(causal)), problem(100, 197, 64, Mask(causal), with_values, kind=kind))


@pytest.mark.parametrize("log_sigma", [-1.0, 0.0, 1.0, 4.0, LOG_SIGMA_BOUND])
def test_any_bandwidth_keeps_to_the_budget(log_sigma):
    """At -1 and 0 the sums of most rows are below what is computed without the largest exponent."""
    for mask in (Mask(), Mask(causal=True, window=37)):
        for with_values in (False, True):
            made = problem(50, 70, 64, mask, with_values)
            fixed = torch.full((2,), log_sigma)
            testing.check(route(mask), Problem(made.x, fixed, made.values, made.grad_y, made.keys, mask))


@pytest.mark.parametrize("log_sigma", [-LOG_SIGMA_BOUND, -8.0, -3.0])
def test_a_vanishing_bandwidth_leaves_the_nearest_key(log_sigma):
    x, keys, values = features(50, 0), features(90, 1), features(90, 2)
    nearest = torch.cdist(x.double().transpose(1, 2), keys.double().transpose(1, 2)).argmin(-1).transpose(1, 2)
    y = attend(x, torch.full((2,), log_sigma), keys=keys, values=values)
    assert torch.equal(y, values.gather(1, nearest[..., None].expand_as(x)))


@pytest.mark.parametrize("causal,window", [(False, None), (True, None), (True, 30)])
def test_rows_far_from_all_keys_and_their_neighbours_are_exact(causal, window):
    """Every seventh query is so far away that its weights, unshifted, are 0; the others in its stripe are not."""
    x, keys, values = features(100, 0), features(130, 1), features(130, 2)
    x[:, ::7, :, 1] += 100
    mask, log_sigma = Mask(causal, window), make_log_sigma(2, 32)
    far = Problem(x, log_sigma, values, features(100, 3), keys, mask)
    want, got = testing.oracle(far), testing.run(route(mask), far)
    assert row_errors(got.y, want.y).max() <= 2 * BFLOAT16_EPS
    assert row_errors(got.dvalues, want.dvalues).max() <= 4 * BFLOAT16_EPS
    assert testing.error(got.dlog_sigma, want.dlog_sigma) <= 0.02
    alone = attend(x[:, 7::7], log_sigma, keys=keys, values=values) if mask == Mask() else None
    assert alone is None or row_errors(alone, want.y[:, 7::7]).max() <= 2 * BFLOAT16_EPS


def test_keys_equal_to_the_queries_are_self_attention_without_eps():
    x, values, log_sigma = features(77, 0), features(77, 1), make_log_sigma(2, 32)
    for mask in (Mask(), Mask(True), Mask(True, 9)):
        options = dict(causal=mask.causal, window=mask.window)
        y, dx, dkeys, dvalues, dlog_sigma = gradients(x, x.clone(), values, log_sigma, **options)
        leaves = [t.clone().requires_grad_() for t in (x, values, log_sigma)]
        own = attend(leaves[0], leaves[2], values=leaves[1], eps=0.0, **options)
        own_dx, own_dvalues, own_dlog_sigma = torch.autograd.grad(own.float().square().sum(), leaves)
        pairs = [(y, own), (dx + dkeys, own_dx), (dvalues, own_dvalues), (dlog_sigma, own_dlog_sigma)]
        assert all(testing.error(a, b.double()) <= 2 * BFLOAT16_EPS for a, b in pairs)


def test_weights_are_rounded_and_not_cut_off():
    """W's rows sum to 1, so the gradients of the values add up to those of y; cut off, 0.1 % of them would be lost."""
    x, keys, values = features(200, 0), features(300, 1), features(300, 2)
    values.requires_grad_()
    y = attend(x, make_log_sigma(2, 32), keys=keys, values=values)
    (dvalues,) = torch.autograd.grad(y.float().sum(), values)
    lost = 1 - dvalues.double().sum((1, 3)) / y[0, :, 0].numel()
    assert lost.abs().max() < 5 * BFLOAT16_EPS / 4 / (3 * 300) ** 0.5


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("causal", [False, True])
def test_runs_are_equal_to_the_bit_for_any_number_of_threads(threads, causal, with_values):
    """Heads fewer than threads, whose stripes are then dealt out, and more; with and without the largest exponents."""
    for batch, queries, keys in [(1, 170, 301), (5, 40, 70)]:
        for log_sigma in (make_log_sigma(2, 32), torch.tensor([-1.0, 0.2])):
            runs = []
            for count in (1, 1, 2, 7):
                threads(count)
                tensors = [features(n, seed, batch=batch) for seed, n in enumerate((queries, keys, keys))]
                runs.append(gradients(*tensors[:2], tensors[2] if with_values else None, log_sigma, causal=causal))
            for again in runs[1:]:
                assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


def test_strided_tensors_are_read_where_they_are():
    cache = features(120, 0, heads=6)
    x, keys, values = cache[:, 40::2, :2], cache[:, ::2, 2:4], cache[:, 1::2, 4:]
    want = gradients(x.contiguous(), keys.contiguous(), values.contiguous(), torch.zeros(2), causal=True)
    got = gradients(x, keys, values, torch.zeros(2), causal=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["x", "keys", "values"])
def test_nan_and_infinity_show_and_do_not_leak_into_other_heads(which, bad):
    tensors = dict(zip(("x", "keys", "values"), (features(n, seed, batch=2) for seed, n in enumerate((40, 50, 50)))))
    tensors[which][1, 30, 1, 3] = bad
    y, *grads, dlog_sigma = gradients(*tensors.values(), torch.zeros(2), causal=True)
    reached = y[1, 30:31, 1] if which == "x" else y[1, 20:, 1]  # queries are aligned at the end
    if (which, bad) == ("keys", float("inf")):  # infinitely far away, or with the sign of the product not a number
        reached = reached[tensors["x"][1, 20:, 1, 3] > 0]
    assert not reached.isfinite().all(-1).any()
    assert y[0].isfinite().all() and y[:, :, 0].isfinite().all()
    assert all(g[0].isfinite().all() and g[:, :, 0].isfinite().all() for g in grads)
    assert any(g[1, :, 1].isnan().any() for g in grads) and dlog_sigma.isnan().tolist() == [False, True]


def test_denormal_numbers_work_again_afterwards():
    gradients(features(20, 0), features(30, 1), None, torch.zeros(2))
    assert (torch.tensor([1e-38]) / 10).item() > 0


def test_the_operator_is_a_proper_one_and_vmap_is_a_loop():
    """Schema, fake tensors, autograd registration, dynamic shapes: torch's own check."""
    x, keys, values = features(20, 0).requires_grad_(), features(30, 1).requires_grad_(), features(30, 2)
    log_sigma = torch.zeros(2).requires_grad_()
    for others in ((keys, None, log_sigma, None, -1, -1, True), (keys, values, log_sigma, None, 5, 0, False)):
        torch.library.opcheck(op.attend, (x, *others, 0.0, True))
    stacked = torch.stack([x, 2 * x]).detach()
    got = torch.func.vmap(lambda x: attend(x, log_sigma, keys=keys, causal=True))(stacked)
    assert all(torch.equal(a, attend(b, log_sigma, keys=keys, causal=True)) for a, b in zip(got, stacked, strict=True))
