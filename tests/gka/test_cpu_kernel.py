"""The CPU kernel: every mask and padding within the budget, bit-equal runs, threads, memory, forks, refusals."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.utils.checkpoint

import operator_cases
import processes
from gka import dispatch, gaussian_attention, select_impl, testing
from gka.impl.cpu import build
from gka.masking import Mask
from gka.testing import Problem, make_features, make_log_sigma
from operator_cases import check, foreign

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

# No window or length is a multiple of a tile: 16 x 16 units, 48 queries side by side, blocks of 192.
MASKS = [(False, None), (True, None), (True, 21), (False, 9), (True, 0), (False, 0), (True, 117), (False, 77)]
attend = partial(gaussian_attention, impl="cpu")
gradients = partial(operator_cases.gradients, impl="cpu")


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("causal,window", MASKS)
def test_outputs_and_gradients_keep_to_the_budget(causal, window, with_values):
    for shape in [(2, 1, 2, 16), (1, 7, 1, 1), (2, 33, 2, 20), (1, 250, 1, 80), (1, 401, 1, 8), (1, 197, 1, 128)]:
        check("cpu", shape, causal=causal, window=window, with_values=with_values, device="cpu")


@pytest.mark.parametrize("kind", ["unit_norm", "clusters", "x50", "+50"])
@pytest.mark.parametrize("causal", [False, True])
def test_any_features_keep_to_the_budget(kind, causal):
    check("cpu", (1, 197, 2, 64), kind=kind, causal=causal, device="cpu")
    check("cpu", (1, 63, 2, 64), kind=kind, causal=causal, constant_norm=kind == "unit_norm", device="cpu")


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("causal,window", [(False, None), (True, None), (True, 21), (False, 9), (True, 0), (False, 0)])
def test_foreign_keys_keep_to_the_budget(causal, window, with_values):
    route = partial(attend, causal=causal, window=window)
    for sizes in [(9, 21, 16), (50, 50, 20), (100, 301, 64)]:
        testing.check(route, foreign(*sizes, Mask(causal, window), with_values))


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("log_sigma", [-3.0, -1.0, 0.3, 5.0, 10.0])
def test_rows_of_foreign_keys_with_one_weight_or_equal_ones_keep_to_the_budget(log_sigma, with_values):
    """Far keys: what rounding leaves of the sums of M, which are 0, would be multiplied by large distances. Many equal
    weights: added one after another they would all round one way.
    """
    for sizes in [(1, 1, 64), (50, 50, 64), (70, 250, 20), (30, 1000, 16)]:
        problem = replace(foreign(*sizes, Mask(), with_values), log_sigma=torch.full((2,), log_sigma))
        testing.check(attend, problem)


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("causal,window", [(False, None), (True, None), (True, 21)])
def test_decoding_keeps_to_the_budget(causal, window, with_values):
    """Few queries without gradients have a kernel of their own."""
    route = partial(attend, causal=causal, window=window)
    for sizes in [(1, 1, 8), (1, 30, 20), (3, 300, 64), (16, 77, 128)]:
        testing.check(route, foreign(*sizes, Mask(causal, window), with_values, with_gradients=False))


def test_eps_is_applied_exactly():
    """One as large as a row sum, so that leaving it out or adding it twice shows, in gradients too."""
    for with_values in (False, True):
        for mask in (Mask(), Mask(causal=True, window=5)):
            problem = Problem.seeded("normal", (1, 63, 2, 32), with_values=with_values, mask=mask, eps=3.0)
            testing.check(partial(attend, causal=mask.causal, window=mask.window, eps=3.0), problem)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_runs_with_the_same_threads_are_equal_to_the_bit(threads, count, causal):
    """Heads fewer than threads, whose queries are then split, and more."""
    threads(count)
    for batch, length in [(1, 301), (5, 70)]:
        x, keys = (make_features("normal", (batch, length, 2, 32), seed=seed) for seed in (0, 1))
        for foreign_keys in (None, keys):
            runs = [gradients(x, make_log_sigma(2, 32), foreign_keys, causal=causal) for _ in range(3)]
            for again in runs[1:]:
                assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("causal,window", MASKS[:4])
def test_split_heads_keep_to_the_budget(threads, count, causal, window):
    threads(count)
    check("cpu", (1, 301, 1, 32), causal=causal, window=window, device="cpu")
    check("cpu", (1, 99, 3, 16), causal=causal, window=window, with_values=True, device="cpu")
    route = partial(attend, causal=causal, window=window)
    testing.check(route, foreign(100, 301, 16, Mask(causal, window), with_values=True))
    testing.check(route, foreign(2, 900, 16, Mask(causal, window), with_values=False, with_gradients=False))


def test_strided_and_expanded_tensors_are_read_where_they_are():
    tensor = make_features("normal", (2, 16, 64, 3))
    x = tensor.permute(0, 2, 3, 1)[:, ::2]  # channels apart, every other token
    for route in (x, tensor.permute(0, 3, 2, 1).transpose(1, 2)[:, :32]):
        want = attend(route.contiguous(), make_log_sigma(3, 16))
        assert torch.equal(attend(route, make_log_sigma(3, 16)), want)
    leaf = x.detach().requires_grad_()
    attend(leaf, make_log_sigma(3, 16)).sum().backward()  # its gradient is one number, expanded
    assert leaf.grad.isfinite().all()


def test_a_forked_process_computes_although_it_lost_the_threads(threads):
    threads(2)
    x = make_features("normal", (4, 50, 2, 16))
    want = attend(x, torch.zeros(2), causal=True).sum().item()
    got = processes.in_a_forked_child(lambda: attend(x, torch.zeros(2), causal=True).sum().item())
    assert got == pytest.approx(want, rel=1e-4)


def test_numbers_that_are_not_in_memory_are_made_first():
    """torch has views whose sign it remembers, such as the imaginary part of a conjugate."""
    x = torch._neg_view(make_features("normal", (1, 20, 2, 16)))
    assert torch.equal(attend(x, torch.zeros(2)), attend(x.resolve_neg(), torch.zeros(2)))


def test_activation_checkpoints_give_the_same_gradients():
    x, log_sigma = make_features("normal", (1, 20, 2, 16)).requires_grad_(), torch.zeros(2)
    ways = attend, partial(torch.utils.checkpoint.checkpoint, attend, use_reentrant=False)
    want, got = (torch.autograd.grad(way(x, log_sigma).square().sum(), x)[0] for way in ways)
    assert torch.equal(got, want)


def test_what_it_cannot_serve_is_said_once_and_goes_to_sdpa(caplog):
    dispatch._said.clear()
    log_sigma = torch.zeros(2)
    for x, reason in [
        (torch.zeros(1, 4, 2, 16, dtype=torch.float64), "cpu takes float32, bfloat16, float16, got torch.float64"),
        (torch.zeros(1, 4, 2, 136), "cpu needs head_dim <= 128, got 136"),
        (torch.zeros(1, 4, 2, 16, device="meta"), "the CPU kernel takes CPU tensors, got meta"),
    ]:
        with pytest.raises(ValueError, match=reason):
            select_impl(x, log_sigma=log_sigma.to(x.device), impl="cpu")
        assert select_impl(x, log_sigma=log_sigma.to(x.device)) == "sdpa"
    assert select_impl(torch.zeros(1, 4, 2, 128)) == "cpu"
    for _ in range(2):
        select_impl(torch.zeros(1, 4, 2, 136), log_sigma=log_sigma)
    said = [record.message for record in caplog.records]
    assert said.count('gka: impl="auto" takes sdpa: cpu needs head_dim <= 128, got 136') == 1
    assert len(said) == 2 and "torch.float64" in said[0]


def test_second_derivatives_are_refused():
    x = make_features("normal", (1, 10, 2, 16)).requires_grad_()
    (gradient,) = torch.autograd.grad(attend(x, torch.zeros(2)).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match='impl="cpu" has no second derivatives; use impl="reference"'):
        gradient.sum().backward()


def test_lost_exponents_are_warned_of():
    x = make_features("normal", (1, 20, 2, 16)) + 1000
    with pytest.warns(UserWarning, match="so long, measured in sigma"):
        attend(x, torch.zeros(2), causal=True)
