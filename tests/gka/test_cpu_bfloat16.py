"""The CPU kernel in half precision: kernels of its own for bfloat16, the float32 ones for all else. Self-attention."""

import contextlib
import logging
import subprocess
import sys
from functools import partial

import pytest
import torch

from gka import GaussianKernelAttention, gaussian_attention, select_impl, testing
from gka.bandwidth import LOG_SIGMA_BOUND
from gka.impl.cpu import build, call, op
from gka.masking import Mask
from gka.testing import Problem, make_features, make_log_sigma
from operator_cases import NO_PRODUCTS, PRODUCTS, check, multiplied_by

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
READY = build.obstacle() is None and call.has_bfloat16()
needs_products = pytest.mark.skipif(not READY, reason=build.obstacle() or NO_PRODUCTS)

# No window or length is a multiple of a block of 32 x 32; 321 keys are mixed in two chunks.
MASKS = [(False, None), (True, None), (True, 21), (False, 9), (True, 0), (False, 0), (True, 117), (False, 77)]
attend = partial(gaussian_attention, impl="cpu")


@pytest.fixture(params=[*PRODUCTS, "float32"])
def kernel(request, monkeypatch):
    """All ways in which bfloat16 features are computed."""
    own = request.param in PRODUCTS
    monkeypatch.setattr(call, "has_bfloat16", lambda: own)
    with multiplied_by(request.param) if own else contextlib.nullcontext():
        yield request.param


def features(batch: int, length: int, heads: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    return make_features("normal", (batch, length, heads, head_dim), torch.bfloat16, seed)


def gradients(x, log_sigma, values=None, **options):
    leaves = [t.detach().requires_grad_() for t in (x, log_sigma, *(() if values is None else (values,)))]
    y = attend(*leaves[:2], values=None if values is None else leaves[2], **options)
    return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("causal,window", MASKS)
def test_outputs_and_gradients_keep_to_the_budget(kernel, causal, window, with_values):
    for shape in [(2, 1, 2, 16), (2, 63, 2, 20), (1, 111, 1, 80), (1, 321, 1, 8), (1, 197, 1, 128)]:
        options = dict(causal=causal, window=window, with_values=with_values, device="cpu")
        check("cpu", shape, torch.bfloat16, **options)


@needs_products
@pytest.mark.parametrize("head_dim", [1, 8, 15, 16, 17, 31, 32, 33, 64, 96, 127])
def test_channels_are_padded(head_dim):
    for with_values in (False, True):
        check("cpu", (1, 40, 2, head_dim), torch.bfloat16, causal=True, with_values=with_values, device="cpu")


@pytest.mark.parametrize("kind", ["unit_norm", "clusters", "x50", "+50", "all+5", "all+100"])
@pytest.mark.parametrize("causal", [False, True])
def test_any_features_keep_to_the_budget(kernel, kind, causal):
    check("cpu", (1, 197, 2, 64), torch.bfloat16, kind=kind, causal=causal, device="cpu")


@needs_products
@pytest.mark.parametrize("log_sigma", [-LOG_SIGMA_BOUND, -3.0, 0.0, 1.0, 4.0, LOG_SIGMA_BOUND])
def test_any_bandwidth_keeps_to_the_budget(log_sigma):
    for mask in (Mask(), Mask(causal=True, window=37)):
        problem = Problem.seeded("normal", (1, 70, 2, 64), torch.bfloat16, mask=mask, eps=1e-6)
        fixed = Problem(problem.x, torch.full((2,), log_sigma), grad_y=problem.grad_y, mask=mask, eps=1e-6)
        testing.check(partial(attend, causal=mask.causal, window=mask.window), fixed)


@needs_products
def test_bandwidths_outside_the_clamp_have_no_gradient():
    x = features(1, 60, 2, 16)
    for log_sigma, want in [(-100.0, x), (100.0, x.float().mean(1, keepdim=True).bfloat16().expand_as(x))]:
        y, dx, dlog_sigma = gradients(x, torch.full((2,), log_sigma))
        torch.testing.assert_close(y, want, atol=1e-3, rtol=1e-2)
        assert dx.isfinite().all() and torch.equal(dlog_sigma, torch.zeros(2))


@needs_products
def test_eps_is_applied_exactly():
    """One as large as a row sum, so that leaving it out or adding it twice shows, in gradients too."""
    for with_values in (False, True):
        for mask in (Mask(), Mask(causal=True, window=5)):
            fields = dict(with_values=with_values, mask=mask, eps=3.0)
            problem = Problem.seeded("normal", (1, 63, 2, 32), torch.bfloat16, **fields)
            testing.check(partial(attend, causal=mask.causal, window=mask.window, eps=3.0), problem)


@needs_products
def test_equal_tokens_weigh_the_same_and_tokens_far_from_0_keep_their_rows():
    """Weights are normalised by the sum of what was rounded: an offset shared by all tokens does not blur y."""
    token = features(1, 1, 1, 64)
    torch.testing.assert_close(attend(token.expand(1, 50, 1, 64), torch.zeros(1)), token.expand(1, 50, 1, 64))
    offset = torch.full((1, 50, 1, 64), 1000.0, dtype=torch.bfloat16)
    offset[:, 25:] = 1008
    y = attend(offset, torch.tensor([4.0]), causal=True).float()
    assert (y[:, :25] == 1000).all() and (y[:, 25:] >= 1000).all() and (y[:, 25:] <= 1008).all()


@needs_products
@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
def test_weights_are_rounded_and_not_cut_off(with_values):
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
        own = output.detach().double().diagonal(dim1=1, dim2=3).mean(-1)[0]  # W_ii x_ii: (H,)
        error = own * (1 + (tokens - 1) * level) / scale - 1
        assert error.mean().abs() < below + 5 * 2**-9 / (3 * heads) ** 0.5


@needs_products
@pytest.mark.parametrize("causal", [False, True])
def test_runs_are_equal_to_the_bit_for_any_number_of_threads(threads, causal):
    """Heads fewer than threads, whose stripes are then dealt out, and more. No sum depends on who computes what."""
    for batch, length in [(1, 301), (5, 70)]:
        for values in (None, features(batch, length, 2, 32, seed=1)):
            runs = []
            for count in (1, 1, 2, 7):
                threads(count)
                runs.append(gradients(features(batch, length, 2, 32), make_log_sigma(2, 32), values, causal=causal))
            for again in runs[1:]:
                assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


@needs_products
def test_strided_and_expanded_tensors_are_read_where_they_are():
    tensor = make_features("normal", (2, 16, 64, 3), torch.bfloat16)
    x = tensor.permute(0, 2, 3, 1)[:, ::2]  # channels apart, every other token
    for route in (x, tensor.permute(0, 3, 2, 1).transpose(1, 2)[:, :32]):
        want = attend(route.contiguous(), make_log_sigma(3, 16))
        assert torch.equal(attend(route, make_log_sigma(3, 16)), want)
    leaf = x.detach().requires_grad_()
    attend(leaf, make_log_sigma(3, 16)).sum().backward()  # its gradient is one number, expanded
    assert leaf.grad.isfinite().all()


@needs_products
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_show_and_do_not_leak_into_other_heads(bad):
    x = features(2, 50, 2, 20)
    x[1, 30, 1, 3] = bad
    y, dx, dlog_sigma = gradients(x, torch.zeros(2), causal=True)
    assert y[1, 30:, 1].isnan().any(-1).all() and y[0].isfinite().all() and y[:, :, 0].isfinite().all()
    assert dx[1, :, 1].isnan().any() and dx[0].isfinite().all() and dlog_sigma.isnan().tolist() == [False, True]
    values = features(2, 50, 2, 20, seed=1)
    assert attend(x, torch.zeros(2), values=values)[1, 30, 1].isnan().all()  # by K alone


@needs_products
def test_denormal_numbers_work_again_afterwards():
    gradients(features(1, 20, 2, 16), torch.zeros(2))
    assert (torch.tensor([1e-38]) / 10).item() > 0


@needs_products
def test_the_operator_is_a_proper_one():
    """Schema, fake tensors, autograd registration, dynamic shapes: torch's own check."""
    x, values = features(1, 20, 2, 32).requires_grad_(), features(1, 20, 2, 32, seed=1)
    log_sigma = torch.zeros(2).requires_grad_()
    torch.library.opcheck(op.attend, (x, None, None, log_sigma, None, -1, -1, True, 1e-6, True))
    torch.library.opcheck(op.attend, (x, None, values, log_sigma, None, 5, 0, False, 1e-6, True))


def test_autocast_and_compile_give_what_bfloat16_features_give(kernel):
    layer = GaussianKernelAttention(64, 2, causal=True, impl="cpu")
    x = torch.randn(2, 40, 64, requires_grad=True)

    def step(layer):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, *layer.parameters()))]

    want = step(layer)
    assert want[0].dtype == torch.bfloat16 and want[1].dtype == torch.float32
    for a, b in zip(step(torch.compile(layer, fullgraph=True, backend="aot_eager")), want, strict=True):
        torch.testing.assert_close(a, b, atol=0.02, rtol=0.02)
    q = x.detach().view(2, 40, 2, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = attend(q, torch.zeros(2), causal=True)
    assert torch.equal(y, attend(q.bfloat16(), torch.zeros(2), causal=True))


@pytest.mark.parametrize("dtype", op.HALF, ids=str)
def test_what_has_no_kernel_of_its_own_is_computed_in_float32(dtype, monkeypatch):
    """float16, decoding, and all without products of bfloat16: as if the caller had converted, y rounded once."""
    monkeypatch.setattr(call, "has_bfloat16", lambda: False)
    x, keys, values = (make_features("normal", (1, 40, 2, 20), dtype, seed) for seed in (0, 1, 2))
    log_sigma = make_log_sigma(2, 20)
    decoding = [(x[:, :1], dict(keys=keys, values=values)), (x[:, :1], dict(keys=keys, causal=True))]
    for query, options in [(x, {}), (x, dict(values=values)), (x, dict(keys=keys)), *decoding]:
        single = {name: t.float() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
        got = attend(query, log_sigma, **options)
        assert got.dtype == dtype and torch.equal(got, attend(query.float(), log_sigma, **single).to(dtype))
        assert select_impl(query, log_sigma=log_sigma, **options) == "cpu"
    leaf = keys.detach().requires_grad_()
    attend(x, log_sigma, keys=leaf).float().sum().backward()
    assert leaf.grad.dtype == dtype and leaf.grad.isfinite().all()


@needs_products
def test_asking_for_the_kernel_does_not_break_the_graph():
    layer = torch.compile(GaussianKernelAttention(64, 2, impl="cpu").bfloat16(), fullgraph=True, backend="eager")
    assert layer(torch.randn(2, 20, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


RUN_ELSEWHERE = """
import sys, torch
from gka.impl.cpu import op
x, log_sigma, want = torch.load(sys.argv[1], weights_only=True)
assert torch.equal(op.attend(x, None, None, log_sigma, None, -1, -1, True, 1e-6, False)[0], want)
"""


@needs_products
def test_an_exported_program_asks_for_the_kernel_before_it_uses_it(tmp_path, monkeypatch):
    """In a process that has chosen no kernel: the same bits. On a machine without: one line, not a crash."""
    x, log_sigma = features(1, 20, 2, 32), torch.zeros(2)
    arguments = (x, None, None, log_sigma, None, -1, -1, True, 1e-6, False)
    torch.save([x, log_sigma, op.attend(*arguments)[0]], tmp_path / "tensors")
    subprocess.run([sys.executable, "-c", RUN_ELSEWHERE, tmp_path / "tensors"], check=True)
    monkeypatch.setattr(call, "has_bfloat16", lambda: False)
    monkeypatch.setattr(call, "_functions", call._functions.__wrapped__)
    with pytest.raises(RuntimeError, match="needs AMX or AVX512-BF16"):
        op.attend(*arguments)


def test_a_machine_without_the_kernel_says_so_once(monkeypatch, caplog):
    without = type("Library", (), {"gka_ready_bfloat16": staticmethod(lambda tiles: 0)})
    monkeypatch.setattr(call, "library", without)
    call.bfloat16_products.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "gka"):
            assert [call.has_bfloat16(), call.has_bfloat16()] == [False, False]
    finally:
        call.bfloat16_products.cache_clear()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["gka: no AMX or AVX512-BF16 here, the CPU kernel computes bfloat16 features in float32"]
