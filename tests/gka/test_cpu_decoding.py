"""Decoding from a cache: within the error of float64, for ragged rows, derived keys, delays, windows, any stride."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from gka import decode_attention, gaussian_attention
from gka.impl.cpu import build, decoding
from gka.impl.cpu.decoding import DTYPES
from gka.testing import make_features, make_log_sigma
from operator_cases import FUSED

needs_kernel = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
EPS = torch.finfo(torch.float32).eps


def draw(num_queries, num_keys, heads=2, head_dim=16, batch=2, dtype=torch.float32):
    """Queries, bandwidths, and a cache in a view of a larger tensor whose rest is NaN."""
    x = make_features("unit_norm", (batch, num_queries, heads, head_dim), seed=0).to(dtype)
    larger = torch.full((batch + 1, num_keys + 5, heads + 1, head_dim), float("nan"), dtype=dtype)
    cache = larger[:batch, 2 : num_keys + 2, 1:]
    cache.copy_(make_features("unit_norm", (batch, num_keys, heads, head_dim), seed=1))
    return x, make_log_sigma(heads, head_dim), cache


def tables(length, head_dim, dtype=torch.bfloat16):
    """Tables whose squares do not add up to 1 exactly, as those of a model."""
    angles = torch.outer(torch.arange(length), 10000.0 ** -torch.linspace(0, 1, head_dim // 2))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def scales(cache):
    """What the channels of a cache's values are multiplied with before they are turned."""
    return torch.linspace(-1, 1, cache.shape[2] * cache.shape[3]).exp().view(cache.shape[2:])


def expected(
    x, log_sigma, values, keys=None, rotary=None, channel_scales=1.0, lengths=None, window=None, key_delays=(),
    value_delays=()
):  # fmt: skip
    """(y by the definition in float64, token by token of what is visible; how far float32 may be from it, as a norm).

    As `testing.output_floor`: exponents are known to EPS times r_j = (|x| |k_j| + |k_j|^2 / 2) / sigma^2, which moves y
    by sum_j W_j r_j |v_j - y|. Derived keys take eight roundings of half an EPS (a scale, two products and their sum,
    a mean, a sum, a root and a quotient), each of them worth |x - k_j| |k_j| / sigma^2. Rounding errors of a sum of n
    terms grow as the root of n.
    """
    y, limits = torch.empty(x.shape, dtype=torch.float64), torch.empty(x.shape[:3], dtype=torch.float64)
    x, values = x.double(), values.double()
    keys = values if keys is None else keys.double()
    if rotary is not None:
        cos, sin = (table[: values.shape[1], None].double() for table in rotary)
        a, b = (values * channel_scales).chunk(2, -1)
        turned = torch.cat([a * cos + b * sin, b * cos - a * sin], -1)
        keys = turned / (turned.square().mean(-1, keepdim=True) + EPS).sqrt()
    for row, i, h in product(*map(range, x.shape[:3])):
        place = (values.shape[1] if lengths is None else lengths[row]) - x.shape[1] + i
        seen = torch.arange(0 if window is None else max(0, place - window), place + 1)
        late_key, late_value = (delays[h] if delays else 0 for delays in (key_delays, value_delays))
        k, v = keys[row, (seen - late_key).clamp(min=0), h], values[row, (seen - late_value).clamp(min=0), h]
        apart, inverse = (x[row, i, h] - k).norm(dim=-1), (-2 * log_sigma[h].double()).exp()
        weights = (-0.5 * inverse * apart.square()).softmax(0)
        y[row, i, h] = mean = weights @ v
        norms = k.norm(dim=-1)
        r = inverse * norms * (x[row, i, h].norm() + norms / 2 + (0 if rotary is None else 4 * apart))
        moved = (weights * r * (v - mean).norm(dim=-1)).sum()
        limits[row, i, h] = EPS * (mean.norm() + moved + len(seen) ** 0.5 * (weights * v.norm(dim=-1)).sum())
    return y, limits


def check(x, log_sigma, cache, impl="auto", **options):
    """Within that limit; bfloat16 is rounded once more, by half a unit of its last place."""
    want, limits = expected(x, log_sigma, cache, **options)
    got = decode_attention(x, log_sigma, cache, impl=impl, **options)
    assert got.dtype == x.dtype
    rounding = 0.0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps / 2 * want.norm(dim=-1)
    assert ((got - want).norm(dim=-1) <= limits + rounding).all()


SIZES = [(1, 1, 8), (1, 33, 20), (2, 30, 2), (5, 150, 64), (16, 77, 128), (3, 16, 80), (1, 40, 36)]
FORMS = {
    "values": lambda cache: {},
    "derived": lambda cache: dict(rotary=tables(cache.shape[1] + 3, cache.shape[3])),
    "derived by float32 tables": lambda cache: dict(rotary=tables(cache.shape[1], cache.shape[3], torch.float32)),
    "derived and scaled": lambda cache: dict(
        rotary=tables(cache.shape[1], cache.shape[3]), channel_scales=scales(cache)
    ),
    "keys": lambda cache: dict(keys=cache.flip(1)),
}


@pytest.mark.parametrize("impl", ["reference", *FUSED["cpu"]])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_window_and_length_is_exact(form, impl):
    late = dict(key_delays=(0, 1), value_delays=(3, 0))
    for (num_queries, num_keys, head_dim), dtype in product(SIZES, DTYPES if impl == "cpu" else DTYPES[:1]):
        x, log_sigma, cache = draw(num_queries, num_keys, head_dim=head_dim, dtype=dtype)
        options, ragged = dict(FORMS[form](cache), impl=impl), [max(num_queries, num_keys // 3), num_keys]
        check(x, log_sigma, cache, **options)
        check(x, log_sigma, cache, window=9, lengths=ragged, **options)
        check(x, log_sigma, cache, lengths=ragged, **late, **options)
        check(x, log_sigma, cache, window=0, **late, **options)


@needs_kernel
def test_the_norm_of_derived_keys_has_the_norms_own_eps():
    """Values so short that the eps of F.rms_norm decides, and zeros."""
    x, log_sigma, cache = draw(1, 40)
    for scale in (1e-4, 0.0):
        values = cache * scale
        values[0, 3] = cache[0, 3]
        check(x, log_sigma, values, rotary=tables(40, 16))


@needs_kernel
@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_threads_is_exact_and_equal_to_the_bit(threads, count):
    threads(count)
    for batch, num_keys, lengths in [(1, 500, None), (3, 200, [200, 7, 90]), (7, 33, None)]:
        x, log_sigma, cache = draw(2, num_keys, batch=batch)
        options = dict(lengths=lengths, rotary=tables(num_keys, 16))
        check(x, log_sigma, cache, **options)
        assert torch.equal(*(decode_attention(x, log_sigma, cache, **options) for _ in range(2)))


@needs_kernel
def test_a_row_does_not_depend_on_the_others_or_on_what_is_behind_its_end():
    x, log_sigma, cache = draw(1, 60, batch=3)
    lengths = [60, 11, 34]
    want = decode_attention(x, log_sigma, cache, lengths=lengths)
    for row, length in enumerate(lengths):
        cache[row, length:] = float("nan")
        alone = decode_attention(x[row : row + 1], log_sigma, cache[row : row + 1, :length])
        torch.testing.assert_close(want[row : row + 1], alone, rtol=0, atol=1e-6)
    assert torch.equal(decode_attention(x, log_sigma, cache, lengths=lengths), want)


@needs_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["values", "derived"])
def test_nan_and_infinity_show_where_they_are_seen_and_nowhere_else(form, bad):
    x, log_sigma, cache = draw(3, 50)
    cache[1, 48, 1, 3] = bad  # the second of three queries
    y = decode_attention(x, log_sigma, cache, **FORMS[form](cache))
    assert y[1, 1:, 1].isnan().any(-1).all() and y[1, 0].isfinite().all()
    assert y[0].isfinite().all() and y[:, :, 0].isfinite().all()
    x[0, 0, 0, 0] = bad
    assert decode_attention(x, log_sigma, cache)[0, 0, 0].isnan().any()


def test_far_keys_and_narrow_kernels_stay_finite():
    x, _, cache = draw(1, 70)
    for shift, sigma in [(1e3, -3.0), (0.0, -20.0), (0.0, 20.0)]:
        y = decode_attention(x, torch.full((2,), sigma), cache + shift)
        assert y.isfinite().all()
        if sigma == 20.0:
            torch.testing.assert_close(y[:, 0], cache.mean(1), rtol=0, atol=1e-5)


@needs_kernel
def test_gaussian_attention_decodes_by_the_same_kernel():
    x, log_sigma, cache = draw(3, 50)
    for values in (None, cache.flip(1)):
        got = gaussian_attention(x, log_sigma, keys=cache, values=values, causal=True, window=9, impl="cpu")
        keys = None if values is None else cache
        assert torch.equal(
            got, decode_attention(x, log_sigma, cache if values is None else values, keys=keys, window=9)
        )


def test_gradients_go_another_way():
    x, log_sigma, cache = draw(1, 30)
    rotary, leaf = tables(30, 16), cache.clone().requires_grad_()
    y = decode_attention(x, log_sigma, leaf, rotary=rotary)
    a, b = leaf.chunk(2, -1)
    cos, sin = (table[:, None].float() for table in rotary)
    keys = F.rms_norm(torch.cat([a * cos + b * sin, b * cos - a * sin], -1), (16,))
    want = gaussian_attention(x, log_sigma, keys=keys, values=leaf)
    grads = [torch.autograd.grad(of.square().sum(), leaf, retain_graph=True)[0] for of in (y, want)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6)
    turned = tuple(table.float().requires_grad_() for table in rotary)
    assert decode_attention(x, log_sigma, cache, rotary=turned).requires_grad


@needs_kernel
def test_the_operator_is_a_proper_one_and_compiles():
    x, log_sigma, cache = draw(1, 30)
    cache = cache.contiguous()
    arguments = (x, None, cache, log_sigma, *tables(30, 16), scales(cache), [30, 12], [0, 1], [], 9, 0)
    torch.library.opcheck(decoding.attend_cached, arguments)
    compiled = torch.compile(decode_attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x, log_sigma, cache), decode_attention(x, log_sigma, cache, impl="cpu"))
