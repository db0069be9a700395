"""The Triton kernels as torch operators and as an implementation: registration, refusals, tiles."""

import pytest
import torch

from gka import gaussian_attention
from gka.impl.triton.configs import TABLES
from gka.testing import make_log_sigma
from operator_cases import DEVICE, features

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")

LOG_SIGMA = make_log_sigma(2, 32, DEVICE)
DOCUMENTS = torch.tensor([0, 3, 3, 20], dtype=torch.int32, device=DEVICE)
CALLS = {
    "causal": lambda x: (x, None, None, LOG_SIGMA.clone().requires_grad_(), None, -1, 0, True, 1e-6),
    "lengths": lambda x: (x, None, None, LOG_SIGMA, torch.tensor([13], device=DEVICE), -1, -1, False, 1e-6),
    "window, values": lambda x: (x, None, torch.randn_like(x).requires_grad_(), LOG_SIGMA, None, 5, 0, True, 1e-6),
    "documents": lambda x: (x, torch.randn_like(x), None, LOG_SIGMA, None, -1, 0, True, 0.0, DOCUMENTS),
    "foreign": lambda x: (x, torch.randn_like(x).requires_grad_(), None, LOG_SIGMA, None, -1, 0, True, 0.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_operator_is_a_proper_one(call):
    """Schema, fake tensors, autograd registration, dynamic shapes: torch's own check."""
    x = features("normal", (1, 20, 2, 32)).requires_grad_()
    torch.library.opcheck(torch.ops.gka.attend.default, CALLS[call](x))


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is there")
def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="the Triton kernels run on NVIDIA GPUs, got cpu"):
        gaussian_attention(torch.zeros(1, 4, 2, 16), torch.zeros(2), impl="triton")


def test_large_tiles_of_an_h100_have_16_rows_for_each_warp():
    """With 8, on an H200, a float32 kernel wrote outside its memory."""
    for key, config in TABLES["sm_90"].entries.items():
        assert config.rows < 64 or config.rows >= 16 * config.warps, key
