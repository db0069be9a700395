"""What implementations declare is what they do, and the door refuses the rest."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from gka import decode_attention, gaussian_attention, select_impl, testing
from gka.dispatch import IMPLEMENTATIONS, _preferred, find, why_not
from gka.masking import Mask
from gka.options import Options, gaussian_request
from gka.request import OPTIONS, PADDING_AND_MASKS
from gka.validation import FLOATING
from operator_cases import IMPLS

SIZE = 32  # channels that all implementations take


def features(dtype=torch.float32, head_dim=SIZE, tokens=9):
    return testing.make_features("normal", (1, tokens, 2, head_dim), dtype)


def sigma(dtype=torch.float32):
    return torch.zeros(2, dtype=dtype if dtype == torch.float64 else torch.float32)


def test_what_auto_prefers_on_a_device_is_declared_fused_there():
    """Or tests of accuracy and benchmarks, which iterate the declarations, would leave it out in silence."""
    for device, preferred in (("cpu", {"cpu", "sdpa"}), ("cuda", {"triton", "flex", "sdpa"})):
        request = SimpleNamespace(
            x=SimpleNamespace(is_cuda=device == "cuda", device=torch.device(device)), lengths=None,
            key_padding_mask=None, mask=Mask(window=2), constant_norm=True,
        )  # fmt: skip
        assert set(_preferred(request)) == preferred
        assert preferred == {name for name, one in IMPLEMENTATIONS.items() if device in one.SERVES.fused_on}


@pytest.mark.parametrize("impl", IMPLS)
def test_eps_is_applied_as_declared(impl):
    by_eps = [gaussian_attention(features(), sigma(), eps=eps, impl=impl) for eps in (0.0, 3.0)]
    assert torch.equal(*by_eps) != IMPLEMENTATIONS[impl].SERVES.applies_eps


@pytest.mark.parametrize("impl", IMPLS)
def test_dtypes_and_head_sizes_are_taken_as_declared(impl):
    serves = IMPLEMENTATIONS[impl].SERVES
    for dtype in FLOATING:
        if dtype in serves.dtypes:
            assert select_impl(features(dtype), log_sigma=sigma(dtype), impl=impl) == impl
        else:
            with pytest.raises(ValueError, match=f"{impl} takes .*, got {dtype}"):
                gaussian_attention(features(dtype), sigma(dtype), impl=impl)
    for head_dim, limit in ((serves.min_head_dim - 1, ">="), ((serves.max_head_dim or 0) + 1, "<=")):
        if head_dim > 0 and (limit == ">=" or serves.max_head_dim):
            with pytest.raises(ValueError, match=f"{impl} needs head_dim {limit} .*, got {head_dim}"):
                gaussian_attention(features(head_dim=head_dim), sigma(), impl=impl)


@dataclass(frozen=True)
class Strided(Mask):
    """A mask with a new condition: keys that are a multiple of `stride` tokens away."""

    stride: int | None = None

    def visible(self, i, j):
        seen = super().visible(i, j)
        return seen if self.stride is None else seen & ((i - j) % self.stride == 0)


def declare(monkeypatch, impl, options):
    one = IMPLEMENTATIONS[impl]
    monkeypatch.setattr(one, "SERVES", replace(one.SERVES, options=frozenset(options)))


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(window=2), Strided(stride=2)], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_mask_that_is_not_declared_is_refused(impl, mask, monkeypatch):
    """Nobody declares the new condition: no implementation may overlook it."""
    request = replace(gaussian_request(features(), sigma(), None, None, Options()), mask=mask)
    (condition,), options = mask.conditions, IMPLEMENTATIONS[impl].SERVES.options
    assert (why_not(impl, request) is None) == (condition in options)
    declare(monkeypatch, impl, options - {condition})
    assert why_not(impl, request) == f"{impl} does not serve {condition}"
    assert find(request, "auto")[0] != impl


@pytest.mark.parametrize("impl", ["reference", "sdpa", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_a_new_condition_of_the_mask_is_read_everywhere_once_it_is_declared(impl, monkeypatch):
    """By what is made of torch's operations: with causal mask, window and padding between tokens, and NaN."""
    declare(monkeypatch, impl, IMPLEMENTATIONS[impl].SERVES.options | {"stride"})
    x, keys, padding = features(), features(tokens=13), torch.arange(9)[None] % 4 == 1
    x[0, 6, 0, 0] = keys[0, 6, 0, 0] = torch.nan
    options = dict(causal=True, window=5)
    cases = [dict(), dict(keys=keys), dict(key_padding_mask=padding)]
    with monkeypatch.context() as context:
        context.setattr("gka.options.Mask", partial(Strided, stride=2))
        got = [gaussian_attention(x, sigma(), impl=impl, **options, **case) for case in cases]
    seen = Strided(True, 5, 2).dense(13, 13, x.device)
    want = [
        gaussian_attention(x, sigma(), attn_mask=seen[:9, :9], impl="sdpa"),
        gaussian_attention(x, sigma(), keys=keys, attn_mask=seen[4:], impl="sdpa"),
        torch.zeros_like(x),
    ]
    tokens = x[:, ~padding[0]]
    want[2][:, ~padding[0]] = gaussian_attention(tokens, sigma(), attn_mask=seen[:7, :7], impl="sdpa")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert all(0 < y.isnan().any(-1).sum() < 9 for y in got)


@pytest.mark.parametrize("impl", IMPLS)
def test_options_of_decoding_are_served_or_refused_by_name(impl):
    cache, tables = features(tokens=20), tuple(torch.ones(20, SIZE // 2) for _ in range(2))
    scales = torch.full((2, SIZE), 1.5)
    cases = dict(rotary=dict(rotary=tables), channel_scales=dict(rotary=tables, channel_scales=scales))
    cases |= {name: {name: [0, 1]} for name in ("key_delays", "value_delays")} | dict(cache_lengths=dict(lengths=[20]))
    assert set(cases) == set(OPTIONS) - PADDING_AND_MASKS - {"forward_mode"}
    for name, options in cases.items():
        requested = {name if option == "lengths" else option: value for option, value in options.items()}
        request = gaussian_request(features(), sigma(), cache, None, Options(causal=True, **requested))
        if name in IMPLEMENTATIONS[impl].SERVES.options:
            assert why_not(impl, request) is None
        else:
            assert why_not(impl, request) == f"{impl} does not serve {', '.join(requested)}"
        got, want = (decode_attention(features(), sigma(), cache, **options, impl=i) for i in (impl, "reference"))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
