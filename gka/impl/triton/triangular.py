"""Backward pass of full self-attention that computes every pair of row blocks once.

K_ij = K_ji: a pair of blocks needs its scores and exponentials once, whether the rows of one look at those of the
other or the other way round. gka_symmetric_kernel computes them in the programs of both blocks, ten matrix products a
pair; here they are seven. A program owns one block and takes its pairs with the next half of the other blocks, where
the first follows the last. The gradient of its rows stays in registers. That of the other block's is added in memory in
float32, and a last kernel rounds the sum. These additions have no fixed order: two runs may differ in their last bits.

The derivatives are those of backward.py, the names those of tiles.py. Descriptors see (B * T, H * D) tensors in tiles
of (BN, D).
"""

import triton
import triton.language as tl

from gka.impl.triton.backward import store_partial
from gka.impl.triton.tiles import (
    LOG2_E,
    PRECISION,
    head_of,
    inverse_variance,
    load_row,
    load_tile,
    program,
    reload_tile,
)

FAR = tl.constexpr(1e30)  # of a row behind the last token: its kernel with every row is 0


@triton.jit
def _pairs_tile(acc, b_total, b_dls, b_x, b_dy, b_peak, b_share, b_delta, scale, inverse, b_xb, b_dyb, x_sum, p_norm,
                p_share, p_delta, p_total, first_row, column, n0, T, BN: tl.constexpr, OWN: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """The program's rows a and rows b = n0 ... n0 + BN look at each other; OWN: b are among the program's rows."""
    o_j = n0 + tl.arange(0, BN)
    if MASKED:  # behind the last token is another sequence
        b_xb = tl.where(o_j[:, None] < T, b_xb, 0.0)
        b_dyb = tl.where(o_j[:, None] < T, b_dyb, 0.0)
    b_shareb = load_row(p_share, o_j, T, MASKED)
    b_deltab = load_row(p_delta, o_j, T, MASKED)
    b_peakb = load_row(p_norm, o_j, T, MASKED) * (0.5 * scale)
    if MASKED:
        b_peakb = tl.where(o_j < T, b_peakb, FAR)
    b_s = tl.dot(b_x, tl.trans(b_xb), input_precision=PRECISION) * scale
    b_s = tl.minimum(b_s - b_peak[:, None] - b_peakb[None, :], 0.0)
    b_kernel = tl.exp2(b_s)
    b_wab = b_kernel * b_share[:, None]
    b_wba = b_kernel * b_shareb[None, :]
    b_gab = b_wab * (tl.dot(b_dy, tl.trans(b_xb), input_precision=PRECISION) * inverse - b_delta[:, None])
    b_gba = b_wba * (tl.dot(b_x, tl.trans(b_dyb), input_precision=PRECISION) * inverse - b_deltab[None, :])
    b_g = b_gab + b_gba
    if OWN:  # the program meets each pair of these rows in both orders
        b_dls += tl.sum(b_gab * b_s, 1)
    else:
        b_dls += tl.sum(b_g * b_s, 1)
    b_total += tl.sum(b_g, 1)
    b_half = b_g.to(b_xb.dtype)
    acc = tl.dot(b_wba.to(b_dyb.dtype), b_dyb, acc, input_precision=PRECISION)
    acc = tl.dot(b_half, b_xb, acc, input_precision=PRECISION)
    if not OWN:
        b_other = tl.dot(tl.trans(b_wab.to(b_dy.dtype)), b_dy, input_precision=PRECISION)
        b_other = tl.dot(tl.trans(b_half), b_x, b_other, input_precision=PRECISION)
        if MASKED:
            b_other = tl.where(o_j[:, None] < T, b_other, 0.0)
        x_sum.atomic_add([first_row + n0, column], b_other)
        tl.atomic_add(p_total + o_j, tl.sum(b_g, 0), mask=o_j < T, sem="relaxed")
    return acc, b_total, b_dls


@triton.jit
def gka_triangular_kernel(x_rows, dy_rows, x_sum, p_x, p_dy, p_sum, p_log_sigma, p_norm, p_share, p_delta, p_total,
                          p_dls, H, T, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
                          BOUND: tl.constexpr):  # fmt: skip
    """Adds dx + total x to p_sum, (B, T, H, D), and total to p_total, (B, H, T); both float32, and zero before.

    x_rows, dy_rows, x_sum: descriptors of p_x, p_dy and p_sum. x and dy (B, T, H, D) contiguous.

    BN divides BM. MASKED: T is no multiple of BM.
    """
    block, bh = program(T, BM)
    blocks = tl.cdiv(T, BM)
    first_row = (bh // H) * T
    column = (bh % H) * D
    p_x = head_of(p_x, bh, H, T * H * D, D)
    p_dy = head_of(p_dy, bh, H, T * H * D, D)
    p_sum = head_of(p_sum, bh, H, T * H * D, D)
    p_norm += bh.to(tl.int64) * T
    p_share += bh.to(tl.int64) * T
    p_delta += bh.to(tl.int64) * T
    p_total += bh.to(tl.int64) * T
    o_i = block * BM + tl.arange(0, BM)
    inverse = inverse_variance(p_log_sigma, bh % H, BOUND)
    scale = LOG2_E * inverse
    b_x = load_tile(p_x, o_i, H * D, T, D, D, True)
    b_dy = load_tile(p_dy, o_i, H * D, T, D, D, True)
    b_share = tl.load(p_share + o_i, mask=o_i < T, other=0.0)
    b_delta = tl.load(p_delta + o_i, mask=o_i < T, other=0.0)
    b_peak = tl.where(o_i < T, tl.load(p_norm + o_i, mask=o_i < T, other=0.0) * (0.5 * scale), FAR)
    acc = tl.zeros([BM, D], tl.float32)
    b_total = tl.zeros([BM], tl.float32)
    b_dls = tl.zeros([BM], tl.float32)

    for n0 in tl.range(block * BM, block * BM + BM, BN, num_stages=1):
        o_j = n0 + tl.arange(0, BN)
        acc, b_total, b_dls = _pairs_tile(
            acc, b_total, b_dls, b_x, b_dy, b_peak, b_share, b_delta, scale, inverse,
            load_tile(p_x, o_j, H * D, T, D, D, True), load_tile(p_dy, o_j, H * D, T, D, D, True), x_sum, p_norm,
            p_share, p_delta, p_total, first_row, column, n0, T, BN, True, MASKED)  # fmt: skip
    # Of an even number of blocks the opposite one belongs to the first half.
    opposite = (blocks % 2 == 0) & (block < blocks // 2)
    others = (blocks - 1) // 2 + tl.where(opposite, 1, 0)
    for tile in range(0, others * (BM // BN)):
        n0 = (block + 1 + tile // (BM // BN)) % blocks * BM + tile % (BM // BN) * BN
        acc, b_total, b_dls = _pairs_tile(
            acc, b_total, b_dls, b_x, b_dy, b_peak, b_share, b_delta, scale, inverse,
            x_rows.load([first_row + n0, column]), dy_rows.load([first_row + n0, column]), x_sum, p_norm, p_share,
            p_delta, p_total, first_row, column, n0, T, BN, False, MASKED)  # fmt: skip

    acc -= b_total[:, None] * reload_tile(p_x, o_i, H * D, T, D, D).to(tl.float32)
    o_d = tl.arange(0, D)
    tl.atomic_add(p_sum + o_i[:, None] * (H * D) + o_d[None, :], acc, mask=o_i[:, None] < T, sem="relaxed")
    store_partial(p_dls, b_dls / inverse, p_log_sigma, bh, H, blocks, BOUND)


@triton.jit
def gka_round_kernel(p_sum, p_x, p_total, p_dx, rows, H, T, D: tl.constexpr, BM: tl.constexpr):
    """dx = sum - total x, rounded; all (B, T, H, D) contiguous with `rows` = B * T * H, p_total (B, H, T)."""
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)
    token, head = o_r // H, o_r % H
    o_total = ((token // T) * H + head).to(tl.int64) * T + token % T
    b_total = tl.load(p_total + o_total, mask=o_r < rows, other=0.0)
    o = o_r[:, None].to(tl.int64) * D + tl.arange(0, D)[None, :]
    mask = o_r[:, None] < rows
    b_x = tl.load(p_x + o, mask=mask, other=0.0).to(tl.float32)
    b_dx = tl.load(p_sum + o, mask=mask, other=0.0) - b_total[:, None] * b_x
    tl.store(p_dx + o, b_dx.to(p_dx.dtype.element_ty), mask=mask)
