"""Gaussian kernel attention as a shifted softmax through torch's scaled_dot_product_attention: exact, never builds N x N.

|x_i|^2 cancels in the row normalisation, so W = softmax_j(x_i.x_j / sigma^2 - |x_j|^2 / (2 sigma^2))   (gka/README.md).
Heads of constant norm need no second term: plain attention with q = x / sigma^2. Otherwise the term rides in extra channels that
are 1 in q. `eps` is ignored: since K_ii = 1 it changes y by at most a relative 1e-6.
"""

import torch
import torch.nn.functional as F

from gka.attention.bandwidth import inverse_variance
from gka.attention.masking import Mask


def dot_product(q, k, v, mask: Mask, scale: float):
    """softmax(scale * q.k + mask) v in the (B, T, H, D) layout."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    num_queries, num_keys = q.shape[2], k.shape[2]
    plain_causal = False
    if mask.causal and mask.window is None and num_queries == num_keys:  # by a branch: with dynamic shapes the comparison is no bool
        plain_causal = True
    attn_mask = None if plain_causal or mask == Mask() else mask.dense(num_queries, num_keys, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=plain_causal, scale=scale).transpose(1, 2)


def unavailable(x, needs_grad: bool, keys=None, constant_norm: bool = False) -> str | None:
    """SDPA serves every request on every device."""
    return None


def gaussian(x, keys, values, log_sigma, mask: Mask, constant_norm: bool, eps: float | None = None):
    """Arguments and layout as in `reference.gaussian`.

    x / sigma^2 is rounded to x.dtype. Without constant norms, bfloat16 carries |k_j|^2 in three channels and float16, whose range is too
    small for it, is computed in float32.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    inverse = inverse_variance(log_sigma).to(compute)[:, None]  # (H, 1)
    if constant_norm:
        return dot_product((x * inverse).to(x.dtype), keys, values, mask, scale=1.0)
    if x.dtype == torch.float16:
        x32 = x.float()
        keys32 = x32 if keys is x else keys.float()
        values32 = keys32 if values is keys else values.float()
        return gaussian(x32, keys32, values32, log_sigma, mask, constant_norm).to(x.dtype)

    own_values, offset = values is keys, None
    if not mask.causal and x.dtype != torch.bfloat16:
        # Distances do not see a common shift; removing it avoids cancellation. Not when causal: rounding would leak the future.
        # Detached, because the gradient through it is exactly zero.
        offset = keys.mean(dim=1, keepdim=True).detach()
        shifted = keys - offset
        x, keys, values = shifted if x is keys else x - offset, shifted, shifted if own_values else values

    wide = keys.to(compute)
    bias = -0.5 * torch.linalg.vecdot(wide, wide)[..., None] * inverse  # (B, Tk, H, 1)
    channels = _split(bias) if x.dtype == torch.bfloat16 else [bias]
    head_dim = x.shape[-1]
    padding = -(head_dim + len(channels)) % 8 if x.is_cuda else 0  # fused CUDA kernels want multiples of 8
    k = torch.cat([keys, *channels, *[torch.zeros_like(channels[0])] * padding], dim=-1)
    extra = (0, k.shape[-1] - head_dim)
    q = ((k if x is keys else F.pad(x, extra)) * inverse).to(x.dtype)
    q[..., head_dim:] = 1
    v = k if own_values else F.pad(values, extra)  # equal head sizes, or torch falls back to N x N
    y = dot_product(q, k, v, mask, scale=1.0)[..., :head_dim]
    return y + offset if own_values and offset is not None else y


def _split(bias):
    """A float32 tensor as three bfloat16 summands (24 bits); the gradient flows through the first alone, once."""
    high = bias.bfloat16()
    middle = (bias - high).bfloat16()
    low = (bias - high - middle).bfloat16()
    return [high, middle, low]
