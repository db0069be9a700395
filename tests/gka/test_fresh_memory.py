"""What the operator leaves unwritten turns a test red, because fresh buffers are full of NaN here (conftest.py)."""

import pytest
import torch

from gka import gaussian_attention
from gka.impl.triton import launch
from gka.testing import make_log_sigma
from operator_cases import DEVICE, MASKS, check, features, tiles

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")

ALLOCATORS = {
    "empty": lambda x: torch.empty(3, 4, device=x.device),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided((3, 4), (4, 1), device=x.device),
    "new_empty": lambda x: x.new_empty((3, 4)),
    "new_empty in another dtype": lambda x: x.new_empty((3, 4), dtype=torch.float16),
}


@pytest.mark.parametrize("name", ALLOCATORS)
def test_fresh_buffers_are_nan(name):
    assert ALLOCATORS[name](torch.zeros(3, 4, device=DEVICE)).isnan().all()


class Launches:
    """Stands in for a kernel: kernel[grid](...) does nothing."""

    def __getitem__(self, grid):
        return lambda *arguments, **options: None


@pytest.mark.parametrize(
    "kernel,causal,name",
    [
        ("gka_forward_kernel", True, "y"),
        ("gka_rows_kernel", True, "dx"),
        ("gka_queries_kernel", True, "dx"),
        ("gka_symmetric_kernel", False, "dx"),
    ],
)
def test_a_kernel_that_does_not_write_is_caught(monkeypatch, kernel, causal, name):
    monkeypatch.setattr(launch, kernel, Launches())
    with pytest.raises(AssertionError, match=f"{name} is off by nan"):
        check("triton", (1, 45, 2, 24), causal=causal)


@pytest.mark.parametrize("causal,window", MASKS[:4])
def test_the_kernels_write_every_element(causal, window):
    with tiles(32, 16):
        check("triton", (1, 45, 2, 24), causal=causal, window=window)
        check("triton", (1, 45, 2, 24), causal=causal, window=window, with_values=True)
    check("triton", (1, 70, 2, 64), torch.float16, causal=causal, window=window)
    k = features("normal", (1, 600, 2, 32))
    y = gaussian_attention(k[:, -2:], make_log_sigma(2, 32, DEVICE), keys=k, causal=True, window=window, impl="triton")
    assert torch.isfinite(y).all()
