"""sdpa, cpu and flex against the float64 oracle: outputs, all gradients, odd sizes, masks, sigma^2 not a power of 2."""

import contextlib
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.attention.flex_attention
import torch.nn.functional as F

from gka import dot_product_attention, gaussian_attention, select_impl, testing
from gka.dispatch import BASELINES
from gka.impl import flex
from gka.masking import Mask
from gka.testing import Problem, make_log_sigma
from operator_cases import AUTO_ON_CPU, FUSED, IMPLS, MASKS, check, foreign, half_kept

SHAPES = [(2, 1, 2, 16), (1, 63, 2, 32), (2, 111, 3, 24), (1, 197, 1, 64), (1, 129, 2, 1)]


@pytest.mark.parametrize("impl", FUSED["cpu"])
@pytest.mark.parametrize("causal,window", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_float32(shape, causal, window, impl):
    check(impl, shape, causal=causal, window=window, device="cpu")
    check(impl, shape, causal=causal, window=window, with_values=True, device="cpu")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*testing.KINDS, "all+10"])
def test_sdpa_of_any_features(kind, dtype, causal):
    """In half precision throughout, within the budget of float32's exponents."""
    with half_kept():
        check("sdpa", (2, 197, 2, 64), dtype, kind, causal, device="cpu")
        check("sdpa", (2, 197, 2, 64), dtype, kind, causal, with_values=True, device="cpu")


@pytest.mark.parametrize("causal,window", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_sdpa_in_half_precision_throughout_at_odd_sizes(shape, causal, window):
    with half_kept():
        check("sdpa", shape, torch.bfloat16, causal=causal, window=window, with_values=True, device="cpu")


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sigma", [1e-3, 0.1, 1.0, 8**0.5, 8.0])
@pytest.mark.parametrize("offset", [0, 10, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:gaussian_attention. the features are so long")
def test_as_accurate_as_plain_pytorch(dtype, offset, sigma, causal, with_values):
    """sdpa, and cpu in float32: any bandwidth and common offset, also where the true gradient is 0; floors in norm."""
    fields = dict(with_values=with_values, mask=Mask(causal), log_sigma=torch.tensor([sigma, 1.3 * sigma]).log())
    problem = Problem.seeded(f"all+{offset}", (2, 57, 2, 32), dtype, **fields)
    attend = partial(gaussian_attention, causal=causal)
    testing.check(partial(attend, impl="sdpa"), problem, by_terms=True)
    if dtype == torch.float32 and AUTO_ON_CPU == "cpu":
        testing.check(partial(attend, impl="cpu", eps=0.0), problem, by_terms=True)
    # flex keeps to the floor alone, and its backward pass runs on CUDA alone.
    y = attend(problem.x, problem.log_sigma, values=problem.values, impl="flex")
    assert (y.double() - testing.oracle(problem).y).norm() <= testing.floors(problem)["y"]


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sdpa_of_foreign_keys_and_values(dtype, causal, with_values):
    problem = foreign(9, 21, 16, Mask(causal), with_values, dtype=dtype)
    testing.check(partial(gaussian_attention, causal=causal, impl="sdpa"), problem)


@pytest.mark.parametrize("context", [contextlib.nullcontext, half_kept], ids=["float32", "half"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["x10", "x50", "+50", "+500"])
def test_bfloat16_carries_the_norms_in_full(kind, causal, context):
    """Foreign values, as own ones hide what is lost."""
    log_sigma = 0.5 * torch.log(torch.tensor([8.0, 32.0]))
    fields = dict(with_values=True, mask=Mask(causal), log_sigma=log_sigma, with_gradients=False)
    problem = Problem.seeded(kind, (1, 111, 2, 32), torch.bfloat16, **fields)
    with context():
        got = testing.run(partial(gaussian_attention, causal=causal, impl="sdpa"), problem).y
    assert testing.error(got, testing.oracle(problem).y) <= torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("impl", FUSED["cpu"])
def test_full_attention_does_not_see_a_common_offset(impl):
    """The budget is that of the centred features; own values would be large with the offset and hide the error."""
    problem = Problem.seeded("+50", (1, 111, 2, 32), with_values=True, with_gradients=False)
    centred = replace(problem, x=problem.x - problem.x.mean(1, keepdim=True))
    got = testing.run(partial(gaussian_attention, impl=impl), problem).y
    by_plain = testing.error(testing.plain(centred).y, testing.oracle(centred).y)
    assert testing.error(got, testing.oracle(problem).y) <= 2 * by_plain + testing.output_floor(centred)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal,window", MASKS)
def test_constant_norm_through_the_normalisation(causal, window, dtype):
    """Behind a norm of heads, dropping |x|^2 leaves outputs and the gradients of the raw features exact."""
    shape = (2, 63, 2, 32)
    norm = partial(F.rms_norm, normalized_shape=shape[-1:])
    problem = Problem.seeded("normal", shape, dtype, mask=Mask(causal, window), front=norm)
    fast = partial(gaussian_attention, causal=causal, window=window, constant_norm=True, impl="sdpa")
    want = testing.oracle(problem).named()
    floor = 2 * torch.finfo(dtype).eps * (1 + shape[-1] / problem.log_sigma.mul(2).exp().min().item())
    for name, value in testing.run(fast, problem).named().items():
        condition = testing.log_sigma_condition(problem) if name == "dlog_sigma" else 1.0
        assert testing.error(value, want[name]) <= floor * condition, name


@pytest.mark.parametrize("impl", ["sdpa", "flex"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sigma_squared", [10.4, 8.0, 6.0])
def test_constant_norm_learns_narrow_bandwidths_in_half_precision(sigma_squared, dtype, causal, impl, monkeypatch):
    """The gradient of sigma is as good as plain PyTorch's: the small rest of exponents as large as |x|^2 / sigma^2.

    FlexAttention's backward pass is the one that torch has for CPUs and does not offer.
    """
    monkeypatch.setattr(flex, "unavailable", lambda request: None)
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *tensors: None)
    shape, log_sigma = (2, 197, 8, 64), torch.full((8,), 0.5 * math.log(sigma_squared))
    norm = partial(F.rms_norm, normalized_shape=shape[-1:])
    fields = dict(mask=Mask(causal), front=norm, log_sigma=log_sigma, with_values=True)
    problem = Problem.seeded("normal", shape, dtype, **fields)
    fast = partial(gaussian_attention, causal=causal, constant_norm=True, impl=impl)
    want = testing.oracle(problem).dlog_sigma
    off, by_plain = (testing.error(t.dlog_sigma, want) for t in (testing.run(fast, problem), testing.plain(problem)))
    assert off <= 2 * by_plain + 2 * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("causal,window", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", FUSED["cuda"])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda s: "x".join(map(str, s)))
def test_fast_paths_on_cuda(shape, impl, dtype, causal, window):
    check(impl, shape, dtype, causal=causal, window=window, with_values=True, device="cuda")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [None, 5])
def test_one_query_against_a_cache(impl, window):
    """Decoding: the last row of the full pass, from the last query and the whole cache."""
    assert select_impl(torch.zeros(1, 1, 2, 16), impl=impl) == impl
    x = testing.make_features("normal", (2, 40, 2, 16))
    log_sigma = make_log_sigma(2, 16)
    full = gaussian_attention(x, log_sigma, causal=True, window=window, eps=0.0, impl=impl)
    last = gaussian_attention(x[:, -1:], log_sigma, keys=x, causal=True, window=window, impl=impl)
    torch.testing.assert_close(last, full[:, -1:], rtol=1e-5, atol=1e-6)


def test_dot_product_baseline_agrees_with_its_definition():
    q, k, v = (testing.make_features("normal", (2, 33, 2, 16), seed=s) for s in range(3))
    for causal, window in MASKS:
        visible = Mask(causal, window).dense(33, 33, q.device)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4.0
        want = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)
        for impl in BASELINES:
            torch.testing.assert_close(
                dot_product_attention(q, k, v, causal=causal, window=window, impl=impl), want, rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("context", [contextlib.nullcontext, half_kept], ids=["float32", "float16"])
def test_float16_keeps_the_norms_that_do_not_fit_its_range(context):
    problem = Problem(testing.make_features("normal", (1, 20, 1, 4), torch.float16) + 300, torch.tensor([-0.3]))
    with context():
        got = testing.run(partial(gaussian_attention, impl="sdpa"), problem).y
    assert testing.error(got, testing.oracle(problem).y) <= torch.finfo(torch.float16).eps


@pytest.mark.parametrize("impl", FUSED["cpu"])
def test_an_outlier_first_token_does_not_hurt_the_others(impl):
    """The usual attention sink: nothing may be measured relative to it."""
    problem = Problem.seeded("normal", (1, 63, 2, 16), mask=Mask(True), with_gradients=False)
    problem.x[:, 0] *= 100
    results = testing.run(partial(gaussian_attention, causal=True, impl=impl), problem), testing.plain(problem)
    got, plain, want = (result.y[:, 1:] for result in (*results, testing.oracle(problem)))
    floor = testing.exponent_ulp(replace(problem, x=problem.x[:, 1:]))
    assert testing.error(got, want) <= 2 * testing.error(plain, want) + floor


def test_the_budget_is_twice_plain_pytorchs_error_and_the_floor():
    """What every test of accuracy stands on."""
    want = {"y": torch.linspace(1, 2, 9, dtype=torch.float64)}
    off = {"y": want["y"] * (1 + 1e-3 * torch.tensor([1.0, -1.0, 1.0] * 3, dtype=torch.float64))}

    def refused(times, floor):
        got = {"y": want["y"] + times * (off["y"] - want["y"])}
        return testing.disagreement(got, want, off, {"y": floor}) is not None

    assert not refused(1.99, 0.0) and refused(2.01, 0.0)
    assert not refused(2.9, 0.95e-3) and refused(3.1, 0.95e-3)
    problem = Problem.seeded("normal", (1, 33, 2, 16), with_values=True)
    exact, floors = testing.oracle(problem).named(), testing.coarse_floors(problem)
    for name in ("y", "dvalues"):
        wrong = {**exact, name: exact[name] * (1 + 1.5 * floors[name])}
        assert testing.disagreement(wrong, exact, exact, floors).startswith(f"{name} is off by")
    largest = problem.x.square().sum(-1).max() / problem.log_sigma.min().exp() ** 2
    assert floors["dvalues"] <= torch.finfo(torch.float32).eps * (1 + float(largest))
