"""Forward pass of short sequences (ViT's 197 tokens): one program per head, which reads x once and wastes little of its
tiles.

Full self-attention of T <= 208 tokens, the features being keys and values. T is cut into FULL blocks of 64 tokens and a
tail of TAIL >= T % 64, the next power of two from 16 on: 3 * 64 + 16 = 208 for 197 tokens, where tiles of 64 would
compute 256 x 256. All tokens stay in shared memory while the program's rows, 64 at a time, look at them. Hopper only:
elsewhere matrix products take both operands from registers, and a backward pass in this form spills even there.
"""

import triton
import triton.language as tl

from gka.impl.triton.tiles import (
    LOG2_E,
    PRECISION,
    copy_rows,
    head_of,
    inverse_variance,
    load_tile,
    lost_rows,
    reload_tile,
    squared_norm,
    store_tile,
)

BLOCK = tl.constexpr(64)


@triton.jit
def _look_at(acc, b_sum, b_q, b_peak, b_x, o_j, p_norm, scale, T, CHECKED: tl.constexpr):
    """Rows b_q look at tokens o_j, whose tile is b_x."""
    b_peakx = tl.load(p_norm + o_j, mask=o_j < T, other=0.0) * (0.5 * scale)
    b_s = tl.dot(b_q, tl.trans(b_x), input_precision=PRECISION) * scale
    b_p = tl.exp2(b_s - (b_peak[:, None] + b_peakx[None, :]))
    if CHECKED:
        b_p = tl.where(o_j[None, :] < T, b_p, 0.0)
    return tl.dot(b_p.to(b_x.dtype), b_x, acc, input_precision=PRECISION), b_sum + tl.sum(b_p, 1)


@triton.jit
def _finish(acc, b_sum, b_peak, o_i, p_x, p_y, p_level, sx_t, eps, T, H, D: tl.constexpr, BLOCK_D: tl.constexpr):
    lost = lost_rows(b_sum, o_i, T)
    b_sum = tl.where(lost, 1.0, b_sum) + eps
    tl.store(p_level + o_i, b_peak + tl.log2(b_sum), mask=o_i < T)
    store_tile(p_y, o_i, H * D, acc / b_sum[:, None], T, D, BLOCK_D)
    copy_rows(p_x, sx_t, p_y, H * D, o_i, lost, D, BLOCK_D)  # their limit


@triton.jit
def gka_head_forward_kernel(p_x, p_log_sigma, p_y, p_level, p_norm, sx_b, sx_t, sx_h, H, T, eps, D: tl.constexpr,
                            BLOCK_D: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
                            BOUND: tl.constexpr):  # fmt: skip
    """Outputs as `gka_forward_kernel`'s for NORM_COMPUTED."""
    bh = tl.program_id(0)
    p_x = head_of(p_x, bh, H, sx_b, sx_h)
    p_y = head_of(p_y, bh, H, T * H * D, D)
    p_level += bh.to(tl.int64) * T
    p_norm += bh.to(tl.int64) * T
    scale = LOG2_E * inverse_variance(p_log_sigma, bh % H, BOUND)
    tiles = ()
    for piece in tl.static_range(FULL + (TAIL > 0)):
        o_j = piece * BLOCK + tl.arange(0, TAIL if piece == FULL else BLOCK)
        b_x = load_tile(p_x, o_j, sx_t, T, D, BLOCK_D, piece == FULL)
        tl.store(p_norm + o_j, squared_norm(b_x), mask=o_j < T)
        tiles = tiles + (b_x,)  # noqa: RUF005 (Triton knows no unpacking)
    tl.debug_barrier()  # the norms are read back by other threads: in registers they would take a quarter of the file

    for block in range(FULL):
        o_i = block * BLOCK + tl.arange(0, BLOCK)
        b_q = load_tile(p_x, o_i, sx_t, T, D, BLOCK_D, False)
        b_peak = tl.load(p_norm + o_i) * (0.5 * scale)
        acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        b_sum = tl.zeros([BLOCK], tl.float32)
        for piece in tl.static_range(FULL + (TAIL > 0)):
            o_p = piece * BLOCK + tl.arange(0, TAIL if piece == FULL else BLOCK)
            acc, b_sum = _look_at(acc, b_sum, b_q, b_peak, tiles[piece], o_p, p_norm, scale, T, piece == FULL)
        _finish(acc, b_sum, b_peak, o_i, p_x, p_y, p_level, sx_t, eps, T, H, D, BLOCK_D)

    if TAIL:  # its products take both operands from registers, so the tiles are read again, one after the other
        o_tail = FULL * BLOCK + tl.arange(0, TAIL)
        b_tail = reload_tile(p_x, o_tail, sx_t, T, D, BLOCK_D)
        b_top = tl.load(p_norm + o_tail, mask=o_tail < T, other=0.0) * (0.5 * scale)
        acc_tail = tl.zeros([TAIL, BLOCK_D], tl.float32)
        b_total = tl.zeros([TAIL], tl.float32)
        for block in range(FULL):
            o_k = block * BLOCK + tl.arange(0, BLOCK)
            b_k = reload_tile(p_x, o_k, sx_t, T, D, BLOCK_D)
            acc_tail, b_total = _look_at(acc_tail, b_total, b_tail, b_top, b_k, o_k, p_norm, scale, T, False)
        acc_tail, b_total = _look_at(acc_tail, b_total, b_tail, b_top, b_tail, o_tail, p_norm, scale, T, True)
        _finish(acc_tail, b_total, b_top, o_tail, p_x, p_y, p_level, sx_t, eps, T, H, D, BLOCK_D)
