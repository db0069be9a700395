"""What the Triton kernels share: loading tiles, squared norms, and the mask as spans of tiles.

Names in all kernels: p_ pointer, s_ stride, o_ offsets, b_ block in registers, m_ mask. H heads, D head_dim, BLOCK_D >=
D a power of two, BM rows that a program owns, BN rows that it streams. Exponents are in units of log 2: scale = log2(e)
/ sigma^2 turns x_i.x_j into them.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NORM_CONSTANT = tl.constexpr(0)  # all keys of a head have one norm, which cancels
NORM_LOADED = tl.constexpr(1)  # squared norms were computed before, read them
NORM_COMPUTED = tl.constexpr(2)  # from the tile at hand
PRECISION = tl.constexpr("tf32x3")  # float32 features: tensor cores at nearly float32 accuracy; never plain tf32


@triton.jit
def head_of(p, bh, H, s_b, s_h):
    """Where head bh = b * H + h starts, in 64 bits."""
    return p + (bh // H).to(tl.int64) * s_b + (bh % H).to(tl.int64) * s_h


@triton.jit
def program(T, BM: tl.constexpr):
    """(row block, head bh) of this program: one axis, since the others end at 65535."""
    row_blocks = tl.cdiv(T, BM)
    return tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks


@triton.jit
def programs_of(p_starts, T, H, BM: tl.constexpr):
    """How many programs a head has."""
    if p_starts is None:
        return tl.cdiv(T, BM)
    else:
        return tl.num_programs(0) // H


@triton.jit
def sequence_of(p_starts, T, H, BM: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(row block, head bh, first row, rows) of this program: the block is counted from the first row of its sequence,
    which is all T rows, or one of the documents that are packed into them.

    p_starts: (documents + 1,) int32, where the documents begin, and T; or None. Document d has the programs from
    starts[d] // BM + d on. Their number is at least cdiv(rows, BM), so that T // BM + documents are enough for all;
    those that are left over have a block behind the last row.
    """
    count = programs_of(p_starts, T, H, BM)
    place = tl.program_id(0) % count
    if LAST_FIRST:
        place = count - 1 - place
    bh = tl.program_id(0) // count
    if p_starts is None:
        return place, bh, 0, T
    else:
        documents = count - T // BM
        d = 0
        for first_d in range(1, documents, 256):
            o_d = first_d + tl.arange(0, 256)
            b_start = tl.load(p_starts + o_d, mask=o_d < documents, other=T)
            d += tl.sum(((o_d < documents) & (b_start // BM + o_d <= place)).to(tl.int32), 0)
        # On a GPU nobody has looked at the numbers.
        first = tl.minimum(tl.maximum(tl.load(p_starts + d, mask=d > 0, other=0), 0), T)
        end = tl.minimum(tl.maximum(tl.load(p_starts + d + 1, mask=d + 1 < documents, other=T), first), T)
        return tl.maximum(place - first // BM - d, 0), bh, first, end - first


@triton.jit
def seen_rows(p_lengths, b, Tq, Tk, before, OWN_KEYS: tl.constexpr, HAS_BEFORE: tl.constexpr):
    """(queries, keys) of batch row b, at its beginning; those behind them are padding, or queries that see no key.

    p_lengths: (B,) tokens of each row of keys, or None: all.
    """
    if p_lengths is None:
        return Tq, Tk
    else:
        keys = tl.minimum(tl.maximum(tl.load(p_lengths + b), 0), Tk).to(tl.int32)  # on a GPU nobody has looked at them
        queries = keys
        if not OWN_KEYS:
            queries = tl.where(keys > 0, Tq, 0)
            if HAS_BEFORE:
                queries = tl.minimum(queries, tl.maximum(0, keys + before - (Tk - Tq)))
        return queries, keys


@triton.jit
def partners(p_lengths, p_starts, first, num_rows, count):
    """How many rows a block from `first` on looks at: `count`, or none for a block behind all `num_rows` rows."""
    if p_lengths is None and p_starts is None:
        return count
    else:
        return tl.where(first < num_rows, count, 0)


@triton.jit
def clear(p_lengths, b, o_t, count, filler=0.0):
    """b, one row or one number for each token o_t, with `filler` from `count` on."""
    if p_lengths is None:
        return b
    elif len(b.shape) == 1:
        return tl.where(o_t < count, b, filler)
    else:
        return tl.where(o_t[:, None] < count, b, filler)


@triton.jit
def load_tile(p, o_t, s_t, T, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECKED: tl.constexpr):
    """Rows o_t of a (T, D) head as (rows, BLOCK_D), zero beyond D and, if CHECKED, beyond T."""
    o_d = tl.arange(0, BLOCK_D)
    p_tile = p + o_t[:, None] * s_t + o_d[None, :]
    if BLOCK_D != D:
        return tl.load(p_tile, mask=(o_t[:, None] < T) & (o_d[None, :] < D), other=0.0)
    elif CHECKED:
        return tl.load(p_tile, mask=o_t[:, None] < T, other=0.0)
    else:
        return tl.load(p_tile)


@triton.jit
def load_row(p, o_t, T, CHECKED: tl.constexpr):
    """One number for each token o_t, zero beyond T if CHECKED."""
    if CHECKED:
        return tl.load(p + o_t, mask=o_t < T, other=0.0)
    else:
        return tl.load(p + o_t)


@triton.jit
def reload_tile(p, o_t, s_t, T, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """`load_tile` again.

    The other cache policy keeps the compiler from holding the first copy in registers until now.
    """
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_t[:, None] < T) & (o_d[None, :] < D)
    return tl.load(p + o_t[:, None] * s_t + o_d[None, :], mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def lost_rows(b_sum, o_t, T):
    """Self-attention has 1 <= sum_j K_ij <= T.

    Where |x|^2 / sigma^2 is too large for float32 (beyond 1e6) the computed sum is not.
    """
    return (o_t < T) & ((b_sum < 0.5) | (b_sum > 2.0 * T))


@triton.jit
def copy_rows(p_from, sf_t, p_to, st_t, o_t, m_t, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows o_t where m_t, from one tensor to another."""
    o_d = tl.arange(0, BLOCK_D)
    mask = m_t[:, None] & (o_d[None, :] < D)
    tl.store(
        p_to + o_t[:, None] * st_t + o_d[None, :],
        tl.load(p_from + o_t[:, None] * sf_t + o_d[None, :], mask=mask),
        mask=mask,
    )


@triton.jit
def store_tile(p, o_t, s_t, b, T, D: tl.constexpr, BLOCK_D: tl.constexpr):
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_t[:, None] < T) & (o_d[None, :] < D)
    tl.store(p + o_t[:, None] * s_t + o_d[None, :], b.to(p.dtype.element_ty), mask=mask)


@triton.jit
def squared_norm(b):
    """|row|^2 in float32."""
    b = b.to(tl.float32)
    return tl.sum(b * b, 1)


@triton.jit
def inverse_variance(p_log_sigma, h, BOUND: tl.constexpr):
    """1 / sigma_h^2 as in `bandwidth.inverse_variance`."""
    log_sigma = tl.load(p_log_sigma + h).to(tl.float32)
    log_sigma = tl.where(
        log_sigma > BOUND, BOUND, tl.where(log_sigma < -BOUND, -BOUND, log_sigma)
    )  # NaN stays: it must show in y
    return tl.exp(-2.0 * log_sigma)


@triton.jit
def spans(first, last, length, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, BN: tl.constexpr):
    """Tiles of BN partners that rows at positions first..last look at: (start, first_unmasked, end_unmasked, end).

    A row at position i looks at partners i - before ... i + after (`masking.Mask.reach`; without HAS_ no limit). Tiles
    from `first_unmasked` to `end_unmasked` need no mask for any of the rows; those before and after do.
    """
    start = 0
    first_unmasked = 0
    end = length
    end_unmasked = length // BN * BN
    if HAS_BEFORE:
        start = tl.maximum(0, first - before) // BN * BN
        first_unmasked = tl.cdiv(tl.maximum(0, last - before), BN) * BN
    if HAS_AFTER:
        end = tl.maximum(0, tl.minimum(length, last + after + 1))
        end_unmasked = tl.maximum(0, tl.minimum(length, first + after + 1)) // BN * BN
    first_unmasked = tl.maximum(start, tl.minimum(first_unmasked, tl.cdiv(end, BN) * BN))
    return start, first_unmasked, tl.maximum(end_unmasked, first_unmasked), end


@triton.jit
def in_reach(o_own, o_partner, length, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr):
    """(own, partner) pairs that see each other: `spans` element by element."""
    distance = o_partner[None, :] - o_own[:, None]
    seen = (o_partner[None, :] < length) & (o_own[:, None] == o_own[:, None])
    if HAS_BEFORE:
        seen = seen & (distance >= -before)
    if HAS_AFTER:
        seen = seen & (distance <= after)
    return seen
