"""Forward pass: y = W v without building W, and what the backward pass needs of each row.

In self-attention K_ii = 1 is the row's maximum, so its exponent |x_i|^2 / (2 sigma^2) is subtracted from the start: no
running maximum, no rescaling, and eps stays exact. Foreign keys need the running maximum. Few queries
over many keys (decoding) are split over programs, whose partial sums `gka_merge_kernel` adds.
"""

import triton
import triton.language as tl

from gka.impl.triton.tiles import (
    LOG2_E,
    NORM_COMPUTED,
    NORM_CONSTANT,
    NORM_LOADED,
    PRECISION,
    clear,
    copy_rows,
    head_of,
    in_reach,
    inverse_variance,
    load_tile,
    lost_rows,
    partners,
    program,
    seen_rows,
    sequence_of,
    spans,
    squared_norm,
    store_tile,
)

LOWEST = tl.constexpr(-1e30)  # stands for minus infinity, whose differences would be NaN


@triton.jit
def gka_norm_kernel(p_x, p_lengths, p_norm, s_b, s_t, s_h, H, T, D: tl.constexpr, BLOCK_D: tl.constexpr,
                    BM: tl.constexpr):  # fmt: skip
    """|x_j|^2, (B, H, T) float32, for NORM_LOADED; 0 for padding."""
    row_block, bh = program(T, BM)
    o_t = row_block * BM + tl.arange(0, BM)
    tokens, _ = seen_rows(p_lengths, bh // H, T, T, 0, True, False)
    b_x = load_tile(head_of(p_x, bh, H, s_b, s_h), o_t, s_t, tokens, D, BLOCK_D, True)
    tl.store(p_norm + bh.to(tl.int64) * T + o_t, squared_norm(b_x), mask=o_t < T)


@triton.jit
def _forward_tile(acc, b_sum, b_max, b_q, scale, p_k, p_v, p_norm, sk_t, sv_t, n0, o_i, Tk, before, after,
                  D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr, OWN_KEYS: tl.constexpr,
                  OWN_VALUES: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr,
                  MASKED: tl.constexpr):  # fmt: skip
    o_j = n0 + tl.arange(0, BN)
    b_k = load_tile(p_k, o_j, sk_t, Tk, D, BLOCK_D, MASKED)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    if NORM == NORM_COMPUTED:
        b_s -= (squared_norm(b_k) * (0.5 * scale))[None, :]
    elif NORM == NORM_LOADED:
        b_s -= (tl.load(p_norm + o_j, mask=o_j < Tk, other=0.0) * (0.5 * scale))[None, :]
    if MASKED:
        b_s = tl.where(in_reach(o_i, o_j, Tk, before, after, HAS_BEFORE, HAS_AFTER), b_s, float("-inf"))
    if not OWN_KEYS:
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        shrink = tl.exp2(b_max - b_new)
        acc, b_sum, b_max = acc * shrink[:, None], b_sum * shrink, b_new
    b_p = tl.exp2(b_s - b_max[:, None])
    b_sum += tl.sum(b_p, 1)
    b_v = b_k
    if not OWN_VALUES:
        b_v = load_tile(p_v, o_j, sv_t, Tk, D, BLOCK_D, MASKED)
    return tl.dot(b_p.to(b_v.dtype), b_v, acc, input_precision=PRECISION), b_sum, b_max


@triton.jit
def _store_split(p_partial, acc, b_sum, b_max, rows, o_t, Tq, BM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Into p_partial, (splits, B, H, Tq, BLOCK_D + 2) contiguous: unnormalised y, row sum, maximum."""
    total_rows = tl.num_programs(0) // tl.cdiv(Tq, BM) * Tq
    o_d = tl.arange(0, BLOCK_D)
    p_row = p_partial + (tl.program_id(1).to(tl.int64) * total_rows + rows) * (BLOCK_D + 2)
    tl.store(p_row[:, None] + o_d[None, :], acc, mask=o_t[:, None] < Tq)
    tl.store(p_row + BLOCK_D, b_sum, mask=o_t < Tq)
    tl.store(p_row + BLOCK_D + 1, b_max, mask=o_t < Tq)


@triton.jit(do_not_specialize=["before", "after", "chunk"])
def gka_forward_kernel(
        p_x, p_k, p_v, p_log_sigma, p_lengths, p_starts, p_norm, p_y, p_level, p_partial, sx_b, sx_t, sx_h, sk_b, sk_t,
        sk_h, sv_b, sv_t, sv_h, H, Tq, Tk, before, after, chunk, eps, D: tl.constexpr, BLOCK_D: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, NORM: tl.constexpr, OWN_KEYS: tl.constexpr,
        OWN_VALUES: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, SPLIT: tl.constexpr,
        BOUND: tl.constexpr):  # fmt: skip
    """Programs (row block of a head, split). TAIL: width of the tiles after the last whole one, <= BN.

    p_y: (B, Tq, H, D). p_level: (B, H, Tq), log2 of the row sum, so that W_ij = 2^(s_ij - level_i). p_norm: (B, H, Tk),
    read if NORM_LOADED, written if NORM_COMPUTED in self-attention. p_partial: what SPLIT writes in place of y and
    level. All are contiguous; all but p_y are float32. p_lengths: (B,) int32 or int64, or None. p_starts: of
    `sequence_of`.
    """
    row_block, bh, origin, length = sequence_of(p_starts, Tq, H, BM, True)  # causal: the long rows first
    p_x = head_of(p_x, bh, H, sx_b, sx_h) + origin * sx_t
    p_k = head_of(p_k, bh, H, sk_b, sk_h) + origin * sk_t
    p_v = head_of(p_v, bh, H, sv_b, sv_h) + origin * sv_t
    p_norm += bh.to(tl.int64) * Tk + origin
    first_row = bh.to(tl.int64) * Tq + origin
    if p_starts is not None:
        Tq, Tk = length, length
    scale = LOG2_E * inverse_variance(p_log_sigma, bh % H, BOUND)
    o_t = row_block * BM + tl.arange(0, BM)
    o_i = o_t + (Tk - Tq)  # the last query is aligned with the last key
    num_queries, num_keys = seen_rows(p_lengths, bh // H, Tq, Tk, before, OWN_KEYS, HAS_BEFORE)
    b_q = load_tile(p_x, o_t, sx_t, num_queries, D, BLOCK_D, True)
    b_max = tl.full([BM], LOWEST, tl.float32)
    if OWN_KEYS:
        b_norm = squared_norm(b_q)
        b_max = b_norm * (scale if NORM == NORM_CONSTANT else 0.5 * scale)
        if NORM == NORM_COMPUTED:
            tl.store(p_norm + o_t, b_norm, mask=o_t < Tk)
    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    first = row_block * BM + (Tk - Tq)
    last = tl.minimum(row_block * BM + BM, num_queries) - 1 + (Tk - Tq)
    looked_at = partners(p_lengths, p_starts, row_block * BM, num_queries, num_keys)
    bounds = spans(first, last, looked_at, before, after, HAS_BEFORE, HAS_AFTER, BN)
    for span in tl.static_range(3):
        start, end = bounds[span], bounds[span + 1]
        if SPLIT:
            start = tl.maximum(start, tl.program_id(1) * chunk)
            end = tl.minimum(end, tl.program_id(1) * chunk + chunk)
        if span != 0 or HAS_BEFORE:
            for n0 in range(start, end, TAIL if span == 2 else BN):
                acc, b_sum, b_max = _forward_tile(
                    acc, b_sum, b_max, b_q, scale, p_k, p_v, p_norm, sk_t, sv_t, n0, o_i, num_keys, before, after, D,
                    BLOCK_D, TAIL if span == 2 else BN, NORM, OWN_KEYS, OWN_VALUES, HAS_BEFORE, HAS_AFTER,
                    span != 1)  # fmt: skip
    rows = first_row + o_t
    acc = clear(p_lengths, acc, o_t, num_queries)
    b_sum = clear(p_lengths, b_sum, o_t, num_queries, 1.0)
    if SPLIT:
        _store_split(p_partial, acc, b_sum, b_max, rows, o_t, Tq, BM, BLOCK_D)
    else:
        lost = lost_rows(b_sum, o_t, Tq)
        if OWN_KEYS:
            b_sum = tl.where(lost, 1.0, b_sum)
        b_sum += eps
        tl.store(p_level + rows, b_max + tl.log2(b_sum), mask=o_t < Tq)
        p_y = head_of(p_y, bh, H, Tq * H * D, D) + origin * (H * D)
        store_tile(p_y, o_t, H * D, acc / b_sum[:, None], Tq, D, BLOCK_D)
        if OWN_KEYS:
            copy_rows(p_v, sv_t, p_y, H * D, o_t, lost, D, BLOCK_D)  # their limit is v_i


@triton.jit
def gka_merge_kernel(p_partial, p_y, p_level, H, Tq, splits, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add the splits' partial sums of one query of one head, the program's."""
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = tl.full([], 0.0, tl.float32)
    highest = tl.full([], LOWEST, tl.float32)
    for split in range(splits):
        p_row = p_partial + (split * tl.num_programs(0) + row) * (BLOCK_D + 2)
        new = tl.maximum(highest, tl.load(p_row + BLOCK_D + 1))
        shrink = tl.exp2(highest - new)
        weight = tl.exp2(tl.load(p_row + BLOCK_D + 1) - new)
        acc = acc * shrink + weight * tl.load(p_row + o_d)
        total = total * shrink + weight * tl.load(p_row + BLOCK_D)
        highest = new
    tl.store(p_level + row, highest + tl.log2(total))
    p_row = head_of(p_y, tl.program_id(0) // Tq, H, Tq * H * D, D) + tl.program_id(0) % Tq * H * D
    tl.store(p_row + o_d, (acc / total).to(p_y.dtype.element_ty), mask=o_d < D)
