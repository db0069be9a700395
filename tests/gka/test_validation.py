"""Bad input is one clear error that names the argument and what was expected."""

import math
from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gka import (
    GaussianKernelAttention,
    GaussianMultiheadAttention,
    attention_cost,
    decode_attention,
    dot_product_attention,
    gaussian_attention,
    initial_log_sigma,
    log_kernel,
    select_impl,
)

X = torch.randn(2, 5, 3, 16)
S = torch.zeros(3)
HIDDEN = torch.randn(2, 5, 32)
IMPLS = "impl must be one of auto, reference, triton, cpu, flex, sdpa, got 'cuda'"
attend, layer, baseline = gaussian_attention, GaussianKernelAttention, dot_product_attention
multihead, literal = GaussianMultiheadAttention, partial(gaussian_attention, impl="reference")  # checks at the door
PADDING, TABLES = torch.zeros(2, 5, dtype=torch.bool), (torch.ones(30, 8), torch.ones(30, 8))
decode = partial(decode_attention, X[:, :2], S, torch.randn(2, 30, 3, 16))

# fmt: off
CASES = [  # the error, its words, and a call
    (TypeError, r"x must be a torch.Tensor of shape \(B, T, H, D\), got list", lambda: attend([1.0], S)),
    (ValueError, "x must have shape.*3 dimensions", lambda: attend(X[0], S)),
    (ValueError, "x must have tokens, heads and channels", lambda: attend(X[:, :0], S)),
    (TypeError, "x must be a floating tensor", lambda: attend(X.long(), S)),
    (TypeError, "log_sigma must be a torch.Tensor", lambda: attend(X, 0.5)),
    (TypeError, "log_sigma must be float32", lambda: attend(X.bfloat16(), S.bfloat16())),
    (TypeError, "log_sigma must be float32", lambda: attend(X, S.double())),
    (ValueError, r"log_sigma must have shape \(H,\) = \(3,\), got \(4,\)", lambda: attend(X, torch.zeros(4))),
    (ValueError, "log_sigma must be on the device", lambda: attend(X.to("meta"), S)),
    (ValueError, "log_sigma must be finite", lambda: attend(X, torch.tensor([0.0, math.nan, 0.0]))),
    (ValueError, "log_sigma must be finite", lambda: attend(X, torch.tensor([0.0, math.inf, 0.0]))),
    (TypeError, "keys must have the dtype of the queries, torch.float32", lambda: attend(X, S, keys=X.double())),
    (ValueError, "keys must have shape", lambda: attend(X, S, keys=X[..., :8])),
    (ValueError, "keys must be on the device", lambda: attend(X, S, keys=X.to("meta"))),
    (ValueError, "as many tokens as keys, 5, got 4", lambda: attend(X, S, values=X[:, :4])),
    (ValueError, "as many tokens as the queries, 5", lambda: attend(X, S, keys=X[:, :4], causal=True)),
    (TypeError, "causal must be a bool", lambda: attend(X, S, causal=1)),
    (TypeError, "window must be an int or None", lambda: attend(X, S, window=2.0)),
    (TypeError, "window must be an int or None", lambda: attend(X, S, window=True)),
    (ValueError, "window must be >= 0", lambda: attend(X, S, window=-1)),
    (TypeError, "eps must be a number", lambda: attend(X, S, eps="1e-6")),
    (ValueError, "eps must be finite and >= 0", lambda: attend(X, S, eps=-1.0)),
    (ValueError, IMPLS, lambda: attend(X, S, impl="cuda")),
    (ValueError, "no backward pass outside CUDA", lambda: attend(X.clone().requires_grad_(), S, impl="flex")),
    (ValueError, "no backward pass outside CUDA", lambda: attend(X, S.clone().requires_grad_(), impl="flex")),
    (ValueError, "one of auto, flex, sdpa, got 'reference'", lambda: baseline(X, X, X, impl="reference")),
    (ValueError, "k must have shape", lambda: baseline(X, X[:, :, :1], X)),
    (TypeError, "dim and num_heads must be ints, got float and int", lambda: layer(8.0, 2)),
    (ValueError, "num_heads must divide dim, got dim=10 and num_heads=3", lambda: layer(10, 3)),
    (ValueError, "window must be >= 0", lambda: layer(32, 2, window=-1)),
    (ValueError, IMPLS, lambda: layer(32, 2, impl="cuda")),
    (TypeError, r"x must be a torch.Tensor of shape \(B, T, dim\), got NoneType", lambda: layer(8, 2)(None)),
    (TypeError, r"x must have .*weights, torch.float32, got torch.float16: cast", lambda: layer(32, 2)(HIDDEN.half())),
    (TypeError, "context must have the dtype of .*torch.float64", lambda: layer(32, 2)(HIDDEN, HIDDEN.double())),
    (TypeError, "context.*key_padding_mask=... or attn_mask", lambda: layer(32, 2)(HIDDEN, HIDDEN[..., 0] > 0)),
    (ValueError, r"context.*\(B, Tk, dim\) = \(2, \*, 32\)", lambda: layer(32, 2)(HIDDEN, HIDDEN[:1])),
    (TypeError, "value must have the dtype", lambda: multihead(32, 2)(HIDDEN, HIDDEN, HIDDEN.half())),
    (TypeError, "values must have the dtype of the queries", lambda: decode_attention(X[:, :1], S, X.half())),
    (TypeError, r"lengths must be a torch.Tensor of shape \(B,\), got list", lambda: attend(X, S, lengths=[5, 3])),
    (TypeError, "lengths must be int64 or int32, got torch.float32", lambda: attend(X, S, lengths=torch.ones(2))),
    (ValueError, r"lengths must have shape \(B,\) = \(2,\), got \(3,\)", lambda: attend(X, S, lengths=torch.arange(3))),
    (ValueError, r"lengths .* 0 to .*, 5, got \[6, 3\]", lambda: literal(X, S, lengths=torch.tensor([6, 3]))),
    (ValueError, r"lengths .* 0 to .*, 5, got \[5, -1\]", lambda: literal(X, S, lengths=torch.tensor([5, -1]))),
    (TypeError, "key_padding_mask must be bool, True for", lambda: attend(X, S, key_padding_mask=PADDING.float())),
    (ValueError, r"key_padding_mask .* = \(2, 5\)", lambda: attend(X, S, key_padding_mask=PADDING[:, :4])),
    (ValueError, "give one of", lambda: attend(X, S, key_padding_mask=PADDING, lengths=torch.tensor([5, 5]))),
    (TypeError, "attn_mask must be bool, True = visible", lambda: attend(X, S, attn_mask=PADDING.long())),
    (ValueError, r"attn_mask must broadcast to .* = \(2, 3, 5, 5\)", lambda: attend(X, S, attn_mask=torch.ones(4, 5))),
    (ValueError, r"each sequence give mask\[:, None\]", lambda: attend(X, S, attn_mask=torch.ones(2, 5, 5))),
    (ValueError, "cpu does not serve attn_mask", lambda: attend(X, S, attn_mask=torch.ones(5, 5), impl="cpu")),
    (ValueError, r"lengths must be 2 numbers from 2 to 30, got \[30, 31\]", lambda: decode(lengths=[30, 31])),
    (ValueError, "lengths must be 2 numbers from 2 to 30", lambda: decode(lengths=[1, 30])),
    (ValueError, "value_delays must be 3 numbers from 0", lambda: decode(value_delays=[0, 0, 2**64 - 5])),
    (ValueError, "key_delays must be 3 numbers from 0 to 2.31 - 1, one a head", lambda: decode(key_delays=[1])),
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
