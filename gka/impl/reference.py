"""The paper's equations 3, 4 and 7, literally: build K, mask it, normalise its rows, mix. O(Tq * Tk) memory; the oracle
of every test.

It has derivatives of every order, reverse and forward, and the transforms of torch.func (kernel.py says what those
take).
"""

import torch

from gka.kernel import log_kernel
from gka.request import GaussianRequest, Request, Serves

SERVES = Serves(options=frozenset({"causal", "window"}), applies_eps=True)


def unavailable(request: Request) -> str | None:
    """The reference serves every request on every device."""
    return None


def gaussian(request: GaussianRequest) -> torch.Tensor:
    """y, (B, Tq, H, D) in x.dtype. Half precision is computed in float32."""
    return output_and_weights(request)[0]


def output_and_weights(request: GaussianRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """(y: (B, Tq, H, D) in x.dtype, W: (B, H, Tq, Tk) in the computing dtype), from the definition."""
    x = request.x
    dtype = torch.promote_types(x.dtype, torch.float32)
    exponent = log_kernel(x, request.key_features, request.log_sigma)
    visible = request.mask.dense(request.num_queries, request.num_keys, x.device)
    if request.eps is None:
        weights = exponent.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    else:
        affinity = exponent.exp() * visible
        weights = affinity / (affinity.sum(dim=-1, keepdim=True) + request.eps)
    y = weights @ request.value_features.to(dtype).transpose(1, 2)
    return y.transpose(1, 2).to(x.dtype), weights
