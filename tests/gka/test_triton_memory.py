"""What the Triton kernels read and write: strides, NaN in and out."""

import pytest
import torch

from gka import gaussian_attention
from gka.testing import make_log_sigma
from operator_cases import DEVICE, features

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")


SHAPE = (2, 19, 2, 16)


def variants():
    """Features whose memory is not (B, T, H, D) in order: a slice of wider tokens, heads first, every other token,
    channels apart.
    """
    wide = torch.full((2, 19, 3, 16), float("nan"), device=DEVICE)
    heads_first = torch.empty(2, 2, 19, 16, device=DEVICE)
    tokens = torch.full((2, 40, 2, 16), float("nan"), device=DEVICE)
    channels = torch.full((2, 19, 2, 32), float("nan"), device=DEVICE)
    for view in (wide[:, :, 1:], heads_first.transpose(1, 2), tokens[:, 1:39:2], channels[..., ::2]):
        yield view.copy_(features("normal", SHAPE))


@pytest.mark.parametrize("causal", [False, True])
def test_strided_features_among_nans(causal):
    """No copy is needed, and nothing outside the features is read: NaN lies around them."""
    log_sigma, grad_y = make_log_sigma(2, 16, DEVICE), features("normal", SHAPE, seed=2)
    dense, other = features("normal", SHAPE), features("normal", SHAPE, seed=3)

    def run(x, values=None):
        leaves = [t.detach().requires_grad_() for t in (x, values) if t is not None]
        y = gaussian_attention(leaves[0], log_sigma, values=leaves[1] if values is not None else None, causal=causal,
                               impl="triton")  # fmt: skip
        return y, *torch.autograd.grad(y, leaves, grad_y)

    for arguments in (lambda x: (x,), lambda values: (other, values)):
        want = run(*arguments(dense))
        for view in variants():
            assert all(torch.equal(a, b) for a, b in zip(run(*arguments(view)), want, strict=True))


def test_a_gradient_without_strides():
    x, log_sigma = features("normal", SHAPE).requires_grad_(), make_log_sigma(2, 16, DEVICE)
    y = gaussian_attention(x, log_sigma, impl="triton")
    ones = torch.ones(()).to(y).expand_as(y), torch.ones_like(y)
    assert torch.equal(*(torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in ones))


def test_bandwidths_anywhere_in_memory():
    """Such as in a column of a table."""
    x, results = features("normal", (1, 20, 3, 16)), []
    column = torch.linspace(0, 1, 6, device=DEVICE).view(3, 2)[:, 1]
    for each in (column, column.contiguous()):
        each = each.detach().requires_grad_()
        y = gaussian_attention(x, each, impl="triton")
        results.append((y, *torch.autograd.grad(y.square().sum(), each)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_is_not_hidden(causal, with_values):
    """A NaN token reaches every row that sees it, a NaN bandwidth its whole head: the loss must show it."""
    x, log_sigma = features("normal", (1, 40, 2, 16)), make_log_sigma(2, 16, DEVICE)
    values = features("normal", (1, 40, 2, 16), seed=1) if with_values else None
    x[0, 7, 0] = float("nan")
    y = gaussian_attention(x, log_sigma, values=values, causal=causal, impl="triton")
    rows = y[0].isnan().any(-1)
    assert rows[7:, 0].all() and (causal or rows[:, 0].all()) and not rows[:, 1].any()
    if DEVICE == "cuda":  # on CPU the door refuses it
        log_sigma[1] = float("nan")
        assert gaussian_attention(x, log_sigma, impl="triton")[:, :, 1].isnan().all()
