"""A batch of no sequences, such as the last of a sharded data set: outputs of that shape, and gradients that are 0."""

import pytest
import torch

from gka import GaussianKernelAttention, dot_product_attention, gaussian_attention, select_impl
from operator_cases import IMPLS

NO_LENGTHS = dict(constant_norm=True, lengths=torch.zeros(0, dtype=torch.int64))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def features(tokens: int, dtype: torch.dtype, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(0, tokens, 3, 16, dtype=dtype, requires_grad=requires_grad)


@DTYPES
@pytest.mark.parametrize("options", [dict(), dict(causal=True, window=2), NO_LENGTHS], ids=str)
@pytest.mark.parametrize("num_keys", [None, 7])
@pytest.mark.parametrize("impl", ["auto", *IMPLS])
def test_the_operator(impl, num_keys, options, dtype):
    learns = impl != "flex"  # it has no gradients on CPUs
    options = dict(impl=impl, constant_norm=num_keys is not None) | options  # Triton has no other gradients of keys
    x, log_sigma = features(5, dtype, learns), torch.zeros(3, requires_grad=learns)
    keys = None if num_keys is None else features(num_keys, dtype, learns)
    y = gaussian_attention(x, log_sigma, keys=keys, **options)
    assert y.shape == (0, 5, 3, 16) and y.dtype == dtype
    assert select_impl(x, keys=keys, **options) == "reference"
    if learns:
        y.sum().backward()
        assert x.grad.shape == x.shape and torch.equal(log_sigma.grad, torch.zeros(3))
        assert keys is None or keys.grad.shape == keys.shape


@pytest.mark.parametrize("impl", ["auto", "sdpa", "flex"])
def test_the_softmax_baseline(impl):
    q, k = (features(tokens, torch.float32, requires_grad=False) for tokens in (5, 7))
    assert dot_product_attention(q, k, k, causal=True, window=2, impl=impl).shape == (0, 5, 3, 16)


def test_the_layer_learns_nothing_from_it():
    layer = GaussianKernelAttention(48, 3, head_norm=True, causal=True)
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y = call(torch.randn(0, 5, 48))
        assert y.shape == (0, 5, 48)
        y.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
        assert call(torch.randn(2, 5, 48)).shape == (2, 5, 48)
