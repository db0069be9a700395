"""What our kernels read and write: strides, NaN in and out."""

import pytest
import torch

from gka import gaussian_attention
from gka.testing import make_features, make_log_sigma
from operator_cases import CPU, DEVICE, STRIDES

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")
SHAPE = (2, 19, 2, 16)


@pytest.fixture(params=[CPU, "triton"])
def impl(request):
    return request.param


@pytest.fixture
def device(impl):
    return "cpu" if impl == "cpu" else DEVICE


def draw(device, seed=0, dtype=torch.float32):
    return make_features("normal", SHAPE, dtype, seed).to(device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_features_among_nans(impl, device, dtype, causal):
    """Nothing outside the features is read: NaN lies around them."""
    if (impl, device, dtype) == ("triton", "cpu", torch.bfloat16):
        pytest.skip("the interpreter gets products of bfloat16 wrong")
    log_sigma, grad_y, other = make_log_sigma(2, 16, device), draw(device, 2, dtype), draw(device, 3, dtype)

    def run(**tensors):
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        y = gaussian_attention(log_sigma=log_sigma, causal=causal, impl=impl, **leaves)
        return y, *torch.autograd.grad(y, list(leaves.values()), grad_y)

    for name in ("x", "values", "keys")[: 3 if impl == "cpu" else 2]:
        rest = {} if name == "x" else {"x": other}
        want = run(**rest, **{name: draw(device, dtype=dtype)})
        for strided in STRIDES.values():
            got = run(**rest, **{name: strided(draw(device, dtype=dtype))})
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_gradient_without_strides_and_a_negative_view(impl, device):
    x, log_sigma = draw(device).requires_grad_(), make_log_sigma(2, 16, device)
    y = gaussian_attention(x, log_sigma, impl=impl)
    ones = torch.ones(()).to(y).expand_as(y), torch.ones_like(y)
    assert torch.equal(*(torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in ones))
    negative = torch._neg_view(x.detach())
    assert torch.equal(gaussian_attention(negative, log_sigma, impl=impl), gaussian_attention(-x, log_sigma, impl=impl))


def test_bandwidths_anywhere_in_memory(impl, device):
    """Such as in a column of a table."""
    x, results = draw(device), []
    column = torch.linspace(0, 1, 4, device=device).view(2, 2)[:, 1]
    for each in (column, column.contiguous()):
        each = each.detach().requires_grad_()
        y = gaussian_attention(x, each, impl=impl)
        results.append((y, *torch.autograd.grad(y.square().sum(), each)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_a_bandwidth_that_is_not_a_number_shows_in_its_head():
    """On CPUs the door refuses it."""
    y = gaussian_attention(draw("cuda"), torch.tensor([0.0, float("nan")], device="cuda"))
    assert y[:, :, 1].isnan().all() and not y[:, :, 0].isnan().any()
