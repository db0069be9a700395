"""Gaussian kernel attention as a shifted softmax through torch's scaled_dot_product_attention: exact, never builds N x N.

|x_i|^2 cancels in the row normalisation, so W = softmax_j(x_i.x_j / sigma^2 - |x_j|^2 / (2 sigma^2))   (gka/README.md).
Heads of constant norm need no second term: plain attention with q = x / sigma^2. Otherwise the term rides in extra channels that
are 1 in q. `eps` is not applied: since K_ii = 1 it changes a result by at most a relative 1e-6.
"""

import torch
import torch.nn.functional as F

from gka.attention.bandwidth import inverse_variance
from gka.attention.masking import Mask

HALF = (torch.bfloat16, torch.float16)


def dot_product(q, k, v, mask: Mask, scale: float):
    """softmax(scale * q.k + mask) v in the (B, T, H, D) layout."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    num_queries, num_keys = q.shape[2], k.shape[2]
    plain_causal = mask.causal and mask.window is None and num_queries == num_keys
    attn_mask = None if plain_causal or mask == Mask() else mask.dense(num_queries, num_keys, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=plain_causal, scale=scale).transpose(1, 2)


def gaussian(x, keys, values, log_sigma, mask: Mask, constant_norm: bool):
    """Arguments and layout as in `reference.gaussian`. Rounds x / sigma^2 to x.dtype; half precision carries |x_j|^2 in three channels."""
    compute = torch.promote_types(x.dtype, torch.float32)
    inverse = inverse_variance(log_sigma).to(compute)[:, None]  # (H, 1)
    if constant_norm:
        return dot_product((x * inverse).to(x.dtype), keys, values, mask, scale=1.0)

    offset = None
    if x.dtype not in HALF:
        # Distances do not see a common shift; removing it avoids cancellation. A causal row may only depend on what it sees,
        # or rounding would leak the future: the first key is the past of everyone. Detached: its gradient is exactly zero.
        offset = (keys[:, :1] if mask.causal else keys.mean(dim=1, keepdim=True)).detach()
        own_values = values is keys
        shifted = keys - offset
        x, keys, values = shifted if x is keys else x - offset, shifted, shifted if own_values else values
        offset = offset if own_values else None

    bias = -0.5 * keys.to(compute).square().sum(-1, keepdim=True) * inverse  # (B, Tk, H, 1)
    channels = _split(bias, x.dtype) if x.dtype in HALF else [bias]
    padding = -(x.shape[-1] + len(channels)) % 8 if x.is_cuda else 0  # fused CUDA kernels want multiples of 8
    ones = x.new_ones(()).expand(*x.shape[:-1], len(channels))
    q = F.pad(torch.cat([(x * inverse).to(x.dtype), ones], dim=-1), (0, padding))
    k = F.pad(torch.cat([keys, *channels], dim=-1), (0, padding))
    v = F.pad(values, (0, q.shape[-1] - values.shape[-1]))  # equal head sizes, or torch falls back to N x N
    y = dot_product(q, k, v, mask, scale=1.0)[..., : values.shape[-1]]
    return y if offset is None else y + offset


def _split(bias, dtype):
    """A float32 tensor as three half-precision summands (24 bits); the gradient flows through the first alone, once."""
    bias = bias.clamp(min=torch.finfo(dtype).min)
    high = bias.to(dtype)
    middle = (bias - high).to(dtype)
    low = (bias - high - middle).to(dtype)
    return [high, middle, low]
