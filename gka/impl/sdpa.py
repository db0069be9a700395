"""Gaussian kernel attention through torch's scaled_dot_product_attention: exact, never builds N x N.

The kernel's exponent is a dot product of features with two more channels (gka/README.md):

    S_ij = -|x_i - k_j|^2 / (2 sigma^2) = [x_i / sigma^2, -|x_i|^2 / (2 sigma^2), 1] . [k_j, 1, -|k_j|^2 / (2 sigma^2)]

Heads of constant norm need neither: plain attention with q = x / sigma^2. `eps` is ignored: since K_ii = 1 it changes y by at most a
relative 1e-6.
"""

import torch
import torch.nn.functional as F

from gka.bandwidth import inverse_variance
from gka.expansion import expand
from gka.masking import Mask


def dot_product(q, k, v, mask: Mask, scale: float):
    """softmax(scale * q.k + mask) v in the (B, T, H, D) layout."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    num_queries, num_keys = q.shape[2], k.shape[2]
    plain_causal = False
    if (
        mask.causal and mask.window is None and num_queries == num_keys
    ):  # by a branch: with dynamic shapes the comparison is no bool
        plain_causal = True
    attn_mask = None if plain_causal or mask == Mask() else mask.dense(num_queries, num_keys, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=plain_causal, scale=scale).transpose(1, 2)


def unavailable(x, needs_grad: bool, keys=None, constant_norm: bool = False) -> str | None:
    """SDPA serves every request on every device."""
    return None


def gaussian(x, keys, values, log_sigma, mask: Mask, constant_norm: bool, eps: float | None = None):
    """Arguments and layout as in `reference.gaussian`. With constant norms x / sigma^2 is rounded to x.dtype; without, half precision is
    computed in float32."""
    if constant_norm:
        inverse = inverse_variance(log_sigma)[:, None]  # (H, 1)
        return dot_product((x * inverse).to(x.dtype), keys, values, mask, scale=1.0)
    scaled, keys, values, a, b, offset = expand(x, keys, values, log_sigma, mask)
    head_dim = x.shape[-1]
    padding = -(head_dim + 2) % 8 if x.is_cuda else 0  # fused CUDA kernels want multiples of 8
    q, k = _extended(scaled, a, 1.0, padding), _extended(keys, 1.0, b, padding)
    v = (
        k if values is keys else F.pad(values, (0, k.shape[-1] - head_dim))
    )  # equal head sizes, or torch falls back to N x N
    y = dot_product(q, k, v, mask, scale=1.0)[..., :head_dim]
    return (y if offset is None else y + offset).to(x.dtype)


def _extended(features, first, second, padding: int):
    """Features with two more channels, each (B, T, H) or a number, and `padding` zeros.

    Numbers are filled in where the features are: a copy from the CPU would stall every call, and could not be captured
    in a CUDA graph.
    """
    shape = features.shape[:-1]
    channels = [t if isinstance(t, torch.Tensor) else features.new_full(shape, t) for t in (first, second)]
    return F.pad(torch.cat([features, torch.stack(channels, dim=-1)], dim=-1), (0, padding))
