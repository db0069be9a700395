"""The paper's equations 3, 4 and 7, literally: build K, mask it, normalise its rows, mix. O(Tq * Tk) memory; the oracle of every test.

It has derivatives of every order, reverse and forward, and the transforms of torch.func (kernel.py says what those take).
"""

import torch

from gka.kernel import log_kernel
from gka.masking import Mask


def gaussian(x, keys, values, log_sigma, mask: Mask, eps: float | None):
    """Gaussian kernel attention from the definition. Legend: B batch, T tokens, H heads, D head_dim.

    x: (B, Tq, H, D). keys, values: (B, Tk, H, D). log_sigma: (H,). Half precision is computed in float32.
    eps: added to the row sum (eq. 4), or None to normalise as a softmax, which survives rows whose affinities all underflow.
    Returns (y: (B, Tq, H, D) in x.dtype, W: (B, H, Tq, Tk) in the computing dtype).
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (x, keys, values))  # (B, H, T, D)
    exponent = log_kernel(q, k, log_sigma)
    visible = mask.dense(x.shape[1], keys.shape[1], x.device)
    if eps is None:
        weights = exponent.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    else:
        affinity = exponent.exp() * visible
        weights = affinity / (affinity.sum(dim=-1, keepdim=True) + eps)
    y = weights @ v
    return y.transpose(1, 2).to(x.dtype), weights
