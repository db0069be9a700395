"""What the operator leaves unwritten turns a test red, because fresh buffers are full of NaN here (conftest.py)."""

import pytest

from gka.impl.triton import launch
from operator_cases import check

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")


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
