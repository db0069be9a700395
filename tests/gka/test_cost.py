"""The cost model against the paper's tables, the built layer and what torch's FLOP counter sees."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import gka.flops  # noqa: F401
from gka import GaussianKernelAttention, attention_cost, gaussian_attention
from operator_cases import CPU


def test_parameters_bytes_and_flops():
    for bias in (False, True):
        layer = GaussianKernelAttention(64, 4, bias=bias)
        assert attention_cost("gka", 64, 4, 10, bias=bias).parameters == sum(p.numel() for p in layer.parameters())
    softmax, gka = (attention_cost(kind, 128, 4, 100, batch=2) for kind in ("softmax", "gka"))
    assert gka.cache_bytes * 2 == softmax.cache_bytes == 2 * 2 * 100 * 128 * 2
    assert gka.operator_bytes * 2 == softmax.operator_bytes
    assert gka.matrix_bytes == 2 * 4 * 100 * 100 * 2
    assert attention_cost("gka", 128, 4, 100, window=10).flops == 100 * (2 * 128 * 128 + 4 * 10 * 128)


def counted(call, *arguments) -> tuple[int, object]:
    """(FLOPs that torch's counter sees, what the call returned)."""
    with FlopCounterMode(display=False) as counter:
        returned = call(*arguments)
    return counter.get_total_flops(), returned


@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(causal=True, window=3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", [CPU])
def test_torchs_flop_counter_sees_the_cost_models_flops(impl, dtype, options):
    layer, x = GaussianKernelAttention(64, 4, impl=impl, **options), torch.randn(2, 10, 64, dtype=dtype)
    flops = attention_cost("gka", 64, 4, 10, batch=2, window=4 if "window" in options else None).flops
    seen, y = counted(layer.to(dtype), x.requires_grad_())
    assert seen == flops and counted(y.sum().backward)[0] == 2 * flops


@pytest.mark.parametrize("impl", [CPU])
def test_torchs_flop_counter_sees_every_query_of_decoding_and_of_foreign_keys(impl):
    x, cache, log_sigma = torch.randn(2, 20, 4, 16), torch.randn(2, 30, 4, 16), torch.zeros(4)
    for queries in (1, 20):  # a kernel of its own for a few
        seen, _ = counted(lambda n: gaussian_attention(x[:, -n:], log_sigma, keys=cache, impl=impl), queries)
        assert seen == 4 * 2 * queries * 30 * 64


def test_torchs_flop_counter_sees_the_same_of_triton():
    x, log_sigma = torch.empty(2, 10, 4, 16, device="meta"), torch.empty(4, device="meta")
    seen, (y, level, norm) = counted(torch.ops.gka.attend, x, None, None, log_sigma, None, 3, 0, False, 1e-6)
    assert seen == 4 * 2 * 10 * 4 * 64
    arguments = y, x, None, None, log_sigma, None, y, level, norm, 3, 0, False
    assert counted(torch.ops.gka.attend_backward, *arguments)[0] == 2 * seen
