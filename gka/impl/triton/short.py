"""Forward pass of full self-attention over 129 to 208 tokens of 64 channels in bfloat16, on Hopper, in Gluon.

A program computes heads one after the other. The tokens of a head fit into shared memory: they are loaded once, by TMA,
while the program computes the head before, and serve as queries, keys and values from there. Norms come out of the
tensor cores too: -|x_j|^2 / 2, split into three bfloat16 numbers that add up to it, are three more channels of the keys
where the queries have ones. Tokens behind the last, which belong to the next sequence, are cleared, and their norm is
so large that nobody sees them.

It needs a version of Triton that has these parts of Gluon, and Gluon has no interpreter.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

FIRST_TOKENS, LAST_TOKENS, HEAD_DIM = 129, 208, 64
PROGRAMS_PER_PROCESSOR = 2  # as many as there are registers for
LOG2_E = gl.constexpr(1.4426950408889634)
HIDDEN = gl.constexpr(-1e30)  # stands for minus half the norm of a token that nobody sees
TILES = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], gl.bfloat16)
barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.8 renamed it


@gluon.jit
def _fetch(x_rows, x_tail, b_x, bar, bh, H, T, D: gl.constexpr):
    """Start to load the 208 rows from the first token of head bh = b * H + h on."""
    first_row = (bh // H) * T
    column = (bh % H) * D
    mbarrier.expect(bar, 208 * D * 2)
    for block in gl.static_range(3):
        tma.async_copy_global_to_shared(x_rows, [first_row + block * 64, column], bar, b_x.slice(block * 64, 64))
    tma.async_copy_global_to_shared(x_tail, [first_row + 192, column], bar, b_x.slice(192, 16))


@gluon.jit
def _scores(b_q, b_ones, b_x, b_half, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """x_i.x_j - |x_j|^2 / 2 of 64 queries and COUNT keys from FIRST on, two products that have not ended yet."""
    keys = b_x.slice(FIRST, COUNT).permute((1, 0))
    halves = b_half.slice(FIRST, COUNT).permute((1, 0))
    b_s = warpgroup_mma(b_q, keys, gl.zeros([64, COUNT], gl.float32, LAYOUT), use_acc=False, is_async=True)
    return warpgroup_mma(b_ones, halves, b_s, is_async=True)


@gluon.jit
def gka_short_kernel(x_rows, x_tail, p_log_sigma, p_norm, p_y, p_level, H, T, heads, eps, D: gl.constexpr,
                     BOUND: gl.constexpr):  # fmt: skip
    """All of `op.attend`'s results. heads: B * H. x_rows, x_tail: descriptors of x as (B * T, H * D), in tiles of 64
    and of 16 rows. p_y: (B, T, H, D). p_norm, p_level: (B, H, T) float32. All are contiguous.
    """
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    MIDDLE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    TAIL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MIDDLE, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HALVES: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    OF_WIDE: gl.constexpr = gl.SliceLayout(1, WIDE)
    OF_MIDDLE: gl.constexpr = gl.SliceLayout(1, MIDDLE)
    OF_TAIL: gl.constexpr = gl.SliceLayout(1, TAIL)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, ROWS)
    SPLIT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    b_heads = gl.allocate_shared_memory(gl.bfloat16, [2, 256, D], x_rows.layout)  # the last 48 rows stay unused
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    b_norm = gl.allocate_shared_memory(gl.float32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    b_half = gl.allocate_shared_memory(gl.bfloat16, [256, 16], SPLIT)
    b_ones = gl.allocate_shared_memory(gl.bfloat16, [64, 16], SPLIT)
    o_t = gl.arange(0, 64, layout=OF_ROWS)
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, ROWS))
    o_part = gl.arange(0, 16, layout=gl.SliceLayout(0, HALVES))
    o_any = gl.arange(0, 64, layout=gl.SliceLayout(1, HALVES))
    b_ones.store(((o_part < 3)[None, :] & (o_any >= 0)[:, None]).to(gl.bfloat16))
    for place in gl.static_range(2):
        mbarrier.init(bars.index(place), count=1)
    fence_async_shared()
    barrier()

    programs = gl.num_programs(0)
    first = gl.program_id(0)
    if first < heads:
        _fetch(x_rows, x_tail, b_heads.index(0), bars.index(0), first, H, T, D)
    turn = 0
    for bh in range(first, heads, programs):
        if bh + programs < heads:
            following = (turn + 1) % 2
            _fetch(x_rows, x_tail, b_heads.index(following), bars.index(following), bh + programs, H, T, D)
        mbarrier.wait(bars.index(turn % 2), (turn // 2) & 1)
        b_x = b_heads.index(turn % 2)
        log_sigma = gl.load(p_log_sigma + bh % H).to(gl.float32)
        log_sigma = gl.where(log_sigma > BOUND, BOUND, gl.where(log_sigma < -BOUND, -BOUND, log_sigma))
        scale = LOG2_E * gl.exp(-2.0 * log_sigma)
        row = bh.to(gl.int64) * T  # type: ignore[attr-defined]

        for block in gl.static_range(4):
            o_i = block * 64 + o_t
            b_rows = b_x.slice(block * 64, 64).load(ROWS)
            if block >= 2:
                b_rows = gl.where((o_i < T)[:, None], b_rows, 0.0)
                b_x.slice(block * 64, 64).store(b_rows)
            b_rows = b_rows.to(gl.float32)
            b_squared = gl.sum(b_rows * b_rows, 1)
            b_norm.slice(block * 64, 64).store(b_squared)
            gl.store(p_norm + row + o_i, b_squared, mask=o_i < T)
            b_minus = gl.convert_layout(gl.where(o_i < T, -0.5 * b_squared, HIDDEN), gl.SliceLayout(1, HALVES))
            high = b_minus.to(gl.bfloat16).to(gl.float32)
            middle = (b_minus - high).to(gl.bfloat16).to(gl.float32)
            low = b_minus - high - middle
            b_parts = gl.where((o_part == 2)[None, :], low[:, None], 0.0)
            b_parts = gl.where((o_part == 1)[None, :], middle[:, None], b_parts)
            b_parts = gl.where((o_part == 0)[None, :], high[:, None], b_parts)
            b_half.slice(block * 64, 64).store(b_parts.to(gl.bfloat16))
        fence_async_shared()
        barrier()

        for block in gl.static_range(4):
            b_q = b_x.slice(block * 64, 64)
            b_s0 = _scores(b_q, b_ones, b_x, b_half, 0, 128, WIDE)
            b_s1 = _scores(b_q, b_ones, b_x, b_half, 128, 64, MIDDLE)
            b_s2 = _scores(b_q, b_ones, b_x, b_half, 192, 16, TAIL)
            b_peak = b_norm.slice(block * 64, 64).load(OF_WIDE) * (0.5 * scale)
            b_peak1 = gl.convert_layout(b_peak, OF_MIDDLE)
            b_peak2 = gl.convert_layout(b_peak, OF_TAIL)
            b_s0 = warpgroup_mma_wait(num_outstanding=4, deps=[b_s0])
            b_p0 = gl.exp2(b_s0 * scale - b_peak[:, None])
            b_w0 = gl.convert_layout(b_p0.to(gl.bfloat16), WEIGHTS)
            b_s1 = warpgroup_mma_wait(num_outstanding=2, deps=[b_s1])
            acc = warpgroup_mma(b_w0, b_x.slice(0, 128), gl.zeros([64, D], gl.float32, MIDDLE), use_acc=False,
                                is_async=True)  # fmt: skip
            b_p1 = gl.exp2(b_s1 * scale - b_peak1[:, None])
            b_w1 = gl.convert_layout(b_p1.to(gl.bfloat16), WEIGHTS)
            b_s2 = warpgroup_mma_wait(num_outstanding=1, deps=[b_s2])
            b_p2 = gl.exp2(b_s2 * scale - b_peak2[:, None])
            b_w2 = gl.convert_layout(b_p2.to(gl.bfloat16), WEIGHTS)
            acc = warpgroup_mma(b_w1, b_x.slice(128, 64), acc, is_async=True)
            acc = warpgroup_mma(b_w2, b_x.slice(192, 16), acc, is_async=True)
            b_sum = gl.convert_layout(gl.sum(b_p0, 1), OF_MIDDLE) + gl.sum(b_p1, 1)
            b_sum += gl.convert_layout(gl.sum(b_p2, 1), OF_MIDDLE)
            b_lost = (b_sum < 0.5) | (b_sum > 2.0 * T)  # beyond float32's reach; their limit is x_i
            b_sum = gl.where(b_lost, 1.0, b_sum) + eps
            o_level = block * 64 + gl.arange(0, 64, layout=OF_MIDDLE)
            gl.store(p_level + row + o_level, b_peak1 + gl.log2(b_sum), mask=o_level < T)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
            b_y = gl.convert_layout((acc / b_sum[:, None]).to(gl.bfloat16), ROWS)
            b_y = gl.where(gl.convert_layout(b_lost, OF_ROWS)[:, None], b_q.load(ROWS), b_y)
            o_i = block * 64 + o_t
            o_y = ((bh // H) * T + o_i)[:, None].to(gl.int64) * (H * D) + (bh % H) * D + o_d[None, :]
            gl.store(p_y + o_y, b_y, mask=(o_i < T)[:, None])
        barrier()
        turn = turn + 1


def serves(x: torch.Tensor) -> bool:
    """Whether the kernel takes features of this shape, dtype and layout, (B, T, H, D)."""
    fits = FIRST_TOKENS <= x.shape[1] <= LAST_TOKENS and x.shape[3] == HEAD_DIM and x.dtype == torch.bfloat16
    fits = fits and x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9  # whose products it is made of
    return fits and x.is_contiguous() and x.data_ptr() % 16 == 0


def forward(x: torch.Tensor, log_sigma: torch.Tensor, eps: float, bound: float, results) -> None:
    """Write the results of `op.attend`."""
    y, level, norm = results
    batch, length, heads, head_dim = x.shape

    def rows_of(count: int) -> TensorDescriptor:
        shape, strides = [batch * length, heads * head_dim], [heads * head_dim, 1]
        return TensorDescriptor(x, shape, strides, [count, head_dim], TILES)

    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(PROGRAMS_PER_PROCESSOR * processors, batch * heads)
    gka_short_kernel[(programs,)](
        rows_of(64), rows_of(16), log_sigma, norm, y, level, heads, length, batch * heads, eps, D=head_dim, BOUND=bound,
        num_warps=4)  # fmt: skip
