"""The same softmax as a FlexAttention score function and block mask: windows skip whole tiles, the terms of the norms are added to the scores.

Made for CUDA. On CPU torch offers FlexAttention's forward only, which is enough to test the score function. `eps` is ignored.
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gka.bandwidth import inverse_variance
from gka.expansion import expand
from gka.masking import Mask

TILE = 128
MIN_HEAD_DIM = 16


def unavailable(x, needs_grad: bool, keys=None, constant_norm: bool = False) -> str | None:
    """Why FlexAttention cannot serve these features, or None if it can."""
    if x.shape[-1] < MIN_HEAD_DIM:
        return f"FlexAttention needs head_dim >= {MIN_HEAD_DIM}, got {x.shape[-1]}"
    if x.dtype == torch.float64:
        return "FlexAttention does not take float64"
    if not x.is_cuda and needs_grad:
        return "FlexAttention has no backward pass outside CUDA"
    return None


@functools.lru_cache(maxsize=64)
def _block_mask(mask: Mask, num_queries: int, num_keys: int, device):
    """The mask over whole tiles, padded keys hidden, for any caller: never an inference tensor, which training could not save."""
    with torch.inference_mode(False), torch.no_grad():
        offset, end = num_keys - num_queries, num_keys
        if not torch.compiler.is_compiling():
            # As tensors they leave `_compiled` one program for all lengths that fill the same tiles; a caller's own graph knows its lengths.
            offset, end = (torch.tensor(n, device=device) for n in (offset, end))

        def mask_mod(b, h, i, j):
            return mask.visible(i + offset, j) & (j < end)

        return create_block_mask(mask_mod, None, None, _round_up(num_queries), _round_up(num_keys), device=device)


def _round_up(length: int) -> int:
    return -(-length // TILE) * TILE


def _attend(q, k, v, mask: Mask, scale: float, score_mod=None):
    num_queries, num_keys = q.shape[1], k.shape[1]
    block_mask = _block_mask(mask, num_queries, num_keys, q.device)
    # Whole tiles: FlexAttention's gradients are NaN for ragged lengths with a score_mod (pytorch#153799).
    q, k, v = (F.pad(t, (0, 0, 0, 0, 0, _round_up(t.shape[1]) - t.shape[1])).transpose(1, 2) for t in (q, k, v))
    attend = flex_attention if torch.compiler.is_compiling() or not q.is_cuda else _compiled()
    options = (
        {"FLOAT32_PRECISION": "'ieee'"} if q.is_cuda and score_mod is not None else None
    )  # tf32 products beside float32 norms do not cancel
    y = attend(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, kernel_options=options)
    return y.transpose(1, 2)[:, :num_queries]


@functools.cache
def _compiled():
    return torch.compile(flex_attention, dynamic=False)


def dot_product(q, k, v, mask: Mask, scale: float):
    """softmax(scale * q.k + mask) v in the (B, T, H, D) layout."""
    return _attend(q, k, v, mask, scale)


def gaussian(x, keys, values, log_sigma, mask: Mask, constant_norm: bool, eps: float | None = None):
    """Arguments, layout and precision as in `sdpa.gaussian`. Scaling the scores instead of x would make the gradient of log_sigma one atomic
    addition per score."""
    if constant_norm:
        return _attend((x * inverse_variance(log_sigma)[:, None]).to(x.dtype), keys, values, mask, scale=1.0)
    scaled, keys, values, a, b, offset = expand(x, keys, values, log_sigma, mask)
    a, b = (F.pad(t.transpose(1, 2), (0, _round_up(t.shape[1]) - t.shape[1])) for t in (a, b))  # (B, H, whole tiles)

    def add_norms(score, batch, h, i, j):
        return score + (a[batch, h, i] + b[batch, h, j])

    y = _attend(scaled, keys, values, mask, scale=1.0, score_mod=add_norms)
    return (y if offset is None else y + offset).to(x.dtype)
