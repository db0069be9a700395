"""Bad input is one clear error that names the argument and what was expected."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gka import (
    GaussianKernelAttention,
    attention_cost,
    dot_product_attention,
    gaussian_attention,
    initial_log_sigma,
    log_kernel,
    select_impl,
)
from operator_cases import AUTO_ON_CPU

X = torch.randn(2, 5, 3, 16)
S = torch.zeros(3)

CASES = [
    (TypeError, "dim and num_heads must be ints, got float and int", lambda: GaussianKernelAttention(8.0, 2)),
    (ValueError, "num_heads must divide dim, got dim=-8", lambda: GaussianKernelAttention(-8, 2)),
    (
        TypeError,
        r"x must be a torch.Tensor of shape \(B, T, dim\), got NoneType",
        lambda: GaussianKernelAttention(8, 2)(None),
    ),
    (
        ValueError,
        "tokens, batch and window must be at least 1, got -3, 1 and None",
        lambda: attention_cost("gka", 8, 2, -3),
    ),
    (TypeError, r"x must be a torch.Tensor of shape \(B, T, H, D\), got list", lambda: gaussian_attention([1.0], S)),
    (ValueError, "x must have shape.*3 dimensions", lambda: gaussian_attention(X[0], S)),
    (ValueError, "x must have tokens, heads and channels", lambda: gaussian_attention(X[:, :0], S)),
    (ValueError, "x must have tokens, heads and channels", lambda: gaussian_attention(X[:, :, :0], S[:0])),
    (TypeError, "x must be a floating tensor", lambda: gaussian_attention(X.long(), S)),
    (TypeError, "log_sigma must be a torch.Tensor", lambda: gaussian_attention(X, 0.5)),
    (TypeError, "log_sigma must be float32", lambda: gaussian_attention(X.bfloat16(), S.bfloat16())),
    (TypeError, "log_sigma must be float32", lambda: gaussian_attention(X, S.double())),
    (
        ValueError,
        r"log_sigma must have shape \(H,\) = \(3,\), got \(4,\)",
        lambda: gaussian_attention(X, torch.zeros(4)),
    ),
    (ValueError, "log_sigma must be on the device", lambda: gaussian_attention(X.to("meta"), S)),
    (ValueError, "log_sigma must be finite", lambda: gaussian_attention(X, torch.tensor([0.0, math.nan, 0.0]))),
    (ValueError, "log_sigma must be finite", lambda: gaussian_attention(X, torch.tensor([0.0, math.inf, 0.0]))),
    (
        TypeError,
        "keys must have the dtype of the queries, torch.float32",
        lambda: gaussian_attention(X, S, keys=X.double()),
    ),
    (ValueError, "keys must have shape", lambda: gaussian_attention(X, S, keys=X[..., :8])),
    (ValueError, "keys must be on the device", lambda: gaussian_attention(X, S, keys=X.to("meta"))),
    (
        ValueError,
        "values must have as many tokens as keys, 5, got 4",
        lambda: gaussian_attention(X, S, values=X[:, :4]),
    ),
    (
        ValueError,
        "keys must have at least as many tokens as the queries, 5",
        lambda: gaussian_attention(X, S, keys=X[:, :4], causal=True),
    ),
    (TypeError, "causal must be a bool", lambda: gaussian_attention(X, S, causal=1)),
    (TypeError, "window must be an int or None", lambda: gaussian_attention(X, S, window=2.0)),
    (TypeError, "window must be an int or None", lambda: gaussian_attention(X, S, window=True)),
    (ValueError, "window must be >= 0", lambda: gaussian_attention(X, S, window=-1)),
    (TypeError, "eps must be a number", lambda: gaussian_attention(X, S, eps="1e-6")),
    (ValueError, "eps must be finite and >= 0", lambda: gaussian_attention(X, S, eps=-1.0)),
    (
        ValueError,
        "impl must be one of auto, reference, triton, cpu, flex, sdpa, got 'cuda'",
        lambda: gaussian_attention(X, S, impl="cuda"),
    ),
    (
        ValueError,
        "FlexAttention has no backward pass outside CUDA",
        lambda: gaussian_attention(X.clone().requires_grad_(), S, impl="flex"),
    ),
    (
        ValueError,
        "no backward pass outside CUDA",
        lambda: gaussian_attention(X, S.clone().requires_grad_(), impl="flex"),
    ),
    (ValueError, "head_dim >= 16, got 8", lambda: gaussian_attention(X[..., :8], S, impl="flex")),
    (
        TypeError,
        "return_weights is gone: gaussian_weights",
        lambda: gaussian_attention(X, S, return_weights=True),
    ),
    (
        ValueError,
        "impl must be one of auto, flex, sdpa, got 'reference'",
        lambda: dot_product_attention(X, X, X, impl="reference"),
    ),
    (
        ValueError,
        "impl must be one of auto, flex, sdpa, got 'triton'",
        lambda: dot_product_attention(X, X, X, impl="triton"),
    ),
    (ValueError, "k must have shape", lambda: dot_product_attention(X, X[:, :, :1], X)),
    (ValueError, "num_heads must divide dim, got dim=10 and num_heads=3", lambda: GaussianKernelAttention(10, 3)),
    (ValueError, "window must be >= 0", lambda: GaussianKernelAttention(32, 2, window=-1)),
    (TypeError, "causal must be a bool", lambda: GaussianKernelAttention(32, 2, causal=1)),
    (
        ValueError,
        "impl must be one of auto, reference, triton, cpu, flex, sdpa, got 'cuda'",
        lambda: GaussianKernelAttention(32, 2, impl="cuda"),
    ),
    (
        ValueError,
        r"x must have shape \(B, T, dim\) with dim=32, got \(1, 3, 16\)",
        lambda: GaussianKernelAttention(32, 2)(torch.ones(1, 3, 16)),
    ),
    (
        ValueError,
        r"x must have shape \(B, T, dim\) with dim=32, got \(3, 32\)",
        lambda: GaussianKernelAttention(32, 2)(torch.ones(3, 32)),
    ),
    (ValueError, r"queries must have shape \(B, T, H, D\), got 3 dimensions", lambda: log_kernel(X[0], X[0], S)),
    (ValueError, "keys must have shape", lambda: log_kernel(X, X.transpose(1, 2), S)),
    (
        ValueError,
        r"log_sigma must have shape \(H,\) = \(5,\), got \(3,\)",
        lambda: log_kernel(X.transpose(1, 2), X.transpose(1, 2), S),
    ),
    (TypeError, "log_sigma must be float32", lambda: log_kernel(X, X, S.bfloat16())),
    (ValueError, "sigma_squared must be a positive finite number", lambda: initial_log_sigma(2, 0.0)),
    (ValueError, "kind must be one of softmax, vlt, gka", lambda: attention_cost("linear", 64, 2, 10)),
    (ValueError, "num_heads must divide dim", lambda: attention_cost("gka", 64, 3, 10)),
]


@pytest.mark.parametrize("error,message,call", CASES, ids=[f"{i}-{c[1][:30]}" for i, c in enumerate(CASES)])
def test_bad_input(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_what_ran_can_be_asked():
    assert select_impl(X) == AUTO_ON_CPU
    assert select_impl(X.double(), log_sigma=S.double()) == "sdpa"
    assert select_impl(X, impl="reference") == "reference"
    assert select_impl(X, impl="flex") == "flex"


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
