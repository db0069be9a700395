"""sdpa and flex against the float64 oracle: outputs and all gradients, odd sizes, masks, sigma^2 not a power of two."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gka import dot_product_attention, gaussian_attention, select_impl, testing
from gka.masking import Mask
from operator_cases import MASKS, check, problem, sigmas

SHAPES = [(2, 1, 2, 16), (1, 63, 2, 32), (2, 111, 3, 24), (1, 197, 1, 64), (1, 129, 2, 1)]


@pytest.mark.parametrize("causal,window", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_sdpa_float32(shape, causal, window):
    check("sdpa", shape, causal=causal, window=window, device="cpu")
    check("sdpa", shape, causal=causal, window=window, with_values=True, device="cpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["normal", "clusters"])
def test_sdpa_half_precision(kind, dtype, causal):
    check("sdpa", (2, 63, 2, 32), dtype, kind, causal, device="cpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["clusters", "x10", "x50", "+50"])
def test_sdpa_outlier_channels(kind, causal):
    check("sdpa", (1, 111, 2, 32), kind=kind, causal=causal, device="cpu")


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sigma", [1e-3, 0.1, 1.0, 8**0.5, 8.0])
@pytest.mark.parametrize("offset", [0, 10, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:gaussian_attention. the features are so long")
def test_sdpa_is_as_accurate_as_plain_pytorch(dtype, offset, sigma, causal, with_values):
    """Any bandwidth, any common offset: y and all gradients, also where the true gradient is 0.

    Floors are absolute, in norm, term by term.
    """
    mask, log_sigma = Mask(causal), torch.tensor([sigma, 1.3 * sigma]).log()
    x, _, values, grad_y = problem((2, 57, 2, 32), dtype, f"all+{offset}", with_values)
    attend = partial(gaussian_attention, causal=causal)
    testing.check(partial(attend, impl="sdpa"), x, log_sigma, values, grad_y, mask, by_terms=True)
    # flex keeps to the floor alone, and its backward pass runs on CUDA alone.
    want = testing.oracle(x, log_sigma, values, mask=mask, eps=0.0).y
    off = attend(x, log_sigma, values=values, impl="flex").double() - want
    assert off.norm() <= testing.floors(x, log_sigma, values, grad_y, mask)["y"]


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_foreign_keys_and_values_have_gradients_of_their_own(causal, with_values):
    """In float64 the literal equations' to the last digits; in half precision float32's, rounded."""
    x, keys, values, grad_y = (
        testing.make_features("normal", (2, n, 2, 16), torch.bfloat16, seed) + 3
        for seed, n in enumerate((9, 21, 21, 9))
    )

    def gradients(dtype, impl):
        leaves = [t.to(dtype).requires_grad_() for t in (x, keys, values)[: 2 + with_values]]
        scale = torch.tensor([0.7, 1.2], dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
        options = dict(keys=leaves[1], values=leaves[2] if with_values else None)
        y = gaussian_attention(leaves[0], scale, causal=causal, impl=impl, **options)
        return [y, *torch.autograd.grad((y * grad_y.to(dtype)).sum(), [*leaves, scale])]

    torch.testing.assert_close(
        gradients(torch.float64, "sdpa"), gradients(torch.float64, "reference"), rtol=1e-10, atol=1e-10
    )
    for half, single in zip(gradients(torch.bfloat16, "sdpa"), gradients(torch.float32, "sdpa"), strict=True):
        assert torch.equal(half, single.to(half.dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["x10", "x50", "+50", "+500"])
def test_bfloat16_carries_the_norms_in_full(kind, causal):
    """Foreign values, as own ones hide what is lost."""
    x, _, values, _ = problem((1, 111, 2, 32), torch.bfloat16, kind, with_values=True)
    log_sigma = 0.5 * torch.log(torch.tensor([8.0, 32.0]))
    got = gaussian_attention(x, log_sigma, values=values, causal=causal, impl="sdpa")
    want = gaussian_attention(
        x.double(), log_sigma.double(), values=values.double(), causal=causal, eps=0.0, impl="reference"
    )
    assert testing.error(got, want) <= torch.finfo(torch.bfloat16).eps


def test_full_attention_does_not_see_a_common_offset():
    """The budget is that of the centred features; own values would be large with the offset and hide the error."""
    x, log_sigma, values, _ = problem((1, 111, 2, 32), torch.float32, "+50", with_values=True)
    centred = x - x.mean(1, keepdim=True)
    centred_y, plain_y = (f(centred, log_sigma, values, eps=0.0).y for f in (testing.oracle, testing.plain))
    got, want = (
        gaussian_attention(x, log_sigma, values=values, impl="sdpa"),
        testing.oracle(x, log_sigma, values, eps=0.0).y,
    )
    floor = testing.output_floor(centred, log_sigma, values)
    assert testing.error(got, want) <= 2 * testing.error(plain_y, centred_y) + floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal,window", MASKS)
def test_constant_norm_through_the_normalisation(causal, window, dtype):
    """With heads normalised in front, dropping |x|^2 leaves outputs and gradients (with respect to the raw features)
    exact.
    """
    shape, mask = (2, 63, 2, 32), Mask(causal, window)
    arguments = x, log_sigma, _, grad_y = problem(shape, dtype, "normal")
    norm = partial(F.rms_norm, normalized_shape=shape[-1:])
    fast = partial(gaussian_attention, causal=causal, window=window, constant_norm=True, impl="sdpa")
    want = testing.oracle(*arguments, mask, eps=0.0, front=norm).named()
    for name, value in testing.run(fast, *arguments, front=norm).named().items():
        condition = testing.log_sigma_condition(x, log_sigma, None, grad_y, mask) if name == "dlog_sigma" else 1.0
        floor = 2 * torch.finfo(dtype).eps * (1 + shape[-1] / log_sigma.mul(2).exp().min().item())
        assert testing.error(value, want[name]) <= floor * condition, name


@pytest.mark.parametrize("causal,window", [(False, None), (True, None), (True, 20), (False, 9)])
@pytest.mark.parametrize("constant_norm", [False, True])
def test_flex_forward_on_cpu(causal, window, constant_norm):
    shape = (2, 63, 2, 32)
    x, log_sigma, values, _ = problem(shape, torch.float32, "unit_norm", with_values=True)
    mask = Mask(causal, window)
    want = testing.oracle(x, log_sigma, values, mask=mask, eps=0.0).y
    options = dict(causal=causal, window=window, constant_norm=constant_norm)
    got = gaussian_attention(x, log_sigma, values=values, impl="flex", **options)
    assert testing.error(got, want) <= testing.output_floor(x, log_sigma, values, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("causal,window", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", ["sdpa", "flex"])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda s: "x".join(map(str, s)))
def test_fast_paths_on_cuda(shape, impl, dtype, causal, window):
    check(impl, shape, dtype, causal=causal, window=window, with_values=True, device="cuda")


@pytest.mark.parametrize("impl", ["sdpa", "flex", "reference"])
@pytest.mark.parametrize("window", [None, 5])
def test_one_query_against_a_cache(impl, window):
    """Decoding: the last row of the full pass, from the last query and the whole cache."""
    assert select_impl(torch.zeros(1, 1, 2, 16), impl=impl) == impl
    x = testing.make_features("normal", (2, 40, 2, 16))
    log_sigma = sigmas(2, 16)
    full = gaussian_attention(x, log_sigma, causal=True, window=window, eps=0.0, impl=impl)
    last = gaussian_attention(x[:, -1:], log_sigma, keys=x, causal=True, window=window, impl=impl)
    torch.testing.assert_close(last, full[:, -1:], rtol=1e-5, atol=1e-6)


def test_dot_product_baseline_agrees_with_its_definition():
    q, k, v = (testing.make_features("normal", (2, 33, 2, 16), seed=s) for s in range(3))
    for causal, window in MASKS:
        visible = Mask(causal, window).dense(33, 33, q.device)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4.0
        want = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)
        for impl in ("sdpa", "flex"):
            torch.testing.assert_close(
                dot_product_attention(q, k, v, causal=causal, window=window, impl=impl), want, rtol=1e-5, atol=1e-5
            )


def test_float16_keeps_the_norms_that_do_not_fit_its_range():
    x = testing.make_features("normal", (1, 20, 1, 4), torch.float16) + 300
    log_sigma = torch.tensor([-0.3])
    assert (
        testing.error(gaussian_attention(x, log_sigma, impl="sdpa"), testing.oracle(x, log_sigma, None, x).y)
        <= torch.finfo(torch.float16).eps
    )


def test_an_outlier_first_token_does_not_hurt_the_others():
    """The usual attention sink: nothing may be measured relative to it."""
    x, log_sigma, _, grad_y = problem((1, 63, 2, 16), torch.float32, "normal")
    x[:, 0] *= 100
    want, plain = (f(x, log_sigma, None, grad_y, Mask(True), eps=0.0) for f in (testing.oracle, testing.plain))
    got = gaussian_attention(x, log_sigma, causal=True, impl="sdpa")
    floor = testing.exponent_ulp(x[:, 1:], log_sigma)
    assert testing.error(got[:, 1:], want.y[:, 1:]) <= 2 * testing.error(plain.y[:, 1:], want.y[:, 1:]) + floor


def test_eps_is_worth_at_most_its_own_size():
    x, log_sigma, _, _ = problem((1, 63, 2, 16), torch.float64, "normal")
    log_sigma = log_sigma.double()
    with_eps, without = (
        gaussian_attention(x, log_sigma, causal=True, eps=eps, impl="reference") for eps in (1e-6, 0.0)
    )
    assert 0 < testing.error(with_eps, without) <= 1e-6
