"""Bad input is one clear error that names the argument and what was expected, or a warning; a batch of no sequences,
such as the last of a sharded data set, is no bad input.
"""

import math
import warnings
from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gka import (
    GaussianKernelAttention,
    GaussianMultiheadAttention,
    attention_cost,
    bandwidth_warnings,
    decode_attention,
    dot_product_attention,
    gaussian_attention,
    initial_log_sigma,
    log_kernel,
    select_impl,
)
from operator_cases import CPU, IMPLS

X = torch.randn(2, 5, 3, 16)
LEAF, S = X.clone().requires_grad_(), torch.zeros(3)
HIDDEN = torch.randn(2, 5, 32)
NAMES = "impl must be one of auto, reference, triton, cpu, flex, sdpa, got 'cuda'"
attend, layer, baseline = gaussian_attention, GaussianKernelAttention, dot_product_attention
multihead, literal = GaussianMultiheadAttention, partial(gaussian_attention, impl="reference")  # checks at the door
PADDING, TABLES = torch.zeros(2, 5, dtype=torch.bool), (torch.ones(30, 8), torch.ones(30, 8))
PACKED = torch.tensor([0, 5], dtype=torch.int32)
decode = partial(decode_attention, X[:, :2], S, torch.randn(2, 30, 3, 16))


def pack(cu_seqlens, **options):
    return attend(X[:1], S, cu_seqlens=cu_seqlens, **options)


offset = GaussianKernelAttention(32, 2, head_offsets="PS")

# fmt: off
CASES = [  # the error, its words, and a call
    (TypeError, r"x must be a torch.Tensor of shape \(B, T, H, D\), got list", lambda: attend([1.0], S)),
    (ValueError, "x must have shape.*3 dimensions", lambda: attend(X[0], S)),
    (ValueError, "x must have tokens, heads and channels", lambda: attend(X[:, :0], S)),
    (TypeError, "x must be a floating tensor", lambda: attend(X.long(), S)),
    (TypeError, "log_sigma must be a torch.Tensor", lambda: attend(X, 0.5)),
    (TypeError, "log_sigma must be float32", lambda: attend(X, S.double())),
    (ValueError, r"log_sigma must have shape \(H,\) = \(3,\), got \(4,\)", lambda: attend(X, torch.zeros(4))),
    (ValueError, "log_sigma must be on the device", lambda: attend(X.to("meta"), S)),
    (ValueError, "log_sigma must be finite", lambda: attend(X, torch.tensor([0.0, math.nan, 0.0]))),
    (TypeError, "keys must have the dtype of the queries, torch.float32", lambda: attend(X, S, keys=X.double())),
    (ValueError, "keys must have shape", lambda: attend(X, S, keys=X[..., :8])),
    (ValueError, "keys must be on the device", lambda: attend(X, S, keys=X.to("meta"))),
    (ValueError, "as many tokens as keys, 5, got 4", lambda: attend(X, S, values=X[:, :4])),
    (ValueError, "as many tokens as the queries, 5", lambda: attend(X, S, keys=X[:, :4], causal=True)),
    (TypeError, "causal must be a bool", lambda: attend(X, S, causal=1)),
    (TypeError, "window must be an int or None", lambda: attend(X, S, window=True)),
    (ValueError, "window must be >= 0", lambda: attend(X, S, window=-1)),
    (TypeError, "eps must be a number", lambda: attend(X, S, eps="1e-6")),
    (ValueError, "eps must be finite and >= 0", lambda: attend(X, S, eps=-1.0)),
    (ValueError, NAMES, lambda: attend(X, S, impl="cuda")),
    (ValueError, "no backward pass outside CUDA", lambda: attend(X, S.clone().requires_grad_(), impl="flex")),
    (ValueError, "keys only with constant_norm", lambda: attend(LEAF, S, keys=X, impl="triton")),
    (ValueError, "one of auto, flex, sdpa, got 'reference'", lambda: baseline(X, X, X, impl="reference")),
    (TypeError, "dim and num_heads must be ints, got float and int", lambda: layer(8.0, 2)),
    (ValueError, "num_heads must divide dim, got dim=10 and num_heads=3", lambda: layer(10, 3)),
    (ValueError, NAMES, lambda: layer(32, 2, impl="cuda")),
    (TypeError, r"x must be a torch.Tensor of shape \(B, T, dim\), got NoneType", lambda: layer(8, 2)(None)),
    (TypeError, r"x must have .*weights, torch.float32, got torch.float16: cast", lambda: layer(32, 2)(HIDDEN.half())),
    (TypeError, "context must have the dtype of .*torch.float64", lambda: layer(32, 2)(HIDDEN, HIDDEN.double())),
    (TypeError, "context.*key_padding_mask=... or attn_mask", lambda: layer(32, 2)(HIDDEN, HIDDEN[..., 0] > 0)),
    (TypeError, "values must have the dtype of the queries", lambda: decode_attention(X[:, :1], S, X.half())),
    (TypeError, r"lengths must be a torch.Tensor of shape \(B,\), got list", lambda: attend(X, S, lengths=[5, 3])),
    (TypeError, "lengths must be int64 or int32, got torch.float32", lambda: attend(X, S, lengths=torch.ones(2))),
    (ValueError, r"lengths .* 0 to .*, 5, got \[5, -1\]", lambda: literal(X, S, lengths=torch.tensor([5, -1]))),
    (TypeError, "key_padding_mask must be bool, True for", lambda: attend(X, S, key_padding_mask=PADDING.float())),
    (ValueError, "give one of", lambda: attend(X, S, key_padding_mask=PADDING, lengths=torch.tensor([5, 5]))),
    (TypeError, "attn_mask must be bool, True = visible", lambda: attend(X, S, attn_mask=PADDING.long())),
    (ValueError, r"attn_mask must broadcast to .* = \(2, 3, 5, 5\)", lambda: attend(X, S, attn_mask=torch.ones(4, 5))),
    (ValueError, r"each sequence give mask\[:, None\]", lambda: attend(X, S, attn_mask=torch.ones(2, 5, 5))),
    (ValueError, r"cu_seqlens must have shape .*, got \(1,\)", lambda: pack(torch.zeros(1, dtype=torch.int32))),
    (ValueError, r"cu_seqlens must rise from 0 .*, 5, got \[0, 4\]", lambda: pack(PACKED.clamp(max=4))),
    (ValueError, r"cu_seqlens must rise .*, got \[0, 4, 3, 5\]", lambda: pack(torch.tensor([0, 4, 3, 5]).int())),
    (ValueError, r"cu_seqlens needs all tokens in one row.*\(2, 5, 3, 16\)", lambda: attend(X, S, cu_seqlens=PACKED)),
    (ValueError, "cu_seqlens is for keys of the same tokens", lambda: pack(PACKED, keys=torch.ones(1, 7, 3, 16))),
    (ValueError, "cu_seqlens and attn_mask", lambda: pack(PACKED, attn_mask=torch.ones(5, 5))),
    (ValueError, "flex does not serve cu_seqlens", lambda: pack(torch.tensor([0, 2, 5]).int(), impl="flex")),
    (ValueError, r"cu_seqlens .*\(2, 5, 3, 16\)", lambda: baseline(X, X, X, cu_seqlens=PACKED)),
    (ValueError, "give no context", lambda: layer(32, 2)(HIDDEN[:1], HIDDEN[:1], cu_seqlens=PACKED)),
    (ValueError, "cu_seqlens and key", lambda: offset(HIDDEN[:1], cu_seqlens=PACKED, key_padding_mask=PADDING[:1])),
    (ValueError, r"cu_seqlens .*\(2, 5, 2, 16\)", lambda: offset(HIDDEN, cu_seqlens=PACKED)),
    (ValueError, r"lengths must be 2 numbers from 2 to 30, got \[30, 31\]", lambda: decode(lengths=[30, 31])),
    (ValueError, "value_delays must be 3 numbers from 0", lambda: decode(value_delays=[0, 0, 2**64 - 5])),
    (ValueError, r"rotary .*\(30 or more, 16 / 2\) numbers, got \(29, 8\)", lambda: decode(rotary=[TABLES[0][1:]])),
    (ValueError, "given or derived by rotary, not both", lambda: decode(rotary=TABLES, keys=torch.ones(2, 30, 3, 16))),
    (ValueError, "of keys that are derived by rotary", lambda: decode(channel_scales=torch.ones(3, 16))),
    (ValueError, r"channel_scales .* = \(3, 16\)", lambda: decode(rotary=TABLES, channel_scales=torch.ones(16))),
    (ValueError, r"with dim=32, got \(3, 32\)", lambda: layer(32, 2)(torch.ones(3, 32))),
    (ValueError, "keys must have shape", lambda: log_kernel(X, X.transpose(1, 2), S)),
    (ValueError, "sigma_squared must be a positive finite number", lambda: initial_log_sigma(2, 0.0)),
    (ValueError, "kind must be one of softmax, vlt, gka", lambda: attention_cost("linear", 64, 2, 10)),
    (ValueError, "tokens, batch and window must be at least 1", lambda: attention_cost("gka", 8, 2, -3)),
]
# fmt: on


@pytest.mark.parametrize("error,message,call", CASES, ids=[f"{i}-{c[1][:30]}" for i, c in enumerate(CASES)])
def test_bad_input(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_the_kernels_refuse_what_32_bits_cannot_address_keys_included():
    """Views of one number: nothing is allocated."""
    short, long = (torch.zeros(()).expand(1, tokens, 8, 64) for tokens in (5, 2**22))
    for x, keys in ((long, None), (short, long)):
        with pytest.raises(ValueError, match=r"fewer than 2\^31 numbers per sequence, got \(1, 4194304, 8, 64\)"):
            select_impl(x, keys=keys, impl="triton")
    assert select_impl(short, keys=short, impl="triton") == "triton"


def test_fake_tensors_are_not_looked_into():
    """As torch's tools that estimate memory call a model."""
    with FakeTensorMode():
        x = torch.empty(2, 5, 3, 16, requires_grad=True)
        gaussian_attention(x, torch.empty(3)).sum().backward()
        assert x.grad.shape == x.shape


BANDWIDTHS = [(0.0, "small"), (5.6e-3, "small"), (5.7e-3, ""), (64**0.25, ""), (1130, ""), (1132, "large")]


@pytest.mark.parametrize("sigma, fault", [*BANDWIDTHS, (math.inf, "large")])
def test_a_bandwidth_is_judged_by_what_it_does_to_features_of_its_length(sigma, fault):
    """Tokens that differ by 1 % of the norm have no weight at all; or opposite ones have the same to 1e-4."""
    lines = bandwidth_warnings(3, [1.0, sigma, sigma], 64, "--lr")
    assert [*lines] == (["sigma of layer_3, heads 1, 2"] if fault else [])
    assert all(fault in line and "--lr" in line for line in lines.values())
    norm = 64**0.5
    near, far = (math.exp(-(distance**2) / (2 * sigma**2)) if sigma else 0.0 for distance in (norm / 100, 2 * norm))
    assert (near < math.exp(-100)) == (fault == "small") and (far > 1 - 1e-4) == (fault == "large")


def warned(*, log_sigma=0.0, offset=0.0, dtype=torch.float32, impl="sdpa", causal=True, times=1):
    """Messages of so many calls at one line, by Python's own rule."""
    x = torch.randn(1, 20, 2, 16, dtype=dtype) + offset
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(times):
            gaussian_attention(x, torch.full((2,), log_sigma), causal=causal, impl=impl)
    ours = [w for w in caught if str(w.message).startswith("gaussian_attention")]
    return [str(w.message) for w in ours], [w.filename for w in ours]


@pytest.mark.parametrize("impl", [CPU, "sdpa", "flex"])
def test_features_that_float32_cannot_resolve_are_warned_of_once(impl):
    for lost in (dict(log_sigma=math.log(1e-3)), dict(offset=300.0), dict(offset=300.0, dtype=torch.bfloat16)):
        messages, files = warned(impl=impl, times=3, **lost)
        assert len(messages) == 1
        assert all(word in messages[0] for word in ("normalise the heads", "float64", "impl='reference'"))
        assert files == [__file__]  # the warning names the caller's line, not ours
    centred, half = dict(offset=300.0, causal=False), dict(offset=10.0, dtype=torch.bfloat16)
    for fine in (dict(), dict(log_sigma=math.log(0.1)), dict(offset=10.0), centred, half):
        assert warned(impl=impl, **fine) == ([], [])
    assert warned(offset=300.0, dtype=torch.float64) == warned(offset=300.0, impl="reference") == ([], [])


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


NO_LENGTHS = dict(constant_norm=True, lengths=torch.zeros(0, dtype=torch.int64))


def no_sequences(tokens: int, requires_grad: bool) -> torch.Tensor:
    return torch.randn(0, tokens, 3, 16, dtype=torch.bfloat16, requires_grad=requires_grad)


@pytest.mark.parametrize("options", [dict(), dict(causal=True, window=2), NO_LENGTHS], ids=str)
@pytest.mark.parametrize("num_keys", [None, 7])
@pytest.mark.parametrize("impl", ["auto", *IMPLS])
def test_the_operator_of_no_sequences(impl, num_keys, options):
    learns = impl != "flex"  # it has no gradients on CPUs
    options = dict(impl=impl, constant_norm=num_keys is not None) | options  # Triton has no other gradients of keys
    x, log_sigma = no_sequences(5, learns), torch.zeros(3, requires_grad=learns)
    keys = None if num_keys is None else no_sequences(num_keys, learns)
    y = gaussian_attention(x, log_sigma, keys=keys, **options)
    assert y.shape == (0, 5, 3, 16) and y.dtype == x.dtype
    assert select_impl(x, keys=keys, **options) == "reference"
    if learns:
        y.sum().backward()
        assert x.grad.shape == x.shape and torch.equal(log_sigma.grad, torch.zeros(3))
        assert keys is None or keys.grad.shape == keys.shape


@pytest.mark.parametrize("impl", ["auto", "sdpa", "flex"])
def test_the_softmax_baseline_of_no_sequences(impl):
    q, k = (no_sequences(tokens, requires_grad=False) for tokens in (5, 7))
    assert dot_product_attention(q, k, k, causal=True, window=2, impl=impl).shape == (0, 5, 3, 16)


def test_the_layer_learns_nothing_from_no_sequences():
    layer = GaussianKernelAttention(48, 3, head_norm=True, causal=True)
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y = call(torch.randn(0, 5, 48))
        assert y.shape == (0, 5, 48)
        y.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
        assert call(torch.randn(2, 5, 48)).shape == (2, 5, 48)
