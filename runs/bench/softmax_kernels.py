"""Plain flash attention in Triton, forward and backward: what the Gaussian kernels' instructions are counted against.

Softmax attention with separate queries, keys and values, written as the Gaussian kernels are: the same loading of
tiles, the same masks (whole tiles need none), exponents in units of log 2 with the scale folded into them, 1/sqrt(D)
applied to dq and dk once, no atomic additions. The forward pass keeps a running maximum; the backward pass is one
kernel for dq and one for dk and dv, seven matrix products in all. Only the interpreter and the compiler have run them.
"""

import math

import torch
import triton
import triton.language as tl

from gka.impl.triton.configs import Config
from gka.impl.triton.tiles import LN_2, PRECISION, head_of, in_reach, load_tile, program, spans, store_tile

LOG2_E = math.log2(math.e)
LOWEST = tl.constexpr(-1e30)  # stands for minus infinity, whose differences would be NaN


@triton.jit
def _forward_tile(acc, b_sum, b_max, b_q, scale, p_k, p_v, s_t, n0, o_i, T, D: tl.constexpr, BN: tl.constexpr,
                  CAUSAL: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    o_j = n0 + tl.arange(0, BN)
    b_k = load_tile(p_k, o_j, s_t, T, D, D, MASKED)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if MASKED:
        b_s = tl.where(in_reach(o_i, o_j, T, 0, 0, False, CAUSAL), b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
    shrink = tl.exp2(b_max - b_new)
    b_p = tl.exp2(b_s * scale - b_new[:, None])
    b_sum = b_sum * shrink + tl.sum(b_p, 1)
    b_v = load_tile(p_v, o_j, s_t, T, D, D, MASKED)
    acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, b_sum, b_new


@triton.jit
def softmax_forward_kernel(p_q, p_k, p_v, p_y, p_level, s_b, s_t, s_h, H, T, scale, D: tl.constexpr, BM: tl.constexpr,
                           BN: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """y = softmax(q k^T / sqrt(D)) v, (B, T, H, D) contiguous, and p_level, log2 of the row sums, (B, H, T) float32.

    scale: log2(e) / sqrt(D).
    """
    row_block, bh = program(T, BM)
    row_block = tl.cdiv(T, BM) - 1 - row_block  # causal: the long rows first
    p_k = head_of(p_k, bh, H, s_b, s_h)
    p_v = head_of(p_v, bh, H, s_b, s_h)
    o_t = row_block * BM + tl.arange(0, BM)
    b_q = load_tile(head_of(p_q, bh, H, s_b, s_h), o_t, s_t, T, D, D, True)
    b_max = tl.full([BM], LOWEST, tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    first, last = row_block * BM, tl.minimum(row_block * BM + BM, T) - 1
    bounds = spans(first, last, T, 0, 0, False, CAUSAL, BN)
    for span in tl.static_range(1, 3):
        for n0 in range(bounds[span], bounds[span + 1], BN):
            acc, b_sum, b_max = _forward_tile(
                acc, b_sum, b_max, b_q, scale, p_k, p_v, s_t, n0, o_t, T, D, BN, CAUSAL, span != 1
            )
    tl.store(p_level + bh.to(tl.int64) * T + o_t, b_max + tl.log2(b_sum), mask=o_t < T)
    store_tile(head_of(p_y, bh, H, T * H * D, D), o_t, H * D, acc / b_sum[:, None], T, D, D)


@triton.jit
def softmax_rows_kernel(p_dy, p_y, p_delta, H, T, D: tl.constexpr, BM: tl.constexpr):
    """delta_i = dy_i.y_i, (B, H, T) float32; dy and y (B, T, H, D) contiguous."""
    row_block, bh = program(T, BM)
    o_t = row_block * BM + tl.arange(0, BM)
    b_dy = load_tile(head_of(p_dy, bh, H, T * H * D, D), o_t, H * D, T, D, D, True).to(tl.float32)
    b_y = load_tile(head_of(p_y, bh, H, T * H * D, D), o_t, H * D, T, D, D, True).to(tl.float32)
    tl.store(p_delta + bh.to(tl.int64) * T + o_t, tl.sum(b_dy * b_y, 1), mask=o_t < T)


@triton.jit
def _queries_tile(acc, b_q, b_dy, b_level, b_delta, scale, p_k, p_v, s_t, n0, o_i, T, D: tl.constexpr,
                  BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The program's queries look at keys n0 ... n0 + BN."""
    o_j = n0 + tl.arange(0, BN)
    b_k = load_tile(p_k, o_j, s_t, T, D, D, MASKED)
    b_v = load_tile(p_v, o_j, s_t, T, D, D, MASKED)
    b_p = tl.exp2(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale - b_level[:, None])
    if MASKED:
        b_p = tl.where(in_reach(o_i, o_j, T, 0, 0, False, CAUSAL), b_p, 0.0)
    b_ds = b_p * (tl.dot(b_dy, tl.trans(b_v), input_precision=PRECISION) - b_delta[:, None])
    return tl.dot(b_ds.to(b_k.dtype), b_k, acc, input_precision=PRECISION)


@triton.jit
def softmax_queries_kernel(p_q, p_k, p_v, p_dy, p_level, p_delta, p_dq, s_b, s_t, s_h, H, T, scale, D: tl.constexpr,
                           BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """dq, (B, T, H, D) contiguous."""
    row_block, bh = program(T, BM)
    p_k = head_of(p_k, bh, H, s_b, s_h)
    p_v = head_of(p_v, bh, H, s_b, s_h)
    o_t = row_block * BM + tl.arange(0, BM)
    rows = bh.to(tl.int64) * T + o_t
    b_q = load_tile(head_of(p_q, bh, H, s_b, s_h), o_t, s_t, T, D, D, True)
    b_dy = load_tile(head_of(p_dy, bh, H, T * H * D, D), o_t, H * D, T, D, D, True)
    b_level = tl.load(p_level + rows, mask=o_t < T, other=0.0)
    b_delta = tl.load(p_delta + rows, mask=o_t < T, other=0.0)
    acc = tl.zeros([BM, D], tl.float32)
    first, last = row_block * BM, tl.minimum(row_block * BM + BM, T) - 1
    bounds = spans(first, last, T, 0, 0, False, CAUSAL, BN)
    for span in tl.static_range(1, 3):
        for n0 in range(bounds[span], bounds[span + 1], BN):
            acc = _queries_tile(
                acc, b_q, b_dy, b_level, b_delta, scale, p_k, p_v, s_t, n0, o_t, T, D, BN, CAUSAL, span != 1
            )
    store_tile(head_of(p_dq, bh, H, T * H * D, D), o_t, H * D, acc * (scale * LN_2), T, D, D)


@triton.jit
def _keys_tile(acc_k, acc_v, b_k, b_v, scale, p_q, p_dy, p_level, p_delta, s_t, sdy_t, n0, o_j, T, D: tl.constexpr,
               BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Queries n0 ... n0 + BN look at the program's keys: tiles are transposed, (keys, queries)."""
    o_i = n0 + tl.arange(0, BN)
    b_q = load_tile(p_q, o_i, s_t, T, D, D, MASKED)
    b_dy = load_tile(p_dy, o_i, sdy_t, T, D, D, MASKED)
    if MASKED:
        b_level = tl.load(p_level + o_i, mask=o_i < T, other=0.0)
        b_delta = tl.load(p_delta + o_i, mask=o_i < T, other=0.0)
    else:
        b_level = tl.load(p_level + o_i)
        b_delta = tl.load(p_delta + o_i)
    b_p = tl.exp2(tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale - b_level[None, :])
    if MASKED:
        b_p = tl.where(in_reach(o_j, o_i, T, 0, 0, CAUSAL, False), b_p, 0.0)
    acc_v = tl.dot(b_p.to(b_dy.dtype), b_dy, acc_v, input_precision=PRECISION)
    b_ds = b_p * (tl.dot(b_v, tl.trans(b_dy), input_precision=PRECISION) - b_delta[None, :])
    return tl.dot(b_ds.to(b_q.dtype), b_q, acc_k, input_precision=PRECISION), acc_v


@triton.jit
def softmax_keys_kernel(p_q, p_k, p_v, p_dy, p_level, p_delta, p_dk, p_dv, s_b, s_t, s_h, H, T, scale, D: tl.constexpr,
                        BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """dk and dv, (B, T, H, D) contiguous."""
    row_block, bh = program(T, BM)
    p_q = head_of(p_q, bh, H, s_b, s_h)
    p_dy = head_of(p_dy, bh, H, T * H * D, D)
    p_level += bh.to(tl.int64) * T
    p_delta += bh.to(tl.int64) * T
    o_t = row_block * BM + tl.arange(0, BM)
    b_k = load_tile(head_of(p_k, bh, H, s_b, s_h), o_t, s_t, T, D, D, True)
    b_v = load_tile(head_of(p_v, bh, H, s_b, s_h), o_t, s_t, T, D, D, True)
    acc_k = tl.zeros([BM, D], tl.float32)
    acc_v = tl.zeros([BM, D], tl.float32)
    first, last = row_block * BM, tl.minimum(row_block * BM + BM, T) - 1
    bounds = spans(first, last, T, 0, 0, CAUSAL, False, BN)
    for span in tl.static_range(3):
        if span != 0 or CAUSAL:
            for n0 in range(bounds[span], bounds[span + 1], BN):
                acc_k, acc_v = _keys_tile(
                    acc_k, acc_v, b_k, b_v, scale, p_q, p_dy, p_level, p_delta, s_t, H * D, n0, o_t, T, D, BN, CAUSAL,
                    span != 1)  # fmt: skip
    acc_k *= scale * LN_2
    store_tile(head_of(p_dk, bh, H, T * H * D, D), o_t, H * D, acc_k, T, D, D)
    store_tile(head_of(p_dv, bh, H, T * H * D, D), o_t, H * D, acc_v, T, D, D)


def _launch(kernel, config: Config, *tensors: torch.Tensor, causal: bool) -> None:
    """Run `kernel` over tensors of which the first is (B, T, H, D), and contiguous as all of its shape."""
    batch, length, heads, head_dim = tensors[0].shape
    grid = (batch * heads * triton.cdiv(length, config.rows),)
    kernel[grid](
        *tensors, *tensors[0].stride()[:3], heads, length, LOG2_E / math.sqrt(head_dim), D=head_dim, BM=config.rows,
        BN=config.columns, CAUSAL=causal, num_warps=config.warps, num_stages=config.stages)  # fmt: skip


def forward(q, k, v, causal: bool, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, level) of q, k and v, each (B, T, H, D) contiguous with D a power of two from 16 on."""
    y, level = torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    _launch(softmax_forward_kernel, config, q, k, v, y, level, causal=causal)
    return y, level


def backward(dy, q, k, v, y, level, causal: bool, config: Config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) for the incoming gradient dy, contiguous as all."""
    batch, length, heads, head_dim = q.shape
    delta, dq, dk, dv = (torch.empty_like(t) for t in (level, q, k, v))
    grid = (batch * heads * triton.cdiv(length, 64),)
    softmax_rows_kernel[grid](dy, y, delta, heads, length, D=head_dim, BM=64)
    _launch(softmax_queries_kernel, config, q, k, v, dy, level, delta, dq, causal=causal)
    _launch(softmax_keys_kernel, config, q, k, v, dy, level, delta, dk, dv, causal=causal)
    return dq, dk, dv
