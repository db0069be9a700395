"""The warning where float32 cannot resolve the features; it costs nothing on an accelerator or in a graph."""

import math
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gka import gaussian_attention
from operator_cases import CPU


def warned(*, log_sigma=0.0, offset=0.0, dtype=torch.float32, impl="sdpa", causal=True, times=1):
    """Messages of so many calls at one line, by Python's own rule."""
    x = torch.randn(1, 20, 2, 16, dtype=dtype) + offset
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(times):
            gaussian_attention(x, torch.full((2,), log_sigma), causal=causal, impl=impl)
    ours = [w for w in caught if str(w.message).startswith("gaussian_attention")]
    return [str(w.message) for w in ours], [w.filename for w in ours]


@pytest.mark.parametrize("impl", [CPU, "sdpa", "flex"])
def test_features_that_float32_cannot_resolve_are_warned_of_once(impl):
    for lost in (dict(log_sigma=math.log(1e-3)), dict(offset=300.0), dict(offset=300.0, dtype=torch.bfloat16)):
        messages, files = warned(impl=impl, times=3, **lost)
        assert len(messages) == 1
        assert all(word in messages[0] for word in ("normalise the heads", "float64", "impl='reference'"))
        assert files == [__file__]  # the warning names the caller's line, not ours
    centred, half = dict(offset=300.0, causal=False), dict(offset=10.0, dtype=torch.bfloat16)
    for fine in (dict(), dict(log_sigma=math.log(0.1)), dict(offset=10.0), centred, half):
        assert warned(impl=impl, **fine) == ([], [])
    assert warned(offset=300.0, dtype=torch.float64) == warned(offset=300.0, impl="reference") == ([], [])


def test_values_are_not_read_where_that_would_stall_or_break_a_graph():
    x, log_sigma = torch.full((1, 20, 2, 16), 300.0), torch.zeros(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gaussian_attention")
        gaussian_attention(x.to("meta"), log_sigma.to("meta"), causal=True, impl="sdpa")
        torch.func.vmap(lambda x: gaussian_attention(x, log_sigma, causal=True, impl="sdpa"))(x[None])
        torch.func.vmap(lambda keys: gaussian_attention(x, log_sigma, keys=keys, causal=True, impl="sdpa"))(x[None])
    compiled = torch.compile(
        lambda x: gaussian_attention(x, log_sigma, causal=True, impl="sdpa"), fullgraph=True, backend="aot_eager"
    )
    assert compiled(x).isfinite().all()


class Crossings(TorchDispatchMode):
    """Counts what comes from the CPU: there such a copy waits for the GPU, and a CUDA graph cannot hold it."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_nothing_comes_from_the_cpu(causal):
    """By torch's fake tensors, which need no GPU."""
    with FakeTensorMode(), Crossings() as crossings:
        x, log_sigma = torch.empty(1, 20, 2, 16, device="cuda"), torch.zeros(2, device="cuda")
        gaussian_attention(x, log_sigma, causal=causal, impl="sdpa")
    assert crossings.count == 0
