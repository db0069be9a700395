"""Backward pass without atomics: each program owns a block of rows, recomputes the W it needs, and writes its gradients
once.

With W_ij = 2^(s_ij - level_i), delta_i = g_i.y_i and G_ij = W_ij (g_i.v_j - delta_i) (docs/mathematics.md, Gradients; g
is the incoming gradient):

    dquery_i = (1/sigma^2) (sum_j G_ij k_j - (sum_j G_ij) x_i)         row i as a query
    dkey_j   = (1/sigma^2) (sum_i G_ij x_i - (sum_i G_ij) k_j)         row j as a key
    dvalue_j = sum_i W_ij g_i                                          row j as a value
    dlog_sigma = -2 sum_ij G_ij S_ij,  S_ij = -|x_i - k_j|^2 / (2 sigma^2)

W_ij <= 1 is imposed: beyond float32's reach (|x|^2 / sigma^2 > 1e6) rounding could make it infinite.

Causal masks and foreign keys or values: one kernel for rows as queries, then one for rows as keys and values. Together
they need more registers than there are. Self-attention under a symmetric mask: K_ij = K_ji serves both roles, one
kernel, five products a tile (as softmax attention has) into a single output.
"""

import triton
import triton.language as tl

from gka.impl.triton.tiles import (
    LN_2,
    LOG2_E,
    PRECISION,
    clear,
    head_of,
    in_reach,
    inverse_variance,
    load_row,
    load_tile,
    partners,
    program,
    programs_of,
    reload_tile,
    seen_rows,
    sequence_of,
    spans,
    squared_norm,
    store_tile,
)


@triton.jit
def gka_rows_kernel(p_dy, p_y, p_log_sigma, p_lengths, p_norm, p_level, p_delta, p_share, H, Tq, D: tl.constexpr,
                    BLOCK_D: tl.constexpr, BM: tl.constexpr, OWN_VALUES: tl.constexpr, SHARES: tl.constexpr,
                    BOUND: tl.constexpr):  # fmt: skip
    """delta_i = g_i.y_i, with OWN_VALUES times 1/sigma^2, and, with SHARES, share_i = 1 / row sum = 2^(peak_i -
    level_i), (B, H, Tq) float32; dy and y (B, Tq, H, D) contiguous. p_lengths: of the queries; what is behind is 0.
    """
    row_block, bh = program(Tq, BM)
    o_t = row_block * BM + tl.arange(0, BM)
    rows = bh.to(tl.int64) * Tq + o_t
    tokens, _ = seen_rows(p_lengths, bh // H, Tq, Tq, 0, True, False)
    b_dy = load_tile(head_of(p_dy, bh, H, Tq * H * D, D), o_t, H * D, tokens, D, BLOCK_D, True)
    b_y = load_tile(head_of(p_y, bh, H, Tq * H * D, D), o_t, H * D, tokens, D, BLOCK_D, True)
    b_delta = tl.sum(b_dy.to(tl.float32) * b_y.to(tl.float32), 1)
    inverse = inverse_variance(p_log_sigma, bh % H, BOUND)
    if OWN_VALUES:
        b_delta *= inverse
    tl.store(p_delta + rows, b_delta, mask=o_t < Tq)
    if SHARES:
        half = 0.5 * LOG2_E * inverse
        b_norm = tl.load(p_norm + rows, mask=o_t < Tq, other=0.0)
        b_level = tl.load(p_level + rows, mask=o_t < Tq, other=0.0)
        tl.store(p_share + rows, tl.exp2(half * b_norm - b_level), mask=o_t < Tq)


@triton.jit
def _queries_tile(acc, b_total, b_dls, b_x, b_dy, b_level, b_delta, scale, p_k, p_v, p_norm, sk_t, sv_t, n0,
                o_i, Tk, before, after, D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr,
                CONSTANT: tl.constexpr, OWN_VALUES: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """The program's rows look at keys n0 ... n0 + BN."""
    o_j = n0 + tl.arange(0, BN)
    b_k = load_tile(p_k, o_j, sk_t, Tk, D, BLOCK_D, MASKED)
    b_v = b_k
    if not OWN_VALUES:
        b_v = load_tile(p_v, o_j, sv_t, Tk, D, BLOCK_D, MASKED)
    b_s = tl.dot(b_x, tl.trans(b_k), input_precision=PRECISION) * scale
    if not CONSTANT:
        b_s -= (load_row(p_norm, o_j, Tk, MASKED) * (0.5 * scale))[None, :]
    b_s -= b_level[:, None]
    b_w = tl.exp2(tl.minimum(b_s, 0.0))
    if MASKED:
        b_w = tl.where(in_reach(o_i, o_j, Tk, before, after, HAS_BEFORE, HAS_AFTER), b_w, 0.0)
    b_g = b_w * (tl.dot(b_dy, tl.trans(b_v), input_precision=PRECISION) - b_delta[:, None])
    b_total += tl.sum(b_g, 1)
    b_dls += tl.sum(b_g * b_s, 1)
    return tl.dot(b_g.to(b_k.dtype), b_k, acc, input_precision=PRECISION), b_total, b_dls


@triton.jit
def _keys_tile(acc, acc_v, b_total, b_k, b_v, b_half, scale, inverse, p_x, p_dy, p_level, p_delta, sx_t, sdy_t, n0,
               o_j, Tq, before, after, D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr,
               CONSTANT: tl.constexpr, OWN_VALUES: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """Queries n0 ... n0 + BN look at the program's rows.

    Tiles are transposed, (keys, queries); before and after are the queries'.
    """
    o_i = n0 + tl.arange(0, BN)
    b_x = load_tile(p_x, o_i, sx_t, Tq, D, BLOCK_D, MASKED)
    b_dy = load_tile(p_dy, o_i, sdy_t, Tq, D, BLOCK_D, MASKED)
    b_s = tl.dot(b_k, tl.trans(b_x), input_precision=PRECISION) * scale
    if not CONSTANT:
        b_s -= b_half[:, None]
    b_level = load_row(p_level, o_i, Tq, MASKED)
    b_w = tl.exp2(tl.minimum(b_s - b_level[None, :], 0.0))
    if MASKED:
        b_w = tl.where(in_reach(o_j, o_i, Tq, after, before, HAS_AFTER, HAS_BEFORE), b_w, 0.0)
    if OWN_VALUES:
        acc = tl.dot(b_w.to(b_dy.dtype), b_dy, acc, input_precision=PRECISION)
    else:
        acc_v = tl.dot(b_w.to(b_dy.dtype), b_dy, acc_v, input_precision=PRECISION)
    b_delta = load_row(p_delta, o_i, Tq, MASKED)
    b_dw = tl.dot(b_v, tl.trans(b_dy), input_precision=PRECISION)
    if OWN_VALUES:
        b_dw *= inverse
    b_g = b_w * (b_dw - b_delta[None, :])
    b_total += tl.sum(b_g, 1)
    return tl.dot(b_g.to(b_x.dtype), b_x, acc, input_precision=PRECISION), acc_v, b_total


@triton.jit
def store_partial(p_dls, b_dls, p_log_sigma, bh, H, row_blocks, BOUND: tl.constexpr):
    """The program's part of dlog_sigma; none where log_sigma is clamped. row_blocks: programs of a head."""
    batches = tl.num_programs(0) // row_blocks // H
    clamped = tl.abs(tl.load(p_log_sigma + bh % H)) > BOUND
    partial = tl.where(clamped, 0.0, -2.0 * LN_2 * tl.sum(b_dls, 0))
    tl.store(p_dls + ((bh % H) * batches + bh // H) * row_blocks + tl.program_id(0) % row_blocks, partial)


@triton.jit
def _symmetric_tile(acc, b_total, b_dls, b_x, b_dy, b_peak, b_weight, b_delta, scale, inverse, p_x, p_dy, p_norm,
                  p_weight, p_delta, sx_t, sdy_t, n0, o_i, T, reach, D: tl.constexpr, BLOCK_D: tl.constexpr,
                  BN: tl.constexpr, CONSTANT: tl.constexpr, HAS_REACH: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The program's rows a and rows b = n0 ... n0 + BN look at each other."""
    o_j = n0 + tl.arange(0, BN)
    b_xb = load_tile(p_x, o_j, sx_t, T, D, BLOCK_D, MASKED)
    b_dyb = load_tile(p_dy, o_j, sdy_t, T, D, BLOCK_D, MASKED)
    b_weightb = load_row(p_weight, o_j, T, MASKED)
    b_deltab = load_row(p_delta, o_j, T, MASKED)
    b_s = tl.dot(b_x, tl.trans(b_xb), input_precision=PRECISION) * scale
    if CONSTANT:
        b_wab = tl.exp2(tl.minimum(b_s - b_weight[:, None], 0.0))
        b_wba = tl.exp2(tl.minimum(b_s - b_weightb[None, :], 0.0))
        b_s -= b_peak[:, None]
    else:
        b_peakb = load_row(p_norm, o_j, T, MASKED) * (0.5 * scale)
        b_s = tl.minimum(b_s - (b_peak[:, None] + b_peakb[None, :]), 0.0)
        b_kernel = tl.exp2(b_s)
        b_wab = b_kernel * b_weight[:, None]
        b_wba = b_kernel * b_weightb[None, :]
    if MASKED:
        seen = in_reach(o_i, o_j, T, reach, reach, HAS_REACH, HAS_REACH)
        b_wab = tl.where(seen, b_wab, 0.0)
        b_wba = tl.where(seen, b_wba, 0.0)
    b_g = b_wab * (tl.dot(b_dy, tl.trans(b_xb), input_precision=PRECISION) * inverse - b_delta[:, None])
    b_dls += tl.sum(b_g * b_s, 1)
    b_g += b_wba * (tl.dot(b_x, tl.trans(b_dyb), input_precision=PRECISION) * inverse - b_deltab[None, :])
    b_total += tl.sum(b_g, 1)
    acc = tl.dot(b_wba.to(b_dyb.dtype), b_dyb, acc, input_precision=PRECISION)
    return tl.dot(b_g.to(b_xb.dtype), b_xb, acc, input_precision=PRECISION), b_total, b_dls


@triton.jit(do_not_specialize=["before", "after"])
def gka_queries_kernel(p_x, p_k, p_v, p_log_sigma, p_lengths, p_starts, p_dy, p_norm, p_level, p_delta, p_dx, p_dls,
                       sx_b, sx_t, sx_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, H, Tq, Tk, before, after, D: tl.constexpr,
                       BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CONSTANT: tl.constexpr,
                       OWN_KEYS: tl.constexpr, OWN_VALUES: tl.constexpr, HAS_BEFORE: tl.constexpr,
                       HAS_AFTER: tl.constexpr, BOUND: tl.constexpr):  # fmt: skip
    """dquery into p_dx, (B, Tq, H, D) contiguous, and one partial sum of dlog_sigma per program into p_dls, (H, B,
    row blocks) float32.
    """
    row_block, bh, origin, length = sequence_of(p_starts, Tq, H, BM, False)
    p_k = head_of(p_k, bh, H, sk_b, sk_h) + origin * sk_t
    p_v = head_of(p_v, bh, H, sv_b, sv_h) + origin * sv_t
    p_x = head_of(p_x, bh, H, sx_b, sx_h) + origin * sx_t
    p_norm += bh.to(tl.int64) * Tk + origin
    o_t = row_block * BM + tl.arange(0, BM)
    rows = bh.to(tl.int64) * Tq + origin + o_t
    if p_starts is not None:
        Tq, Tk = length, length
    inverse = inverse_variance(p_log_sigma, bh % H, BOUND)
    scale = LOG2_E * inverse
    num_queries, num_keys = seen_rows(p_lengths, bh // H, Tq, Tk, before, OWN_KEYS, HAS_BEFORE)
    b_x = load_tile(p_x, o_t, sx_t, num_queries, D, BLOCK_D, True)
    b_dy = load_tile(head_of(p_dy, bh, H, Tq * H * D, D) + origin * (H * D), o_t, H * D, num_queries, D, BLOCK_D, True)
    b_level = tl.load(p_level + rows, mask=o_t < num_queries, other=0.0)
    b_delta = tl.load(p_delta + rows, mask=o_t < num_queries, other=0.0)
    if OWN_VALUES:
        b_delta /= inverse
    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    b_total = tl.zeros([BM], tl.float32)
    b_dls = tl.zeros([BM], tl.float32)

    offset = Tk - Tq  # the last query is aligned with the last key
    last = tl.minimum(row_block * BM + BM, num_queries) - 1 + offset
    looked_at = partners(p_lengths, p_starts, row_block * BM, num_queries, num_keys)
    bounds = spans(row_block * BM + offset, last, looked_at, before, after, HAS_BEFORE, HAS_AFTER, BN)
    for span in tl.static_range(3):
        if span != 0 or HAS_BEFORE:
            for n0 in range(bounds[span], bounds[span + 1], BN):
                acc, b_total, b_dls = _queries_tile(
                    acc, b_total, b_dls, b_x, b_dy, b_level, b_delta, scale, p_k, p_v, p_norm, sk_t, sv_t, n0,
                    o_t + offset, num_keys, before, after, D, BLOCK_D, BN, CONSTANT, OWN_VALUES, HAS_BEFORE, HAS_AFTER,
                    span != 1)  # fmt: skip

    b_x = reload_tile(p_x, o_t, sx_t, num_queries, D, BLOCK_D).to(tl.float32)
    b_peak = squared_norm(b_x) * (scale if CONSTANT else 0.5 * scale)
    b_dls += b_total * (b_level - b_peak)  # the tiles' exponents are those of W, S_ij lies a row's log2 D_i above
    acc = clear(p_lengths, inverse * (acc - b_total[:, None] * b_x), o_t, num_queries)
    p_dx = head_of(p_dx, bh, H, Tq * H * D, D) + origin * (H * D)
    store_tile(p_dx, o_t, H * D, acc, Tq, D, BLOCK_D)
    store_partial(p_dls, b_dls, p_log_sigma, bh, H, programs_of(p_starts, Tq, H, BM), BOUND)


@triton.jit(do_not_specialize=["before", "after"])
def gka_keys_kernel(p_x, p_k, p_v, p_log_sigma, p_lengths, p_starts, p_dy, p_norm, p_level, p_delta, p_dk, p_dv, sx_b,
                    sx_t, sx_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, H, Tq, Tk, before, after, D: tl.constexpr,
                    BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CONSTANT: tl.constexpr,
                    OWN_KEYS: tl.constexpr, OWN_VALUES: tl.constexpr, HAS_BEFORE: tl.constexpr,
                    HAS_AFTER: tl.constexpr, BOUND: tl.constexpr):  # fmt: skip
    """dkey into p_dk, (B, Tk, H, D) contiguous, dvalue into p_dv or, with OWN_VALUES, p_dk.

    OWN_KEYS: p_dk is p_dx, in which gka_queries_kernel has left dquery; the sum replaces it.
    """
    row_block, bh, origin, length = sequence_of(p_starts, Tk, H, BM, False)
    p_x = head_of(p_x, bh, H, sx_b, sx_h) + origin * sx_t
    p_k = head_of(p_k, bh, H, sk_b, sk_h) + origin * sk_t
    p_dk = head_of(p_dk, bh, H, Tk * H * D, D) + origin * (H * D)
    p_dy = head_of(p_dy, bh, H, Tq * H * D, D) + origin * (H * D)
    p_norm += bh.to(tl.int64) * Tk + origin
    p_level += bh.to(tl.int64) * Tq + origin
    p_delta += bh.to(tl.int64) * Tq + origin
    if p_starts is not None:
        Tq, Tk = length, length
    o_t = row_block * BM + tl.arange(0, BM)
    inverse = inverse_variance(p_log_sigma, bh % H, BOUND)
    scale = LOG2_E * inverse
    num_queries, num_keys = seen_rows(p_lengths, bh // H, Tq, Tk, before, OWN_KEYS, HAS_BEFORE)
    b_k = load_tile(p_k, o_t, sk_t, num_keys, D, BLOCK_D, True)
    b_v = b_k
    if not OWN_VALUES:
        b_v = load_tile(head_of(p_v, bh, H, sv_b, sv_h) + origin * sv_t, o_t, sv_t, num_keys, D, BLOCK_D, True)
    b_half = tl.zeros([BM], tl.float32)
    if not CONSTANT:
        b_half = tl.load(p_norm + o_t, mask=o_t < num_keys, other=0.0) * (0.5 * scale)
    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BM, BLOCK_D], tl.float32)
    b_total = tl.zeros([BM], tl.float32)

    offset = Tk - Tq
    last = tl.minimum(row_block * BM + BM, num_keys) - 1 - offset
    looked_at = partners(p_lengths, p_starts, row_block * BM, num_keys, num_queries)
    bounds = spans(row_block * BM - offset, last, looked_at, after, before, HAS_AFTER, HAS_BEFORE, BN)
    for span in tl.static_range(3):
        if span != 0 or HAS_AFTER:
            for n0 in range(bounds[span], bounds[span + 1], BN):
                acc, acc_v, b_total = _keys_tile(
                    acc, acc_v, b_total, b_k, b_v, b_half, scale, inverse, p_x, p_dy, p_level, p_delta, sx_t, H * D,
                    n0, o_t - offset, num_queries, before, after, D, BLOCK_D, BN, CONSTANT, OWN_VALUES, HAS_BEFORE,
                    HAS_AFTER, span != 1)  # fmt: skip

    if not OWN_VALUES:
        acc *= inverse
        b_total *= inverse
        acc_v = clear(p_lengths, acc_v, o_t, num_keys)
        p_dv = head_of(p_dv, bh, H, Tk * H * D, D) + origin * (H * D)
        store_tile(p_dv, o_t, H * D, acc_v, Tk, D, BLOCK_D)
    acc -= b_total[:, None] * reload_tile(p_k, o_t, sk_t, num_keys, D, BLOCK_D).to(tl.float32)
    acc = clear(p_lengths, acc, o_t, num_keys)
    if OWN_KEYS:
        acc += reload_tile(p_dk, o_t, H * D, Tk, D, BLOCK_D).to(tl.float32)
    store_tile(p_dk, o_t, H * D, acc, Tk, D, BLOCK_D)


@triton.jit(do_not_specialize=["reach"])
def gka_symmetric_kernel(p_x, p_log_sigma, p_lengths, p_starts, p_dy, p_norm, p_weight, p_delta, p_dx, p_dls, sx_b,
                         sx_t, sx_h, H, T, reach, D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr,
                         BN: tl.constexpr, TAIL: tl.constexpr, CONSTANT: tl.constexpr, HAS_REACH: tl.constexpr,
                         BOUND: tl.constexpr):  # fmt: skip
    """All of dx when K_ij = K_ji is computed once for both roles. p_weight: the rows' shares, or levels if CONSTANT (no
    K_ij is symmetric then).

    TAIL: width of the last tile, <= BN.
    """
    row_block, bh, origin, length = sequence_of(p_starts, T, H, BM, False)
    p_x = head_of(p_x, bh, H, sx_b, sx_h) + origin * sx_t
    p_dy = head_of(p_dy, bh, H, T * H * D, D) + origin * (H * D)
    p_norm += bh.to(tl.int64) * T + origin
    p_weight += bh.to(tl.int64) * T + origin
    p_delta += bh.to(tl.int64) * T + origin
    if p_starts is not None:
        T = length
    o_t = row_block * BM + tl.arange(0, BM)
    inverse = inverse_variance(p_log_sigma, bh % H, BOUND)
    scale = LOG2_E * inverse
    tokens, _ = seen_rows(p_lengths, bh // H, T, T, 0, True, False)
    b_x = load_tile(p_x, o_t, sx_t, tokens, D, BLOCK_D, True)
    b_dy = load_tile(p_dy, o_t, H * D, tokens, D, BLOCK_D, True)
    b_weight = tl.load(p_weight + o_t, mask=o_t < tokens, other=0.0)
    b_delta = tl.load(p_delta + o_t, mask=o_t < tokens, other=0.0)
    b_peak = squared_norm(b_x) * (scale if CONSTANT else 0.5 * scale)
    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    b_total = tl.zeros([BM], tl.float32)
    b_dls = tl.zeros([BM], tl.float32)

    last = tl.minimum(row_block * BM + BM, tokens) - 1
    looked_at = partners(p_lengths, p_starts, row_block * BM, tokens, tokens)
    bounds = spans(row_block * BM, last, looked_at, reach, reach, HAS_REACH, HAS_REACH, BN)
    for span in tl.static_range(3):
        if span != 0 or HAS_REACH:
            for n0 in range(bounds[span], bounds[span + 1], TAIL if span == 2 else BN):
                acc, b_total, b_dls = _symmetric_tile(
                    acc, b_total, b_dls, b_x, b_dy, b_peak, b_weight, b_delta, scale, inverse, p_x, p_dy, p_norm,
                    p_weight, p_delta, sx_t, H * D, n0, o_t, tokens, reach, D, BLOCK_D, TAIL if span == 2 else BN,
                    CONSTANT, HAS_REACH, span != 1)  # fmt: skip

    acc -= b_total[:, None] * reload_tile(p_x, o_t, sx_t, tokens, D, BLOCK_D).to(tl.float32)
    acc = clear(p_lengths, acc, o_t, tokens)
    p_dx = head_of(p_dx, bh, H, T * H * D, D) + origin * (H * D)
    store_tile(p_dx, o_t, H * D, acc, T, D, BLOCK_D)
    store_partial(p_dls, b_dls / inverse, p_log_sigma, bh, H, programs_of(p_starts, T, H, BM), BOUND)
