"""The Triton kernels against the float64 oracle: in Triton's interpreter on CPU tensors, or on the GPU where there is one.

The interpreter checks arithmetic and indices. What it cannot see (registers, shared memory, tensor cores) is test_triton_compile.py's; speed
and bfloat16, whose products the interpreter gets wrong, are test_triton_gpu.py's.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gka import GaussianKernelAttention, gaussian_attention, select_impl, testing
from gka.impl.triton.configs import TABLES, Config, generation, override
from gka.masking import Mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ("forward", "decode", "symmetric", "queries", "keys")
SHAPES = [(2, 1, 2, 16), (2, 63, 2, 32), (1, 111, 3, 24), (1, 197, 2, 64), (1, 130, 1, 96), (1, 161, 1, 128)]
MASKS = [(False, None), (True, None), (True, 20), (False, 9), (True, 500)]

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")


def tiles(rows, columns):
    """Every kernel with these tiles, whatever the table says."""
    sizes = itertools.product(KERNELS, (32, 64, 128), (2, 4))
    entries = {(kernel, *size): Config(16 if kernel == "decode" else rows, columns, 4, 2) for kernel, *size in sizes}
    return override(generation(torch.device(DEVICE)), entries=entries)


def sigmas(heads, dim):
    """sigma^2 around sqrt(D) to D, never a power of two."""
    return 0.5 * torch.log(torch.linspace(1.3 * math.sqrt(dim), 1.3 * dim, heads)).to(DEVICE)


def features(kind, shape, dtype=torch.float32, seed=0):
    return testing.make_features(kind, shape, dtype, seed).to(DEVICE)


def check(
    shape,
    dtype=torch.float32,
    kind="normal",
    causal=False,
    window=None,
    with_values=False,
    constant_norm=False,
    eps=1e-6,
):
    """Outputs and all gradients within the budget of `testing`, eps applied."""
    kind = "unit_norm" if constant_norm else kind
    x, grad_y, log_sigma, mask = (
        features(kind, shape, dtype),
        features("normal", shape, dtype, 2),
        sigmas(shape[2], shape[3]),
        Mask(causal, window),
    )
    values = features("normal", shape, dtype, 1) if with_values else None

    def fused(x, log_sigma, values):
        options = dict(causal=causal, window=window, constant_norm=constant_norm, eps=eps, impl="triton")
        return gaussian_attention(x, log_sigma, values=values, **options)

    want, plain = (f(x, log_sigma, values, grad_y, mask, eps) for f in (testing.oracle, testing.plain))
    got = testing.run(fused, x, log_sigma, values, grad_y)
    # Half precision keeps the exponent in float32, so its floor is the rounding of inputs and outputs alone; a norm that was rounded to be
    # constant is constant up to that rounding.
    half = dtype.itemsize == 2 and not constant_norm
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


@pytest.mark.parametrize("constant_norm", [False, True], ids=["general", "constant"])
@pytest.mark.parametrize("causal,window", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_float32(shape, causal, window, constant_norm):
    check(shape, causal=causal, window=window, constant_norm=constant_norm)


@pytest.mark.parametrize("constant_norm", [False, True], ids=["general", "constant"])
@pytest.mark.parametrize("causal,window", MASKS)
def test_separate_values(causal, window, constant_norm):
    check((2, 111, 2, 40), causal=causal, window=window, with_values=True, constant_norm=constant_norm)


@pytest.mark.parametrize("causal,window", MASKS[:3])
@pytest.mark.parametrize("kind", ["normal", "clusters"])
def test_float16(kind, causal, window):
    check((1, 100, 2, 64), torch.float16, kind, causal, window)


@pytest.mark.parametrize("length", [1, 16, 64, 65, 127, 130, 197, 256, 257])
def test_short_sequences_in_half_precision(length):
    """Up to 256 tokens one program serves a head; 257 go the general way."""
    check((1, length, 2, 64), torch.float16)
    if length < 100:
        check((2, length, 1, 40), torch.float16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["x10", "x50", "+50"])
def test_outlier_channels(kind, causal):
    check((1, 70, 2, 32), kind=kind, causal=causal)


def test_norms_from_a_kernel_of_their_own():
    for norms_first in (False, True):
        with override(generation(torch.device(DEVICE)), norms_first=norms_first):
            check((1, 300, 2, 16))
            check((1, 300, 1, 16), causal=True, with_values=True)


@settings(max_examples=12)
@given(
    st.integers(1, 90),
    st.booleans(),
    st.none() | st.integers(0, 95),
    st.sampled_from([16, 32]),
    st.sampled_from([16, 32]),
    st.booleans(),
)
def test_any_mask_with_any_tiles(length, causal, window, rows, columns, with_values):
    """Windows and diagonals that start, end and vanish inside, between and at the edges of tiles."""
    with tiles(rows, columns):
        check((1, length, 1, 16), causal=causal, window=window, with_values=with_values, constant_norm=length % 2 == 0)


@pytest.mark.parametrize("causal", [False, True])
def test_eps_is_exact(causal):
    """At an eps that matters: y shrinks by D / (D + eps), and gradients know it."""
    check((1, 50, 2, 32), causal=causal, eps=0.5)
    check((1, 50, 2, 32), causal=causal, eps=0.5, with_values=True)
    check((1, 50, 2, 64), torch.float16, causal=causal, eps=0.5)


@pytest.mark.parametrize("constant_norm", [False, True], ids=["general", "constant"])
@pytest.mark.parametrize("queries,keys,causal,window", [(1, 700, True, None), (1, 700, True, 300), (5, 600, True, 70), (16, 600, False, None),
                                                        (3, 40, True, None), (40, 90, True, 20), (40, 90, False, None)])  # fmt: skip
def test_foreign_keys(queries, keys, causal, window, constant_norm):
    """Decoding: few queries split the keys over programs. Far from every key, where all affinities underflow, too."""
    kind = "unit_norm" if constant_norm else "normal"
    x, k, v = (features(kind, (2, n, 2, 32), seed=n) for n in (queries, keys, keys))
    x = x if constant_norm else x + 30
    log_sigma = torch.tensor([-1.0, 1.1], device=DEVICE)
    for values in (None, v):
        options = dict(causal=causal, window=window)
        got = gaussian_attention(
            x, log_sigma, keys=k, values=values, constant_norm=constant_norm, impl="triton", **options
        )
        doubles = [None if t is None else t.double() for t in (k, values)]
        want = gaussian_attention(
            x.double(), log_sigma.double(), keys=doubles[0], values=doubles[1], impl="reference", **options
        )
        floor = testing.exponent_ulp(torch.cat([x, k], 1), log_sigma)
        assert testing.error(got, want) <= floor


@pytest.mark.parametrize("causal,window", [(True, None), (True, 30), (False, None)])
@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("num_queries,num_keys", [(50, 90), (3, 700)], ids=["many", "split"])
def test_gradients_of_foreign_keys(num_queries, num_keys, causal, window, with_values):
    """As head offsets train. The constant norm is that of a normalisation in front, through which the gradients go."""

    def gradients(dtype, **options):
        raw = [
            features("normal", (2, n, 2, 32), seed=n).to(dtype).requires_grad_()
            for n in (num_queries, num_keys, num_keys + 1)
        ]
        log_sigma = sigmas(2, 32).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        x, keys = (nn.functional.rms_norm(t, (32,)) for t in raw[:2])
        values = raw[2][:, :num_keys] if with_values else None
        y = gaussian_attention(x, log_sigma, keys=keys, values=values, causal=causal, window=window, **options)
        y.backward(features("normal", y.shape, seed=4).to(dtype))
        return [t.grad for t in (*raw[: 3 if with_values else 2], log_sigma)]

    for got, want in zip(
        gradients(torch.float32, constant_norm=True, impl="triton"),
        gradients(torch.float64, impl="reference"),
        strict=True,
    ):
        assert testing.error(got, want) <= 100 * torch.finfo(torch.float32).eps


def variants():
    """Features whose memory is not (B, T, H, D) in order: a slice of wider tokens, heads first, every other token, channels apart."""
    shape = (2, 37, 2, 32)
    wide = torch.full((2, 37, 3, 32), float("nan"), device=DEVICE)
    heads_first = torch.empty(2, 2, 37, 32, device=DEVICE)
    tokens = torch.full((2, 80, 2, 32), float("nan"), device=DEVICE)
    channels = torch.full((2, 37, 2, 64), float("nan"), device=DEVICE)
    for view in (wide[:, :, 1:], heads_first.transpose(1, 2), tokens[:, 1:75:2], channels[..., ::2]):
        yield view.copy_(features("normal", shape))


@pytest.mark.parametrize("causal", [False, True])
def test_strided_features_among_nans(causal):
    """No copy is needed, and nothing outside the features is read: NaN lies around them."""
    log_sigma, grad_y = sigmas(2, 32), features("normal", (2, 37, 2, 32), seed=2)

    def run(x, values=None):
        x = x.detach().requires_grad_()
        y = gaussian_attention(x, log_sigma, values=values, causal=causal, impl="triton")
        return y, *torch.autograd.grad(y, x, grad_y)

    want = run(features("normal", (2, 37, 2, 32)))
    for x in variants():
        for got, expected in zip(run(x), want, strict=True):
            assert torch.equal(got, expected)
    x = features("normal", (2, 37, 2, 32), seed=3)

    def with_values(values):
        values = values.detach().requires_grad_()
        leaf = x.clone().requires_grad_()
        y = gaussian_attention(leaf, log_sigma, values=values, causal=causal, impl="triton")
        return y, *torch.autograd.grad(y, (leaf, values), grad_y)

    want = with_values(features("normal", (2, 37, 2, 32)))
    for values in variants():
        for got, expected in zip(with_values(values), want, strict=True):
            assert torch.equal(got, expected)


def test_a_gradient_without_strides():
    x, log_sigma = features("normal", (2, 37, 2, 32)).requires_grad_(), sigmas(2, 32)
    y = gaussian_attention(x, log_sigma, impl="triton")
    assert torch.equal(
        *(
            torch.autograd.grad(y, x, g, retain_graph=True)[0]
            for g in (torch.ones(()).to(y).expand_as(y), torch.ones_like(y))
        )
    )


def test_bandwidths_anywhere_in_memory():
    """One value for all heads, or a column of a table."""
    x = features("normal", (1, 20, 3, 16))
    for log_sigma in (
        torch.tensor(0.7, device=DEVICE).expand(3),
        torch.linspace(0, 1, 6, device=DEVICE).view(3, 2)[:, 1],
    ):
        results = []
        for each in (log_sigma, log_sigma.clone(memory_format=torch.contiguous_format)):
            each = each.detach().requires_grad_()
            y = gaussian_attention(x, each, impl="triton")
            results.append((y, *torch.autograd.grad(y.square().sum(), each)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_is_not_hidden(causal, with_values):
    """A NaN token reaches every row that sees it, a NaN bandwidth its whole head: the loss must show it."""
    x, log_sigma = features("normal", (1, 40, 2, 16)), sigmas(2, 16)
    values = features("normal", (1, 40, 2, 16), seed=1) if with_values else None
    x[0, 7, 0] = float("nan")
    y = gaussian_attention(x, log_sigma, values=values, causal=causal, impl="triton")
    rows = y[0].isnan().any(-1)
    assert rows[7:, 0].all() and (causal or rows[:, 0].all()) and not rows[:, 1].any()
    if DEVICE == "cuda":  # on CPU the door refuses it
        log_sigma[1] = float("nan")
        assert gaussian_attention(x, log_sigma, impl="triton")[:, :, 1].isnan().all()


def poison(monkeypatch):
    """Fill what the operators allocate with NaN: every element must be written."""
    for module, name in ((torch, "empty_like"), (torch.Tensor, "new_empty")):
        allocate = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, allocate=allocate, **kwargs: allocate(*args, **kwargs).fill_(float("nan"))
        )


@pytest.mark.parametrize("causal,window", MASKS[:4])
def test_nothing_is_left_unwritten(monkeypatch, causal, window):
    poison(monkeypatch)
    with tiles(32, 16):
        check((1, 45, 2, 24), causal=causal, window=window)
        check((1, 45, 2, 24), causal=causal, window=window, with_values=True)
    check((1, 70, 2, 64), torch.float16, causal=causal, window=window)
    k = features("normal", (1, 600, 2, 32))
    y = gaussian_attention(k[:, -2:], sigmas(2, 32), keys=k, causal=True, window=window, impl="triton")
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("with_values", [False, True])
def test_repeated_runs_are_equal_to_the_bit(with_values):
    shape = (2, 70, 2, 32)
    arguments = (
        features("normal", shape),
        sigmas(2, 32),
        features("normal", shape, seed=1) if with_values else None,
        features("normal", shape, seed=2),
    )
    first, second = (
        testing.run(lambda x, s, v: gaussian_attention(x, s, values=v, causal=with_values, impl="triton"), *arguments)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.named(), second.named(), strict=True))


def test_a_clamped_bandwidth_learns_nothing():
    x, log_sigma = features("normal", (1, 20, 3, 16)), torch.tensor([-21.0, 0.5, 30.0], device=DEVICE)
    got = testing.run(lambda x, s, v: gaussian_attention(x, s, impl="triton"), x, log_sigma, None, x)
    want = testing.oracle(x, log_sigma, None, x)
    assert got.dlog_sigma[[0, 2]].tolist() == [0, 0] and want.dlog_sigma[[0, 2]].tolist() == [0, 0]
    torch.testing.assert_close(got.y.double(), want.y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype,causal,with_values", [(torch.float32, False, False), (torch.float32, True, True), (torch.float16, False, False),
                                                      (torch.float16, True, False)])  # fmt: skip
def test_bandwidths_too_small_for_float32(dtype, causal, with_values):
    """|x|^2 / sigma^2 around 1e9: rounding loses K_ii = 1, and rows come back as what they are in the limit; gradients stay finite."""
    x, log_sigma = features("normal", (1, 100, 2, 64), dtype), torch.full((2,), -8.5, device=DEVICE)
    values = features("normal", (1, 100, 2, 64), dtype, 1) if with_values else None
    got = testing.run(
        lambda x, s, v: gaussian_attention(x, s, values=v, causal=causal, impl="triton"), x, log_sigma, values, x
    )
    torch.testing.assert_close(got.y, x if values is None else values, rtol=2e-3, atol=1e-5)
    assert all(torch.isfinite(t).all() for _, t in got.named())
    # Where W is known to float32's last digits no longer, it is still no more than 1.
    assert got.dx.abs().max() <= 4 * x.abs().max() / math.exp(-17) and (
        values is None or got.dvalues.norm() <= 1.01 * x.norm()
    )


def test_devices_with_little_shared_memory_get_the_small_tiles(monkeypatch):
    expected = {
        (8, 0): "sm_80",
        (8, 6): "sm_120",
        (8, 9): "sm_120",
        (9, 0): "sm_90",
        (10, 0): "sm_90",
        (12, 0): "sm_120",
    }
    for capability, name in expected.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert generation.__wrapped__(torch.device("cuda")) == name
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match=r"compute capability 8\.0 or newer, cuda has 7\.5; use impl='sdpa'"):
        generation.__wrapped__(torch.device("cuda"))


CALLS = {
    "full": lambda x: (x, None, None, sigmas(2, 32), -1, -1, False, 1e-6),
    "causal": lambda x: (x, None, None, sigmas(2, 32).requires_grad_(), -1, 0, True, 1e-6),
    "window, values": lambda x: (x, None, torch.randn_like(x).requires_grad_(), sigmas(2, 32), 5, 0, True, 1e-6),
    "foreign": lambda x: (x, torch.randn_like(x).requires_grad_(), None, sigmas(2, 32), -1, 0, True, 0.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_operator_is_a_proper_one(call):
    """Schema, fake tensors, autograd registration, dynamic shapes: torch's own check."""
    torch.library.opcheck(
        torch.ops.gka.attend.default, CALLS[call](features("normal", (1, 20, 2, 32)).requires_grad_())
    )


@pytest.mark.parametrize("constant_norm", [False, True])
def test_compiles_without_graph_breaks(constant_norm):
    layer = GaussianKernelAttention(64, 2, causal=True, head_norm=constant_norm, impl="triton").to(DEVICE)
    x = torch.randn(2, 24, 64, device=DEVICE, requires_grad=True)
    want = torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))
    got = torch.autograd.grad(
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x).square().sum(), (x, *layer.parameters())
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_works_under_activation_checkpointing_and_autocast():
    layer = GaussianKernelAttention(64, 2, impl="triton").to(DEVICE)
    x = torch.randn(2, 24, 64, device=DEVICE, requires_grad=True)
    want = torch.autograd.grad(layer(x).square().sum(), (x, layer.log_sigma))
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.square().sum(), (x, layer.log_sigma)), want, strict=True):
        assert torch.equal(a, b)
    with torch.autocast(DEVICE, torch.float16):
        y = layer(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), layer(x), rtol=1e-2, atol=1e-2)


def test_second_derivatives_are_refused():
    x = features("normal", (1, 10, 2, 16)).requires_grad_()
    y = gaussian_attention(x, sigmas(2, 16), impl="triton")
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match='impl="triton" has no second derivatives; use impl="reference"'):
        gradient.sum().backward()


def test_what_it_cannot_serve_is_said():
    x, log_sigma = torch.zeros(1, 4, 2, 16, device=DEVICE), torch.zeros(2, device=DEVICE)
    with pytest.raises(ValueError, match="the Triton kernels take float32, bfloat16 and float16, got torch"):
        gaussian_attention(x.double(), log_sigma.double(), impl="triton")
    with pytest.raises(ValueError, match="head_dim <= 128, got 136"):
        gaussian_attention(torch.zeros(1, 4, 2, 136, device=DEVICE), log_sigma, impl="triton")
    with pytest.raises(ValueError, match="gradients for foreign keys only with constant_norm"):
        gaussian_attention(x.requires_grad_(), log_sigma, keys=x.detach().clone(), impl="triton")
    assert select_impl(x, impl="triton") == "triton"
    assert select_impl(x) == ("triton" if DEVICE == "cuda" else "sdpa")


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is there")
def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="the Triton kernels run on NVIDIA GPUs, got cpu"):
        gaussian_attention(torch.zeros(1, 4, 2, 16), torch.zeros(2), impl="triton")


def test_every_table_has_every_entry():
    """But for symmetric's, which queries and keys stand in for."""
    for name, table in TABLES.items():
        needed = set(itertools.product(set(KERNELS) - {"symmetric"}, (32, 64, 128), (2, 4)))
        assert needed <= set(table.entries), name
        for key, config in table.entries.items():
            assert (
                all(n >= 16 and n & (n - 1) == 0 for n in config[:2])
                and config.warps in (1, 2, 4, 8)
                and config.stages >= 1
            ), key
