"""Properties of the operator that hold for any features, on every implementation a CPU can run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gka import gaussian_attention
from gka.masking import Mask
from operator_cases import IMPLS

# Triton's interpreter computes with NumPy, which warns where a GPU does not; what comes of it is tested.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")

problems = st.fixed_dictionaries(
    dict(
        seed=st.integers(0, 2**31),
        shape=st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(1, 2), st.sampled_from([16, 17, 24, 33])),
        causal=st.booleans(),
        window=st.none() | st.integers(0, 50),
        log_sigma=st.floats(-0.5, 2.0),
    )
)


def build(p):
    generator = torch.Generator().manual_seed(p["seed"])
    x = torch.randn(p["shape"], generator=generator)
    log_sigma = p["log_sigma"] + 0.3 * torch.randn(p["shape"][2], generator=generator)
    return x, log_sigma, dict(causal=p["causal"], window=p["window"])


@pytest.mark.parametrize("impl", IMPLS)
def test_the_features_given_as_keys_too_change_nothing(impl):
    x, log_sigma = torch.randn(1, 6, 2, 16), torch.zeros(2)
    y = gaussian_attention(x, log_sigma, keys=x, values=x, eps=0.5, impl=impl)
    assert torch.equal(y, gaussian_attention(x, log_sigma, eps=0.5, impl=impl))


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=10)
@given(p=problems, split=st.integers(0, 39))
def test_changing_the_future_changes_nothing_before_it(impl, p, split):
    """Bit for bit: rounding may not leak the future either."""
    x, log_sigma, mask = build(p)
    mask["causal"] = True
    split %= x.shape[1]
    other = x.clone()
    other[:, split:] = 3 * torch.randn(other[:, split:].shape, generator=torch.Generator().manual_seed(p["seed"] + 1))
    before, after = (gaussian_attention(t, log_sigma, impl=impl, **mask)[:, :split] for t in (x, other))
    assert torch.equal(before, after)


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=10)
@given(p=problems)
def test_wide_and_narrow_limits(impl, p):
    """sigma -> infinity is the mean of what is visible, sigma -> 0 the token itself; extremes stay finite."""
    x, log_sigma, mask = build(p)
    visible = Mask(**mask).dense(x.shape[1], x.shape[1], x.device).float()
    mean = torch.einsum("ij,bjhd->bihd", visible / visible.sum(-1, keepdim=True), x)
    for wide in (9.0, 100.0):
        torch.testing.assert_close(
            gaussian_attention(x, torch.full_like(log_sigma, wide), impl=impl, **mask), mean, rtol=1e-3, atol=1e-3
        )
    for narrow in (-4.0, -100.0):
        torch.testing.assert_close(
            gaussian_attention(x, torch.full_like(log_sigma, narrow), impl=impl, **mask), x, rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("length", [9, 60])  # the CPU kernel computes rows of few keys in another way
@pytest.mark.parametrize("impl", [name for name in IMPLS if name != "flex"])
def test_a_clamped_bandwidth_learns_nothing(impl, length):
    x, log_sigma = torch.randn(1, length, 3, 16, requires_grad=True), torch.tensor([-21.0, 0.5, 30.0]).requires_grad_()
    gaussian_attention(x, log_sigma, impl=impl).square().sum().backward()
    assert (log_sigma.grad == 0).tolist() == [True, False, True] and x.grad.isfinite().all()


@settings(max_examples=50)
@given(t=st.integers(1, 12), extra=st.integers(0, 5), causal=st.booleans(), window=st.none() | st.integers(0, 15))
def test_simplified_and_trimmed_masks_hide_the_same_keys(t, extra, causal, window):
    mask, keys = Mask(causal, window), t + extra
    first = mask.first_visible_key(t, keys)
    full = mask.dense(t, keys, torch.device("cpu"))
    assert not full[:, :first].any()
    assert torch.equal(full[:, first:], mask.simplify(t, keys - first).dense(t, keys - first, torch.device("cpu")))
    assert full.diagonal(extra).all()
