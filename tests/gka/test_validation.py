"""Bad input is one clear error that names the argument and what was expected."""

import math

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
multihead = GaussianMultiheadAttention

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
