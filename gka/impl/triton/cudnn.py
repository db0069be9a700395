"""Backward pass of causal attention with constant norms by cuDNN's kernel, where torch has it.

The norms of the keys cancel, so that W_ij = softmax_j(q_i.k_j) with q = x / sigma^2. Forward is ours, whose levels are
the log-sum-exp that cuDNN asks for, in units of log 2. Of its gradients dq, dk and dv follow

    dx = dq / sigma^2, dkeys = dk, dvalues = dv, added where the tensors are the same
    dlog_sigma = -2 sum_i x_i.dq_i / sigma^2

As sdpa's, dx lacks its part along x, which the norm in front of x removes. What y lost in rounding is in delta_i =
g_i.y_i, so that row sums of G are not 0 but e_i, and dlog_sigma is off by 2 sum_i e_i |x_i|^2 / sigma^2; backward.py
has no such term, as it multiplies G by distances. In bfloat16 that can be more than the error budget allows, where
|x|^2 / sigma^2 is large. The rounding of q, dq and G to the dtype of x is small beside it.
"""

import os

import torch
import triton
import triton.language as tl

from gka.bandwidth import inverse_variance as inverse_variances
from gka.impl.triton.backward import store_partial
from gka.impl.triton.tiles import LN_2, LOG2_E, head_of, inverse_variance, load_tile, program, store_tile

DTYPES = (torch.bfloat16, torch.float16)
BLOCK = 64
OTHER_LAYOUT = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"  # where it is set, torch stores the log-sum-exp in another order


@triton.jit
def gka_join_kernel(p_x, p_dq, p_dk, p_dv, p_log_sigma, p_dx, p_dls, sx_b, sx_t, sx_h, H, T, D: tl.constexpr,
                    BLOCK_D: tl.constexpr, BM: tl.constexpr, OWN_KEYS: tl.constexpr, OWN_VALUES: tl.constexpr,
                    BOUND: tl.constexpr):  # fmt: skip
    """dx, and one partial sum of dlog_sigma per program into p_dls, (H, B, row blocks) float32. All but x are
    (B, T, H, D) contiguous.
    """
    row_block, bh = program(T, BM)
    o_t = row_block * BM + tl.arange(0, BM)
    inverse = inverse_variance(p_log_sigma, bh % H, BOUND)
    b_x = load_tile(head_of(p_x, bh, H, sx_b, sx_h), o_t, sx_t, T, D, BLOCK_D, True).to(tl.float32)
    b_dx = load_tile(head_of(p_dq, bh, H, T * H * D, D), o_t, H * D, T, D, BLOCK_D, True).to(tl.float32) * inverse
    b_dls = tl.sum(b_x * b_dx, 1) * LOG2_E
    if OWN_KEYS:
        b_dx += load_tile(head_of(p_dk, bh, H, T * H * D, D), o_t, H * D, T, D, BLOCK_D, True).to(tl.float32)
        if OWN_VALUES:
            b_dx += load_tile(head_of(p_dv, bh, H, T * H * D, D), o_t, H * D, T, D, BLOCK_D, True).to(tl.float32)
    store_tile(head_of(p_dx, bh, H, T * H * D, D), o_t, H * D, b_dx, T, D, BLOCK_D)
    store_partial(p_dls, b_dls, p_log_sigma, bh, H, tl.cdiv(T, BM), BOUND)


def serves(grad_y: torch.Tensor, x: torch.Tensor, keys: torch.Tensor | None, values: torch.Tensor | None) -> bool:
    """Whether cuDNN takes these tensors; its sums have no fixed order."""
    tensors = [t for t in (grad_y, x, keys, values) if t is not None]
    fits = x.dtype in DTYPES and x.shape[3] % 8 == 0 and tensors[-1].shape[1] == x.shape[1]
    fits = fits and (keys is None or values is not None) and not torch.are_deterministic_algorithms_enabled()
    aligned = all(t.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in t.stride()[:3]) for t in tensors)
    return fits and aligned and OTHER_LAYOUT not in os.environ


def softmax_backward(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of causal softmax attention, of (dy, q, k, v, y), (B, H, T, D) each, and of the log-sum-exp,
    (B, H, T, 1) float32.
    """
    length, dy = tensors[0].shape[2], tensors[0]
    unused = torch.empty((), dtype=torch.int64, device=dy.device)  # seed and offset of a dropout
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *tensors, unused, unused, None, None, None, length, length, 0.0, True, scale=1.0
    )


def backward(grad_y, x, keys, values, log_sigma, y, level, block_d: int, bound: float, gradients) -> None:
    """Write the gradients of `op.attend_backward`. keys: only beside values."""
    batch, length, heads, head_dim = x.shape
    query = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(x, inverse_variances(log_sigma)[:, None], out=query)  # in float32, rounded once
    features = (x if keys is None else keys, x if values is None else values)
    by_head = [t.transpose(1, 2) for t in (grad_y, query, *features, y)]
    parts = softmax_backward(*by_head, (level * LN_2.value).unsqueeze(-1))
    dq, dk, dv = (t.transpose(1, 2).contiguous() for t in parts)
    blocks = triton.cdiv(length, BLOCK)
    dls = x.new_empty((heads, batch * blocks), dtype=torch.float32)
    gka_join_kernel[(batch * heads * blocks,)](
        x, dq, dk, dv, log_sigma, gradients[0], dls, *x.stride()[:3], heads, length, D=head_dim, BLOCK_D=block_d,
        BM=BLOCK, OWN_KEYS=keys is None, OWN_VALUES=values is None, BOUND=bound)  # fmt: skip
    torch.sum(dls, dim=1, out=gradients[1])
    gradients[2:] = [t for t, apart in ((dk, keys), (dv, values)) if apart is not None]
