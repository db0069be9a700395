"""The CPU kernel: every mask and padding within the budget, bit-equal runs, threads, memory, forks, refusals."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import operator_cases
import processes
from gka import GaussianKernelAttention, gaussian_attention, select_impl, testing
from gka.impl.cpu import build, op
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


CALLS = {
    "full": lambda x: op.attend(x, None, None, torch.zeros(2), -1, -1, True, 1e-6, True),
    "values": lambda x: op.attend(x, None, x.detach() + 1, torch.zeros(2).requires_grad_(), 5, 0, False, 1e-6, True),
    "foreign": lambda x: op.attend(x, x.detach().requires_grad_(), None, torch.zeros(2), -1, 0, False, 0.0, True),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_operator_is_a_proper_one(call, monkeypatch):
    """Schema, fake tensors, autograd registration, dynamic shapes: torch's own check."""
    seen = []
    monkeypatch.setattr(op, "attend", lambda *arguments: seen.extend(arguments))
    CALLS[call](make_features("normal", (1, 20, 2, 32)).requires_grad_())
    torch.library.opcheck(torch.ops.gka.cpu_attend.default, tuple(seen))


def test_compiles_and_exports_without_graph_breaks():
    layer = GaussianKernelAttention(64, 2, causal=True, impl="cpu")
    x = torch.randn(2, 24, 64, requires_grad=True)
    want = torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(x).square().sum(), (x, *layer.parameters())), want, strict=True):
        torch.testing.assert_close(a, b)
    exported = torch.export.export(layer, (x.detach(),)).module()
    torch.testing.assert_close(exported(x), layer(x))


class _Foreign(torch.nn.Module):
    def forward(self, x, keys, values, log_sigma):
        return gaussian_attention(x, log_sigma, keys=keys, values=values, impl="cpu")


def spread(t):
    """The same numbers, the last dimension not side by side."""
    return torch.stack([t, t], dim=-1)[..., 0]


@pytest.mark.parametrize("queries", [3, 40], ids=["decoding", "attention"])
def test_an_exported_program_takes_other_strides_than_its_example(queries):
    """torch.export keeps the copies that its example needed, and does not look at strides again."""
    draw = [torch.randn(2, n, 4, 16) for n in (queries, 50, 50)]
    arguments = (*draw, torch.randn(4) / 4)
    program = torch.export.export(_Foreign(), arguments).module()
    want = program(*arguments)
    torch.testing.assert_close(want, _Foreign()(*arguments), rtol=0, atol=0)
    torch.testing.assert_close(program(*map(spread, arguments)), want, rtol=0, atol=0)
    image = torch.randn(2, 64, queries).transpose(1, 2)  # as a ViT's patches come
    layer = GaussianKernelAttention(64, 4, impl="cpu").eval()
    program = torch.export.export(layer, (image.contiguous(),)).module()
    torch.testing.assert_close(program(image), program(image.contiguous()), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("others", [0, 1, 2])
def test_batched_gradients_are_those_of_a_loop(others):
    leaves = [torch.randn(2, 9, 2, 8, requires_grad=True) for _ in range(1 + others)]
    log_sigma = torch.zeros(2, requires_grad=True)
    leaves.append(log_sigma)
    y = attend(leaves[0], log_sigma, **dict(zip(("keys", "values"), leaves[1:-1])))
    gradients = torch.randn(3, *y.shape)
    each = [torch.autograd.grad(y, leaves, gradient, retain_graph=True) for gradient in gradients]
    got = torch.autograd.grad(y, leaves, gradients, is_grads_batched=True)
    assert all(torch.equal(batch, torch.stack(one)) for batch, one in zip(got, zip(*each), strict=True))


def test_vmap_is_a_loop_and_other_transforms_go_to_sdpa():
    x, log_sigma = make_features("normal", (1, 20, 2, 16)), torch.zeros(2)
    stacked = torch.stack([x, 2 * x])
    got = torch.func.vmap(lambda x: attend(x, log_sigma))(stacked)
    assert all(torch.equal(a, attend(b, log_sigma)) for a, b in zip(got, stacked, strict=True))
    names = []

    def energy(x):
        names.append(select_impl(x))
        return gaussian_attention(x, log_sigma).square().sum()

    got = torch.func.grad(energy)(x)
    assert names == ["sdpa"]
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(got, torch.autograd.grad(energy(leaf), leaf)[0], rtol=1e-4, atol=1e-4)
    assert names == ["sdpa", "cpu"]
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="has no forward mode"):
        attend(torch.autograd.forward_ad.make_dual(x, x), log_sigma)


class Operators(TorchDispatchMode):
    """The names of the operators that run under it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_who_records_operators_sees_it_and_others_get_the_same_numbers():
    """Otherwise a call goes straight to the library."""
    x = make_features("normal", (1, 20, 2, 16))
    want = gradients(x, torch.zeros(2))
    with Operators() as seen:
        got = gradients(x, torch.zeros(2))
    assert {"gka::cpu_attend", "gka::cpu_attend_backward"} <= set(seen.names)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("before,after", [(-1, -1), (-1, 0)])
def test_a_program_that_was_compiled_before_eps_was_passed_goes_on(before, after):
    """torch keeps compiled programs, and finds them again by a graph that does not show the operator's arguments."""
    x, log_sigma, grad_y = (
        make_features("normal", (1, 50, 2, 16)),
        torch.ones(2),
        make_features("normal", (1, 50, 2, 16)),
    )
    y, *kept = torch.ops.gka.cpu_attend(x, None, None, log_sigma, before, after, after < 0, 3.0, True)
    arguments = (grad_y, x, None, None, log_sigma, y, *kept, before, after, after < 0)
    old, new = torch.ops.gka.cpu_attend_backward(*arguments), torch.ops.gka.cpu_attend_backward(*arguments, 3.0)
    torch.testing.assert_close(old, new)


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
    op._said.cache_clear()
    log_sigma = torch.zeros(2)
    for x, reason in [
        (torch.zeros(1, 4, 2, 16, dtype=torch.float64), "takes float32, bfloat16 or float16, got torch.float64"),
        (torch.zeros(1, 4, 2, 136), "the CPU kernel needs head_dim <= 128, got 136"),
        (torch.zeros(1, 4, 2, 16, device="meta"), "the CPU kernel takes CPU tensors, got meta"),
    ]:
        with pytest.raises(ValueError, match=reason):
            select_impl(x, log_sigma=log_sigma.to(x.device), impl="cpu")
        assert select_impl(x, log_sigma=log_sigma.to(x.device)) == "sdpa"
    assert select_impl(torch.zeros(1, 4, 2, 128)) == "cpu"
    for _ in range(2):
        select_impl(torch.zeros(1, 4, 2, 136), log_sigma=log_sigma)
    said = [record.message for record in caplog.records]
    assert said.count('gka: impl="auto" takes sdpa: the CPU kernel needs head_dim <= 128, got 136') == 1
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
