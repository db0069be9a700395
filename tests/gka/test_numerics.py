"""Every fast path against the float64 oracle: outputs and all gradients, odd sizes, masks, sigma^2 not a power of two."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gka import dot_product_attention, gaussian_attention, testing
from gka.impl import flex
from gka.masking import Mask

SHAPES = [(2, 1, 2, 16), (1, 63, 2, 32), (2, 111, 3, 24), (1, 197, 1, 64), (1, 129, 2, 1)]
MASKS = [(False, None), (True, None), (True, 20), (False, 9), (True, 500)]


def sigmas(heads, dim):
    """sigma^2 around sqrt(D) to D, never a power of two."""
    return 0.5 * torch.log(torch.linspace(1.3 * math.sqrt(dim), 1.3 * dim, heads))


def problem(shape, dtype, kind, with_values=False, device="cpu"):
    x = testing.make_features(kind, shape, dtype)
    values = testing.make_features("normal", shape, dtype, 1) if with_values else None
    grad_y = testing.make_features("normal", shape, dtype, 2)
    tensors = x, sigmas(shape[2], shape[3]), values, grad_y
    return tuple(t if t is None else t.to(device) for t in tensors)


def check(shape, dtype, kind, causal, window, with_values, impl, device="cpu"):
    x, log_sigma, values, grad_y = problem(shape, dtype, kind, with_values, device)
    mask = Mask(causal, window)

    def fast(x, log_sigma, values):
        return gaussian_attention(x, log_sigma, values=values, causal=causal, window=window, impl=impl)

    # The fast paths are the kernel with eps = 0; what eps is worth is tested on its own.
    want, plain = (f(x, log_sigma, values, grad_y, mask, eps=0.0) for f in (testing.oracle, testing.plain))
    got = testing.run(fast, x, log_sigma, values, grad_y)
    # Half-precision paths keep the exponent in float32, so their floor is the rounding of inputs and outputs alone.
    half = dtype.itemsize == 2
    floor = torch.finfo(dtype).eps if half else testing.exponent_ulp(x, log_sigma)
    y_floor = floor if half else testing.output_floor(x, log_sigma, values, mask)
    for name, value in got.named():
        assert value.dtype == (torch.float32 if name == "dlog_sigma" else dtype)
        reference = getattr(want, name)
        if reference.norm() == 0:  # one token: nothing to learn about sigma
            assert value.abs().max() <= 1e-5
            continue
        condition = testing.log_sigma_condition(x, log_sigma, values, grad_y, mask) if name == "dlog_sigma" else 1.0
        condition = 3.0 if name == "dx" else condition  # x enters as query, as key and as norm: three roundings
        limit = testing.budget(plain, want, name, y_floor if name == "y" else floor * condition)
        assert testing.error(value, reference) <= limit, (
            f"{name}: error {testing.error(value, reference):.1e}, budget {limit:.1e}"
        )


@pytest.mark.parametrize("causal,window", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_sdpa_float32(shape, causal, window):
    check(shape, torch.float32, "normal", causal, window, False, "sdpa")
    check(shape, torch.float32, "normal", causal, window, True, "sdpa")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["normal", "clusters"])
def test_sdpa_half_precision(kind, dtype, causal):
    check((2, 63, 2, 32), dtype, kind, causal, None, False, "sdpa")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["clusters", "x10", "x50", "+50"])
def test_sdpa_outlier_channels(kind, causal):
    check((1, 111, 2, 32), torch.float32, kind, causal, None, False, "sdpa")


def norm(t) -> float:
    return t.double().norm().item()


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sigma", [1e-3, 0.1, 1.0, 8**0.5, 8.0])
@pytest.mark.parametrize("offset", [0, 10, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:gaussian_attention. the features are so long")
def test_sdpa_is_as_accurate_as_plain_pytorch(dtype, offset, sigma, causal, with_values):
    """Any bandwidth, any common offset: y and all gradients, also where the true gradient is 0. Floors are absolute, in norm, term by term."""
    shape, mask = (2, 57, 2, 32), Mask(causal)
    x = testing.make_features(f"all+{offset}", shape, dtype)
    values = testing.make_features("normal", shape, dtype, 1) if with_values else None
    grad_y = testing.make_features("normal", shape, dtype, 2)
    log_sigma = torch.tensor([sigma, 1.3 * sigma]).log()
    want, plain = (f(x, log_sigma, values, grad_y, mask, eps=0.0) for f in (testing.oracle, testing.plain))
    floors = testing.floors(x, log_sigma, values, grad_y, mask)

    def fast(x, log_sigma, values, impl="sdpa"):
        return gaussian_attention(x, log_sigma, values=values, causal=causal, impl=impl)

    for name, value in testing.run(fast, x, log_sigma, values, grad_y).named():
        exact = getattr(want, name)
        by_plain = norm(getattr(plain, name).double() - exact)  # NaN where plain PyTorch is lost
        limit = floors[name] + (2 * by_plain if math.isfinite(by_plain) else 0.0)
        assert norm(value.double() - exact) <= limit, (
            f"{name}: error {norm(value.double() - exact):.1e}, limit {limit:.1e}, size {norm(exact):.1e}"
        )
    flex_y = fast(x, log_sigma, values, impl="flex")  # its backward pass runs on CUDA alone
    assert norm(flex_y.double() - want.y) <= floors["y"]


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


def warned(*, log_sigma=0.0, offset=0.0, dtype=torch.float32, impl="sdpa", causal=True, times=1):
    """Messages of so many calls at one line, by Python's own rule."""
    x = torch.randn(1, 20, 2, 16, dtype=dtype) + offset
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(times):
            gaussian_attention(x, torch.full((2,), log_sigma), causal=causal, impl=impl)
    ours = [w for w in caught if str(w.message).startswith("gaussian_attention")]
    return [str(w.message) for w in ours], [w.filename for w in ours]


@pytest.mark.parametrize("impl", ["sdpa", "flex"])
def test_features_that_float32_cannot_resolve_are_warned_of_once(impl):
    for lost in (dict(log_sigma=math.log(1e-3)), dict(offset=300.0), dict(offset=300.0, dtype=torch.bfloat16)):
        messages, files = warned(impl=impl, times=3, **lost)
        assert len(messages) == 1
        assert all(word in messages[0] for word in ("normalise the heads", "float64", "impl='reference'"))
        assert files == [__file__]  # the warning names the caller's line, not ours
    for fine in (
        dict(),
        dict(log_sigma=math.log(0.1)),
        dict(offset=10.0),
        dict(offset=300.0, causal=False),
        dict(offset=10.0, dtype=torch.bfloat16),
    ):
        assert warned(impl=impl, **fine) == ([], [])
    assert warned(offset=300.0, dtype=torch.float64) == warned(offset=300.0, impl="reference") == ([], [])


def test_the_warning_is_where_the_floor_reaches_the_coarsest_epsilon():
    x, size = torch.zeros(1, 3, 1, 1), torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps - 1
    x[0, 0] = 1.0
    for largest, expected in ((0.99 * size, 0), (1.01 * size, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gaussian_attention(x, torch.tensor([-0.5 * math.log(largest)]), causal=True, impl="sdpa")
        assert len(caught) == expected


def test_values_are_not_read_where_that_would_stall_or_break_a_graph():
    x, log_sigma = torch.full((1, 20, 2, 16), 300.0), torch.zeros(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gaussian_attention")
        gaussian_attention(x.to("meta"), log_sigma.to("meta"), causal=True, impl="sdpa")
        torch.func.vmap(lambda x: gaussian_attention(x, log_sigma, causal=True, impl="sdpa"))(x[None])
        torch.func.vmap(lambda keys: gaussian_attention(x, log_sigma, keys=keys, causal=True, impl="sdpa"))(x[None])
    compiled = torch.compile(
        lambda x: gaussian_attention(x, log_sigma, causal=True, impl="sdpa"), fullgraph=True, backend="aot_eager"
    )
    assert compiled(x).isfinite().all()


class Crossings(TorchDispatchMode):
    """Counts what comes from the CPU: there such a copy waits for the GPU, and a CUDA graph cannot hold it."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_nothing_comes_from_the_cpu(causal):
    """By torch's fake tensors, which need no GPU."""
    with FakeTensorMode(), Crossings() as crossings:
        x, log_sigma = torch.empty(1, 20, 2, 16, device="cuda"), torch.zeros(2, device="cuda")
        gaussian_attention(x, log_sigma, causal=causal, impl="sdpa")
    assert crossings.count == 0


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
    """The budget is that of the centred features; foreign values, as own ones are large with the offset and hide the error."""
    x, log_sigma, values, grad_y = problem((1, 111, 2, 32), torch.float32, "+50", with_values=True)
    centred = x - x.mean(1, keepdim=True)
    want, plain = (f(centred, log_sigma, values, grad_y, eps=0.0) for f in (testing.oracle, testing.plain))
    got = gaussian_attention(x, log_sigma, values=values, impl="sdpa")
    exact = testing.oracle(x, log_sigma, values, grad_y, eps=0.0).y
    assert testing.error(got, exact) <= testing.budget(
        plain, want, "y", testing.output_floor(centred, log_sigma, values)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal,window", MASKS)
def test_constant_norm_through_the_normalisation(causal, window, dtype):
    """With heads normalised in front, dropping |x|^2 leaves outputs and gradients (with respect to the raw features) exact."""
    shape, mask = (2, 63, 2, 32), Mask(causal, window)
    x, log_sigma, _, grad_y = problem(shape, dtype, "normal")

    def through_norm(function, dtype):
        return lambda x, log_sigma, values: function(F.rms_norm(x.to(dtype), (shape[-1],)), log_sigma)

    fast = through_norm(
        lambda z, s: gaussian_attention(z, s, causal=causal, window=window, constant_norm=True, impl="sdpa"), dtype
    )
    literal = through_norm(
        lambda z, s: gaussian_attention(z, s, causal=causal, window=window, eps=0.0, impl="reference"), torch.float64
    )
    want = testing.run(literal, x.double(), log_sigma.double(), None, grad_y.double())
    got = testing.run(fast, x, log_sigma, None, grad_y)
    for name, value in got.named():
        condition = testing.log_sigma_condition(x, log_sigma, None, grad_y, mask) if name == "dlog_sigma" else 1.0
        floor = 2 * torch.finfo(dtype).eps * (1 + shape[-1] / log_sigma.mul(2).exp().min().item())
        assert testing.error(value, getattr(want, name)) <= floor * condition, name


@pytest.mark.parametrize("causal,window", [(False, None), (True, None), (True, 20), (False, 9)])
@pytest.mark.parametrize("constant_norm", [False, True])
def test_flex_forward_on_cpu(causal, window, constant_norm):
    shape = (2, 63, 2, 32)
    x, log_sigma, values, grad_y = problem(shape, torch.float32, "unit_norm", with_values=True)
    want = testing.oracle(x, log_sigma, values, grad_y, Mask(causal, window), eps=0.0)
    got = gaussian_attention(
        x, log_sigma, values=values, causal=causal, window=window, constant_norm=constant_norm, impl="flex"
    )
    assert testing.error(got, want.y) <= testing.output_floor(x, log_sigma, values, Mask(causal, window))


@pytest.mark.gpu
@pytest.mark.parametrize("causal,window", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", ["sdpa", "flex"])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda s: "x".join(map(str, s)))
def test_fast_paths_on_cuda(shape, impl, dtype, causal, window):
    check(shape, dtype, "normal", causal, window, True, impl, device="cuda")


@pytest.mark.gpu
def test_flex_compiles_once_for_lengths_that_fill_the_same_tiles_on_cuda():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in range(100, 106):
        check((1, length, 2, 32), torch.float32, "normal", True, None, True, "flex", device="cuda")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_flex_compiles_once_for_lengths_that_fill_the_same_tiles(monkeypatch):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(flex, "flex_attention", torch.compile(flex.flex_attention, backend=counter, dynamic=False))
    for length in range(100, 106):
        x = testing.make_features("normal", (1, length, 2, 32))
        gaussian_attention(x, sigmas(2, 32), causal=True, window=20, impl="flex")
    assert counter.frame_count == 1


def test_flex_masks_first_used_in_inference_mode_can_be_saved_for_training():
    flex._block_mask.cache_clear()
    with torch.inference_mode():
        gaussian_attention(testing.make_features("normal", (1, 30, 2, 16)), sigmas(2, 16), causal=True, impl="flex")
    block_mask = flex._block_mask(Mask(True), 30, 30, torch.device("cpu"))
    assert flex._block_mask.cache_info().hits == 1
    captured = [cell.cell_contents for cell in block_mask.mask_mod.__closure__]
    tensors = [block_mask.kv_indices, block_mask.q_indices, *(c for c in captured if isinstance(c, torch.Tensor))]
    assert not any(t.is_inference() for t in tensors)


@pytest.mark.parametrize("impl", ["sdpa", "flex", "reference"])
@pytest.mark.parametrize("window", [None, 5])
def test_one_query_against_a_cache(impl, window):
    """Decoding: the last row of the full pass, from the last query and the whole cache."""
    if impl == "flex":
        assert flex.unavailable(torch.zeros(1, 1, 2, 16), needs_grad=False) is None
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


def test_autocast_takes_its_dtype_and_keeps_the_float32_norms():
    x, log_sigma, _, _ = problem((2, 63, 2, 32), torch.float32, "x10")
    with torch.autocast("cpu", torch.bfloat16):
        got = gaussian_attention(x, log_sigma, impl="sdpa")
    assert got.dtype == torch.bfloat16
    want = gaussian_attention(x.bfloat16().double(), log_sigma.double(), impl="reference")
    assert testing.error(got, want) <= 2 * torch.finfo(torch.bfloat16).eps


def test_autocast_accepts_mixed_dtypes():
    """As a normalisation that stays float32 in front of keys and queries leaves them, beside bfloat16 values."""
    x, log_sigma, values, _ = problem((2, 21, 2, 16), torch.float32, "normal", with_values=True)
    mixed = dict(values=values.bfloat16(), causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        got, baseline = gaussian_attention(x, log_sigma, **mixed), dot_product_attention(x, x, values.bfloat16())
    assert torch.equal(got, gaussian_attention(x.bfloat16(), log_sigma, **mixed))
    assert torch.equal(baseline, dot_product_attention(x.bfloat16(), x.bfloat16(), values.bfloat16()))
    with pytest.raises(TypeError, match="values must have the dtype of the queries"):
        gaussian_attention(x, log_sigma, **mixed)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="values must be a floating tensor"):
        gaussian_attention(x, log_sigma, values=values.long())


@pytest.mark.parametrize("impl", ["sdpa", "flex"])
def test_the_baseline_compiles_without_graph_breaks(impl):
    q = testing.make_features("normal", (1, 24, 2, 16))
    compiled = torch.compile(
        lambda q: dot_product_attention(q, q, q, causal=True, window=7, impl=impl), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(q), dot_product_attention(q, q, q, causal=True, window=7, impl=impl))


@pytest.mark.parametrize("impl", ["sdpa", "flex"])
@pytest.mark.parametrize("constant_norm", [False, True])
def test_compiles_without_graph_breaks(constant_norm, impl):
    x, log_sigma = testing.make_features("normal", (1, 24, 2, 16)), torch.zeros(2)

    def function(x, log_sigma):
        return gaussian_attention(x, log_sigma, causal=True, window=7, constant_norm=constant_norm, impl=impl)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, log_sigma), function(x, log_sigma))


@pytest.mark.parametrize("impl", ["sdpa", "triton"])
def test_compiles_with_dynamic_shapes(impl):
    log_sigma = torch.zeros(2)

    def function(x):
        return gaussian_attention(x, log_sigma, causal=True, impl=impl)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 24, 37):
        x = testing.make_features("normal", (1, length, 2, 16))
        torch.testing.assert_close(compiled(x), function(x))
