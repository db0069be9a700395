"""Decoding from a cache: within the error of float64, for ragged rows, derived keys, delays, windows, any stride."""

import pytest
import torch
import torch.nn.functional as F

from gka import decode_attention, gaussian_attention
from gka.impl.cpu import build, decoding
from gka.testing import make_features, make_log_sigma
from operator_cases import FUSED

needs_kernel = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
FLOAT32, BFLOAT16 = 3e-6, 5e-3  # y relative to the largest: a few roundings; that of y to bfloat16


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
    """The definition in float64, token by token of what is visible."""
    y = torch.empty(x.shape, dtype=torch.float64)
    batch, num_queries, heads = x.shape[:3]
    values = values.double()
    keys = values if keys is None else keys.double()
    if rotary is not None:
        cos, sin = (table[: values.shape[1], None].double() for table in rotary)
        a, b = (values * channel_scales).chunk(2, -1)
        turned = torch.cat([a * cos + b * sin, b * cos - a * sin], -1)
        keys = turned / (turned.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    for row in range(batch):
        length = values.shape[1] if lengths is None else lengths[row]
        for i in range(num_queries):
            place = length - num_queries + i
            seen = torch.arange(0 if window is None else max(0, place - window), place + 1)
            for h in range(heads):
                late_key, late_value = (delays[h] if delays else 0 for delays in (key_delays, value_delays))
                k, v = keys[row, (seen - late_key).clamp(min=0), h], values[row, (seen - late_value).clamp(min=0), h]
                scores = -(x[row, i, h].double() - k).square().sum(-1) / (2 * log_sigma[h].double().exp() ** 2)
                y[row, i, h] = scores.softmax(0) @ v
    return y


def check(x, log_sigma, cache, impl="auto", **options):
    want = expected(x, log_sigma, cache, **options)
    got = decode_attention(x, log_sigma, cache, impl=impl, **options)
    assert got.dtype == x.dtype
    assert (got - want).abs().max() <= (FLOAT32 if x.dtype == torch.float32 else BFLOAT16) * want.abs().max()


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
    for num_queries, num_keys, head_dim in SIZES:
        x, log_sigma, cache = draw(num_queries, num_keys, head_dim=head_dim)
        options = FORMS[form](cache)
        late = dict(key_delays=(0, 1), value_delays=(3, 0))
        ragged = [max(num_queries, num_keys // 3), num_keys]
        options = dict(options, impl=impl)
        check(x, log_sigma, cache, **options)
        check(x, log_sigma, cache, window=9, lengths=ragged, **options)
        check(x, log_sigma, cache, lengths=ragged, **late, **options)
        check(x, log_sigma, cache, window=0, **late, **options)


@needs_kernel
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_rounded_once(form):
    for num_queries, num_keys, head_dim in SIZES:
        x, log_sigma, cache = draw(num_queries, num_keys, head_dim=head_dim, dtype=torch.bfloat16)
        check(x, log_sigma, cache, window=21, key_delays=(1, 0), **FORMS[form](cache))


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
        assert torch.equal(compiled(x, log_sigma, cache), decoding.decode(x, None, cache, log_sigma, after=0))


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(lengths=[30, 31]), r"lengths must be 2 numbers from 2 to 30, got \[30, 31\]"),
        (dict(lengths=[1, 30]), "lengths must be 2 numbers from 2 to 30"),
        (dict(value_delays=[0, 2**64 - 5]), "value_delays must be 2 numbers from 0"),
        (dict(key_delays=[1]), "key_delays must be 2 numbers from 0 to 2.31 - 1, one a head"),
        (dict(rotary=tables(29, 16)), r"rotary must be two tables of \(30 or more, 16 / 2\) numbers, got \(29, 8\)"),
        (dict(rotary=tables(30, 16), keys=torch.zeros(2, 30, 2, 16)), "keys are given or derived by rotary, not both"),
        (dict(channel_scales=torch.ones(2, 16)), "channel_scales are of keys that are derived by rotary"),
        (dict(rotary=tables(30, 16), channel_scales=torch.ones(16)), r"channel_scales must be \(H, D\) = \(2, 16\)"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    x, log_sigma, cache = draw(2, 30)
    with pytest.raises(ValueError, match=message):
        decode_attention(x, log_sigma, cache, **options)
