"""The CPU kernel in float32 and bfloat16: the budget for every mask, bit-equal runs, NaN, forks, refusals."""

import contextlib
from dataclasses import replace
from functools import partial

import pytest
import torch

import processes
from gka import decode_attention, dispatch, gaussian_attention, select_impl, testing
from gka.api import EPS
from gka.bandwidth import LOG_SIGMA_BOUND
from gka.impl.cpu import build, call, op
from gka.masking import Mask
from gka.testing import Problem, make_features, make_log_sigma
from operator_cases import PRODUCTS, check, foreign, multiplied_by

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

# No window or length is a multiple of a tile: 16 x 16 units, 48 queries side by side, blocks of 192; in bfloat16 blocks
# of 32 x 32, and more than 256 keys are mixed in two chunks.
MASKS = [(False, None), (True, None), (True, 21), (False, 9), (True, 0), (False, 0), (True, 117), (False, 77)]
SHAPES = [(2, 1, 2, 16), (1, 7, 1, 1), (2, 33, 2, 20), (1, 250, 1, 80)]
SHAPES += [(1, 321, 1, 8), (1, 401, 1, 8), (1, 197, 1, 128)]
SIZES = [(1, 1, 8), (9, 21, 16), (33, 33, 80), (31, 96, 20), (50, 50, 20)]  # queries, keys, channels
SIZES += [(290, 301, 8), (100, 301, 64), (64, 130, 128)]
attend = partial(gaussian_attention, impl="cpu")
VALUES = pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])


@pytest.fixture(params=["float32", *PRODUCTS])
def dtype(request):
    """Of the features; bfloat16 is multiplied in each way that the machine has."""
    has_products = request.param in PRODUCTS
    with multiplied_by(request.param) if has_products else contextlib.nullcontext():
        yield torch.bfloat16 if has_products else torch.float32


@pytest.fixture(params=PRODUCTS)
def bfloat16(request):
    with multiplied_by(request.param):
        yield torch.finfo(torch.bfloat16).eps


def route(mask: Mask):
    return partial(attend, causal=mask.causal, window=mask.window)


def gradients(x, log_sigma, keys=None, values=None, **options):
    """[y, dx, dlog_sigma, dkeys and dvalues if they are given] of the sum of squares."""
    tensors = dict(x=x, log_sigma=log_sigma, keys=keys, values=values)
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items() if t is not None}
    y = attend(**leaves, **options)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(leaves.values()))]


def equal(got, want) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def keep_to_the_budget(mask, shapes, sizes, dtype=torch.float32, kind="normal"):
    """y and gradients of self-attention of these shapes and of other keys of these sizes, with own and other values."""
    for with_values in (False, True):
        options = dict(causal=mask.causal, window=mask.window, constant_norm=kind == "unit_norm", device="cpu")
        for shape in shapes:
            check("cpu", shape, dtype, kind, with_values=with_values, **options)
        for each in sizes:
            testing.check(route(mask), foreign(*each, mask, with_values, dtype=dtype, kind=kind))


@pytest.mark.parametrize("causal,window", MASKS)
def test_outputs_and_gradients_keep_to_the_budget(dtype, causal, window):
    fewer_keys = [] if causal or window is not None else [(70, 21, 16)]
    keep_to_the_budget(Mask(causal, window), SHAPES, SIZES + fewer_keys, dtype)


@pytest.mark.parametrize("head_dim", [1, 8, 15, 16, 17, 31, 32, 33, 64, 96, 127])
def test_channels_are_padded(dtype, head_dim):
    keep_to_the_budget(Mask(True), [(1, 40, 2, head_dim)], [(20, 40, head_dim)], dtype)


@pytest.mark.parametrize("kind", ["unit_norm", "clusters", "x50", "+50", "all+5", "all+100"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:gaussian_attention. the features are so long")
def test_any_features_keep_to_the_budget(dtype, kind, causal):
    keep_to_the_budget(Mask(causal), [(1, 197, 2, 64), (1, 63, 2, 64)], [(100, 197, 64)], dtype, kind)


@pytest.mark.parametrize("log_sigma", [-LOG_SIGMA_BOUND, -3.0, -1.0, 0.0, 1.0, 4.0, LOG_SIGMA_BOUND])
def test_any_bandwidth_keeps_to_the_budget(dtype, log_sigma):
    """At -1 and 0 the sums of most rows of foreign keys are below what is computed without the largest exponent."""
    for mask in (Mask(), Mask(causal=True, window=37)):
        problems = [Problem.seeded("normal", (1, 70, 2, 64), dtype, mask=mask, eps=EPS)]
        if log_sigma >= -1:
            problems += [foreign(50, 70, 64, mask, with_values, dtype=dtype) for with_values in (False, True)]
        for problem in problems:
            testing.check(route(mask), replace(problem, log_sigma=torch.full((2,), log_sigma)))


@VALUES
@pytest.mark.parametrize("log_sigma", [-3.0, -1.0, 0.3, 5.0, 10.0])
def test_rows_of_foreign_keys_with_one_weight_or_equal_ones_keep_to_the_budget(log_sigma, with_values):
    """Rounding leaves something of M's sums, which are 0: times far keys. Sums of many equal weights round one way."""
    for sizes in [(1, 1, 64), (50, 50, 64), (70, 250, 20), (30, 1000, 16)]:
        problem = replace(foreign(*sizes, Mask(), with_values), log_sigma=torch.full((2,), log_sigma))
        testing.check(attend, problem)


@pytest.mark.parametrize("log_sigma", [-LOG_SIGMA_BOUND, -8.0, -3.0])
def test_a_vanishing_bandwidth_leaves_the_nearest_key(bfloat16, log_sigma):
    x, keys, values = (make_features("normal", (1, n, 2, 32), torch.bfloat16, i) for i, n in enumerate((50, 90, 90)))
    nearest = torch.cdist(x.double().transpose(1, 2), keys.double().transpose(1, 2)).argmin(-1).transpose(1, 2)
    y = attend(x, torch.full((2,), log_sigma), keys=keys, values=values)
    assert torch.equal(y, values.gather(1, nearest[..., None].expand_as(x)))


@VALUES
@pytest.mark.parametrize("count", [1, 4])
def test_eps_is_applied_exactly(threads, dtype, count, with_values):
    """One as large as a row sum, so that leaving it out or adding it twice shows, in gradients too: M of a query then
    adds up to eps g.y times the mean exponent, also in parts of heads.
    """
    threads(count)
    for mask in (Mask(), Mask(causal=True, window=40)):
        problem = Problem.seeded("clusters", (1, 331, 2, 24), dtype, with_values=with_values, mask=mask, eps=3.0)
        testing.check(partial(route(mask), eps=3.0), problem)


@pytest.mark.parametrize("causal,window", [(False, None), (True, None), (True, 30)])
def test_rows_far_from_all_keys_and_their_neighbours_are_exact(bfloat16, causal, window):
    """Every seventh query is so far away that its weights, unshifted, are 0; the others in its stripe are not."""
    mask = Mask(causal, window)
    far = foreign(100, 130, 32, mask, with_values=True, dtype=torch.bfloat16)
    far.x[:, ::7, :, 1] += 100
    want, got = testing.oracle(far), testing.run(route(mask), far)

    def off(got, want):
        """The largest error of a token and head, relative."""
        return ((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max()

    assert off(got.y, want.y) <= 2 * bfloat16 and off(got.dvalues, want.dvalues) <= 4 * bfloat16
    assert testing.error(got.dlog_sigma, want.dlog_sigma) <= 0.02
    if mask == Mask():
        alone = attend(far.x[:, 7::7], far.log_sigma, keys=far.keys, values=far.values)
        assert off(alone, want.y[:, 7::7]) <= 2 * bfloat16


def test_equal_tokens_weigh_the_same_and_tokens_far_from_0_keep_their_rows(bfloat16):
    """Weights are normalised by the sum of what was rounded: an offset shared by all tokens does not blur y."""
    token = make_features("normal", (1, 1, 1, 64), torch.bfloat16)
    torch.testing.assert_close(attend(token.expand(1, 50, 1, 64), torch.zeros(1)), token.expand(1, 50, 1, 64))
    offset = torch.full((1, 50, 1, 64), 1000.0, dtype=torch.bfloat16)
    offset[:, 25:] = 1008
    y = attend(offset, torch.tensor([4.0]), causal=True).float()
    assert (y[:, :25] == 1000).all() and (y[:, 25:] >= 1000).all() and (y[:, 25:] <= 1008).all()


@VALUES
def test_weights_are_rounded_and_not_cut_off(bfloat16, with_values):
    """One weight of 1 among many just below a bfloat16 number, which cutting off moves by a whole last place.

    A row's common error would cancel in its sum; this one does not. Rounded, K is off by `below` of itself, and y or a
    gradient by 2^-9 / sqrt(3) in the mean square: that of `heads` different numbers has a mean near 0.
    """
    heads, tokens, below = 64, 32, 2.0**-14
    scale = 1 + torch.rand(heads).bfloat16().double()
    level = torch.tensor([0.5, 0.75, 0.625, 0.25]).double().repeat(heads // 4) * (1 - below)
    x = (torch.eye(tokens)[None, :, None] * scale[:, None]).bfloat16()  # any two tokens are as far apart
    log_sigma = (scale.square() / -level.log()).log().div(2).float()
    values = x.clone().requires_grad_()
    y = attend(x, log_sigma, values=values if with_values else None, eps=0.0)
    outputs = [y, *(torch.autograd.grad(y, values, x) if with_values else [])]
    for output in outputs:
        diagonal = output.detach().double().diagonal(dim1=1, dim2=3).mean(-1)[0]  # W_ii x_ii: (H,)
        error = diagonal * (1 + (tokens - 1) * level) / scale - 1
        assert error.mean().abs() < below + 5 * 2**-9 / (3 * heads) ** 0.5


def test_weights_of_foreign_keys_are_rounded_and_not_cut_off(bfloat16):
    """W's rows sum to 1, so the gradients of the values add up to those of y; cut off, 0.1 % of them would be lost."""
    x, keys, values = (make_features("normal", (1, n, 2, 32), torch.bfloat16, i) for i, n in enumerate((200, 300, 300)))
    values.requires_grad_()
    y = attend(x, make_log_sigma(2, 32), keys=keys, values=values)
    (dvalues,) = torch.autograd.grad(y.float().sum(), values)
    lost = 1 - dvalues.double().sum((1, 3)) / y[0, :, 0].numel()
    assert lost.abs().max() < 5 * bfloat16 / 4 / (3 * 300) ** 0.5


@VALUES
@pytest.mark.parametrize("causal", [False, True])
def test_runs_are_equal_to_the_bit(dtype, threads, causal, with_values):
    """Few heads, whose queries are split, and more. bfloat16: any number of threads; float32: the same number."""
    for batch, queries, keys, log_sigma in [
        (1, 301, 0, make_log_sigma(2, 32)),
        (5, 70, 0, make_log_sigma(2, 32)),
        (1, 170, 301, torch.tensor([-1.0, 0.2])),  # with and without the largest exponents
    ]:
        sizes, runs = (queries, keys, (keys or queries) * with_values), []
        tensors = [make_features("normal", (batch, n, 2, 32), dtype, i) if n else None for i, n in enumerate(sizes)]
        for count in (2, 2, 7, 7) if dtype == torch.float32 else (1, 2, 7, 7):
            threads(count)
            runs.append(gradients(tensors[0], log_sigma, *tensors[1:], causal=causal))
        for number, again in enumerate(runs):
            assert equal(again, runs[number & ~1 if dtype == torch.float32 else 0])


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("causal,window", MASKS[:4])
def test_split_heads_keep_to_the_budget(threads, count, causal, window):
    threads(count)
    mask = Mask(causal, window)
    keep_to_the_budget(mask, [(1, 301, 1, 32), (1, 99, 3, 16)], [(100, 301, 16)])
    testing.check(route(mask), replace(foreign(2, 900, 16, mask, with_values=False), grad_y=None))


def test_a_bad_query_reaches_the_values_that_it_sees_and_no_others():
    x, keys, values = (make_features("normal", (1, 50, 1, 20), seed=seed).requires_grad_() for seed in range(3))
    weight = torch.ones(50)
    weight[30] = torch.nan
    y = attend(x * weight[:, None, None], torch.zeros(1), keys=keys, values=values, causal=True, window=9)
    (gradient,) = torch.autograd.grad(y.sum(), values)
    assert gradient.isnan().any(-1).flatten().nonzero().flatten().tolist() == list(range(21, 31))


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


def test_denormal_numbers_work_again_afterwards(dtype):
    x, keys = (make_features("normal", (1, n, 2, 16), dtype, n) for n in (20, 30))
    for options in ({}, dict(keys=keys)):
        gradients(x, torch.zeros(2), **options)
    attend(x[:, :1], torch.zeros(2), keys=keys)
    assert (torch.tensor([1e-38]) / 10).item() > 0


def test_a_forked_process_computes_although_it_lost_the_threads(threads):
    threads(2)
    cache, log_sigma = make_features("normal", (4, 300, 2, 16)), torch.zeros(2)
    x, last = cache[:, :50], cache[:, -1:]

    def compute():  # sums of few numbers, for which torch takes no threads either
        return [y.sum().item() for y in (attend(x, log_sigma), decode_attention(last, log_sigma, cache))]

    want = compute()  # starts the threads
    assert processes.in_a_forked_child(compute) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("dtype", op.HALF, ids=str)
def test_what_has_no_kernel_of_its_own_is_computed_in_float32(dtype, monkeypatch):
    """float16, and all without products of bfloat16: as if the caller had converted, y and gradients rounded once."""
    monkeypatch.setattr(call, "has_bfloat16", lambda: False)
    for queries, keys, values in [(40, 0, 0), (40, 0, 40), (40, 40, 0), (1, 40, 0)]:
        sizes = dict(x=queries, keys=keys, values=values, grad_y=queries).items()
        drawn = {name: make_features("normal", (1, n, 2, 20), dtype, seed) for seed, (name, n) in enumerate(sizes)}
        trained = Problem(log_sigma=make_log_sigma(2, 20), **{name: t for name, t in drawn.items() if t.numel()})
        for case in (trained, replace(trained, grad_y=None)):
            assert select_impl(case.x, keys=case.keys, values=case.values) == "cpu"
            got, want = (testing.run(attend, each).named() for each in (case, case.map(torch.Tensor.float)))
            assert all(torch.equal(t, want[name].to(t.dtype)) for name, t in got.items()) and got["y"].dtype == dtype


def test_what_it_cannot_serve_is_said_once_and_goes_to_sdpa(caplog):
    dispatch._logged.clear()
    x = torch.zeros(1, 4, 2, 136)
    for refused, reason in ((x, "head_dim <= 128, got 136"), (x[..., :16].to("meta"), "CPU tensors, got meta")):
        with pytest.raises(ValueError, match=reason):
            select_impl(refused, impl="cpu")
    assert [select_impl(x), select_impl(x), select_impl(x[..., :128])] == ["sdpa", "sdpa", "cpu"]
    assert [record.message for record in caplog.records] == [
        'gka: impl="auto" takes sdpa: cpu needs head_dim <= 128, got 136'
    ]
