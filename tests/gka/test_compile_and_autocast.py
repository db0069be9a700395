"""The operator under torch.compile and under autocast."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

from gka import dot_product_attention, gaussian_attention, testing
from gka.dispatch import BASELINES
from gka.impl import flex
from gka.masking import Mask
from gka.testing import make_log_sigma
from operator_cases import IMPLS, TRITON


@pytest.mark.parametrize("impl", [*BASELINES, "auto"])
def test_the_baseline_compiles_without_graph_breaks(impl):
    q = testing.make_features("normal", (1, 24, 2, 16))

    def function(q):
        return dot_product_attention(q, q, q, causal=True, window=7, impl=impl)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), function(q))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("constant_norm", [False, True])
@pytest.mark.parametrize("dynamic,window", [(None, 7), (True, None)])
def test_compiles_without_graph_breaks(dynamic, window, constant_norm, impl):
    learns = impl != "flex"  # it has no gradients on CPUs
    torch._dynamo.reset()  # one function compiles eight times at most

    def function(x, log_sigma):
        return gaussian_attention(x, log_sigma, causal=True, window=window, constant_norm=constant_norm, impl=impl)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (5, 24, 37) if dynamic else (24,):
        x, log_sigma = testing.make_features("normal", (1, length, 2, 16)), torch.zeros(2)
        leaves, results = [t.requires_grad_(learns) for t in (x, log_sigma)], []
        for each in (compiled, function):
            y = each(*leaves)
            results.append([y, *(torch.autograd.grad(y.square().sum(), leaves) if learns else ())])
        torch.testing.assert_close(*results)


def test_a_graph_does_not_ask_whether_a_device_has_autocast(monkeypatch):
    """Before torch 2.14 the question breaks it, and all tests run with one torch."""

    def refuse(device_type):
        raise AssertionError("asked")

    torch._dynamo.reset()
    monkeypatch.setattr(torch.amp, "is_autocast_available", refuse)
    compiled = torch.compile(lambda x: gaussian_attention(x, torch.zeros(2)), fullgraph=True, backend="aot_eager")
    x = testing.make_features("normal", (1, 24, 2, 16))
    with torch.autocast("cpu"):
        assert compiled(x).dtype == torch.bfloat16
    assert compiled(x).dtype == torch.float32


def test_flex_compiles_once_for_lengths_that_fill_the_same_tiles(monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flex_attention.flex_attention, backend=counter, dynamic=False)
    monkeypatch.setattr(flex_attention, "flex_attention", compiled)
    for length in range(100, 106):
        x = testing.make_features("normal", (1, length, 2, 32))
        gaussian_attention(x, make_log_sigma(2, 32), causal=True, window=20, impl="flex")
    assert counter.frame_count == 1


def test_flex_masks_first_used_in_inference_mode_can_be_saved_for_training():
    flex._block_mask.cache_clear()
    x = testing.make_features("normal", (1, 30, 2, 16))
    with torch.inference_mode():
        gaussian_attention(x, make_log_sigma(2, 16), causal=True, impl="flex")
    block_mask = flex._block_mask(Mask(True), 30, 30, torch.device("cpu"))
    assert flex._block_mask.cache_info().hits == 1
    captured = [cell.cell_contents for cell in block_mask.mask_mod.__closure__]
    tensors = [block_mask.kv_indices, block_mask.q_indices, *(c for c in captured if isinstance(c, torch.Tensor))]
    assert not any(t.is_inference() for t in tensors)


@pytest.mark.parametrize(
    "impl,dtype", [("sdpa", torch.bfloat16), pytest.param("triton", torch.float16, marks=TRITON.marks)]
)
def test_autocast_takes_its_dtype_and_keeps_the_float32_norms(impl, dtype):
    x, log_sigma = testing.make_features("x10", (2, 63, 2, 32)), make_log_sigma(2, 32)
    with torch.autocast("cpu", dtype):
        got = gaussian_attention(x, log_sigma, impl=impl)
    assert got.dtype == dtype
    want = gaussian_attention(x.to(dtype).double(), log_sigma.double(), impl="reference")
    assert testing.error(got, want) <= 2 * torch.finfo(dtype).eps


def test_autocast_accepts_mixed_dtypes():
    """As a normalisation that stays float32 in front of keys and queries leaves them, beside bfloat16 values."""
    x, values = (testing.make_features("normal", (2, 21, 2, 16), seed=seed) for seed in (0, 1))
    log_sigma = make_log_sigma(2, 16)
    mixed = dict(values=values.bfloat16(), causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        got, baseline = gaussian_attention(x, log_sigma, **mixed), dot_product_attention(x, x, values.bfloat16())
    assert torch.equal(got, gaussian_attention(x.bfloat16(), log_sigma, **mixed))
    assert torch.equal(baseline, dot_product_attention(x.bfloat16(), x.bfloat16(), values.bfloat16()))
    with pytest.raises(TypeError, match="values must have the dtype of the queries"):
        gaussian_attention(x, log_sigma, **mixed)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="values must be a floating tensor"):
        gaussian_attention(x, log_sigma, values=values.long())


def test_flex_stays_compiled_for_many_lengths(monkeypatch):
    """torch compiles a function for 8 shapes, then goes on without fusing it. Without a C++ compiler here."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    attend = flex._compiled.__wrapped__()
    for tiles in range(1, 12):
        q = torch.randn(1, 1, flex.TILE * tiles, 16)
        with torch.no_grad():
            attend(q, q, q, block_mask=flex._block_mask(Mask(True, 100), q.shape[2], q.shape[2], q.device))
    assert counters["frames"]["ok"] == counters["frames"]["total"] == 11
