"""From tensors to kernel launches: which kernel serves a request, with which tiles, over which grid."""

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from gka.impl.triton import cudnn
from gka.impl.triton.backward import gka_keys_kernel, gka_queries_kernel, gka_rows_kernel, gka_symmetric_kernel
from gka.impl.triton.configs import Config, table_of
from gka.impl.triton.forward import gka_forward_kernel, gka_merge_kernel, gka_norm_kernel
from gka.impl.triton.tiles import NORM_COMPUTED, NORM_CONSTANT, NORM_LOADED
from gka.impl.triton.triangular import gka_round_kernel, gka_triangular_kernel

# From here on a kernel of its own computes the norms: on an H200 that made 256 tokens about a fifth faster, and 197 a
# fifth slower.
NORMS_FIRST_TOKENS = 256
TRIANGULAR_FIRST_TOKENS = 1024  # on an H200 the triangular schedule lost at 197 tokens and won at 1,024
DECODE_QUERIES = 16  # up to here a request is bound by reading the keys
MIN_SPLIT = 256  # keys that a program of its own is worth


def forward(
    x, keys, values, log_sigma, lengths, starts, before: int, after: int, constant_norm: bool, eps: float, bound: float,
    results,
) -> None:  # fmt: skip
    """Write the results of `op.attend`."""
    own_keys, own_values = keys is None, values is None
    y, level, norm = results
    batch, length, heads, head_dim = x.shape
    keys = x if own_keys else keys
    values = keys if own_values else values
    num_keys, table = keys.shape[1], table_of(x.device)
    shape = dict(D=head_dim, BLOCK_D=block_of(head_dim), BOUND=bound)
    full = before < 0 and after < 0 and lengths is None and starts is None
    if full and own_keys and own_values and not constant_norm and table.takes("short"):
        from gka.impl.triton import short  # not every version of Triton can import it

        if short.serves(x):
            return short.forward(x, log_sigma, eps, bound, results)

    policy = NORM_CONSTANT if constant_norm else NORM_COMPUTED
    if own_keys and not constant_norm and length >= NORMS_FIRST_TOKENS:
        policy = NORM_LOADED
        sizes = dict(BM=64, D=head_dim, BLOCK_D=shape["BLOCK_D"])
        programs = batch * heads * triton.cdiv(length, 64)
        gka_norm_kernel[(programs,)](x, lengths, norm, *x.stride()[:3], heads, length, **sizes)
    decode = not own_keys and length <= DECODE_QUERIES
    config = table.pick("decode" if decode else "forward", x, shape["BLOCK_D"])
    programs = batch * heads * _row_blocks(length, config, starts)
    splits = _splits(x.device, programs, num_keys) if decode else 1
    chunk = triton.cdiv(triton.cdiv(num_keys, splits), config.columns) * config.columns
    splits = triton.cdiv(num_keys, chunk)
    partial = level
    if splits > 1:
        partial = x.new_empty((splits, batch, heads, length, shape["BLOCK_D"] + 2), dtype=torch.float32)
    strides = [stride for t in (x, keys, values) for stride in t.stride()[:3]]
    gka_forward_kernel[(programs, splits)](
        x, keys, values, log_sigma, lengths, starts, norm, y, level, partial, *strides, heads, length, num_keys, before,
        after, chunk, eps, NORM=policy.value, OWN_KEYS=own_keys, OWN_VALUES=own_values, HAS_BEFORE=before >= 0,
        HAS_AFTER=after >= 0, SPLIT=splits > 1, TAIL=_tail(config, num_keys, after, lengths, starts),
        **_tiles(config), **shape)  # fmt: skip
    if splits > 1:
        sizes = dict(D=head_dim, BLOCK_D=shape["BLOCK_D"])
        gka_merge_kernel[(batch * heads * length,)](partial, y, level, heads, length, splits, **sizes)


def backward(
    grad_y, x, keys, values, log_sigma, lengths, starts, y, level, norm, before, after, constant_norm: bool,
    bound: float, gradients: list[torch.Tensor],
) -> None:  # fmt: skip
    """Write the gradients of `op.attend_backward`."""
    grad_y = grad_y.contiguous()
    table = table_of(x.device)
    causal = before < 0 and after == 0 and lengths is None and starts is None
    if causal and constant_norm and table.takes("cudnn") and cudnn.serves(grad_y, x, keys, values):
        block_d = block_of(x.shape[3])
        return cudnn.backward(grad_y, x, keys, values, log_sigma, y, level, block_d, bound, gradients)

    batch, length, heads, head_dim = x.shape
    own_keys, own_values = keys is None, values is None
    keys = x if own_keys else keys
    values = keys if own_values else values
    num_keys = keys.shape[1]
    dx, dlog_sigma = gradients[:2]
    dkeys = dx if own_keys else gradients[2]
    dvalues = dkeys if own_values else gradients[-1]
    shape = dict(D=head_dim, BLOCK_D=block_of(head_dim), BOUND=bound)
    symmetric = table.find("symmetric", x, shape["BLOCK_D"]) if own_keys and own_values and before == after else None
    triangular = None
    full = before < 0 and lengths is None and starts is None and not constant_norm
    if symmetric is not None and full and table.takes("triangular") and _may_add(x, grad_y):
        triangular = table.find("triangular", x, shape["BLOCK_D"])

    delta = torch.empty_like(level)
    share = torch.empty_like(level) if symmetric is not None and not constant_norm else level
    gka_rows_kernel[(batch * heads * triton.cdiv(length, 64),)](
        grad_y, y, log_sigma, lengths if own_keys else None, norm, level, delta, share, heads, length, BM=64,
        OWN_VALUES=own_values, SHARES=share is not level, **shape)  # fmt: skip
    strides = [stride for t in (x, keys, values) for stride in t.stride()[:3]]
    masked = dict(HAS_BEFORE=before >= 0, HAS_AFTER=after >= 0)

    def partials(config: Config) -> tuple[int, torch.Tensor]:
        blocks = _row_blocks(length, config, starts)
        return batch * heads * blocks, x.new_empty((heads, batch * blocks), dtype=torch.float32)

    if triangular is not None:
        programs, dls = partials(triangular)
        dx_sum = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        total = torch.zeros_like(level)

        def rows_of(t: torch.Tensor) -> TensorDescriptor:
            shape, strides = [batch * length, heads * head_dim], [heads * head_dim, 1]
            return TensorDescriptor(t, shape, strides, [triangular.columns, head_dim])

        gka_triangular_kernel[(programs,)](
            rows_of(x), rows_of(grad_y), rows_of(dx_sum), x, grad_y, dx_sum, log_sigma, norm, share, delta, total, dls,
            heads, length, MASKED=length % triangular.rows != 0, D=head_dim, BOUND=bound,
            **_tiles(triangular))  # fmt: skip
        rows = batch * length * heads
        gka_round_kernel[(triton.cdiv(rows, 64),)](dx_sum, x, total, dx, rows, heads, length, D=head_dim, BM=64)
    elif symmetric is not None:
        programs, dls = partials(symmetric)
        gka_symmetric_kernel[(programs,)](
            x, log_sigma, lengths, starts, grad_y, norm, share, delta, dx, dls, *strides[:3], heads, length, before,
            CONSTANT=constant_norm, HAS_REACH=before >= 0, TAIL=_tail(symmetric, length, before, lengths, starts),
            **_tiles(symmetric), **shape)  # fmt: skip
    else:
        config = table.pick("queries", x, shape["BLOCK_D"])
        programs, dls = partials(config)
        gka_queries_kernel[(programs,)](
            x, keys, values, log_sigma, lengths, starts, grad_y, norm, level, delta, dx, dls, *strides, heads, length,
            num_keys, before, after, CONSTANT=constant_norm, OWN_KEYS=own_keys, OWN_VALUES=own_values,
            **masked, **_tiles(config), **shape)  # fmt: skip
        config = table.pick("keys", x, shape["BLOCK_D"])
        gka_keys_kernel[(batch * heads * _row_blocks(num_keys, config, starts),)](
            x, keys, values, log_sigma, lengths, starts, grad_y, norm, level, delta, dkeys, dvalues, *strides, heads,
            length, num_keys, before, after, CONSTANT=constant_norm, OWN_KEYS=own_keys, OWN_VALUES=own_values,
            **masked, **_tiles(config), **shape)  # fmt: skip
    torch.sum(dls, dim=1, out=dlog_sigma)


def _may_add(x: torch.Tensor, grad_y: torch.Tensor) -> bool:
    """Whether programs may add to each other's rows, in any order, and descriptors can address all tensors."""
    if x.shape[1] < TRIANGULAR_FIRST_TOKENS or torch.are_deterministic_algorithms_enabled():
        return False
    aligned = x.data_ptr() % 16 == 0 and grad_y.data_ptr() % 16 == 0
    return aligned and x.is_contiguous() and x.shape[3] == block_of(x.shape[3])


def block_of(size: int) -> int:
    """The power of two from 16 on that holds `size`."""
    return max(16, triton.next_power_of_2(size))


def _tiles(config: Config) -> dict[str, int]:
    """A configuration as launch arguments."""
    return dict(BM=config.rows, BN=config.columns, num_warps=config.warps, num_stages=config.stages)


def _row_blocks(length: int, config: Config, starts: torch.Tensor | None) -> int:
    """Programs for the rows of a head; with packed documents as many as `tiles.sequence_of` needs at most."""
    return triton.cdiv(length, config.rows) if starts is None else length // config.rows + len(starts) - 1


def _tail(config: Config, length: int, after: int, *parts: torch.Tensor | None) -> int:
    """Width of the last tile, cut to what is left unless a mask makes several last tiles, or lengths other ones.

    parts: lengths and starts of the sequences, or None.
    """
    rest = length % config.columns
    several = after >= 0 or any(part is not None for part in parts)
    return config.columns if several or rest == 0 else block_of(rest)


def _splits(device: torch.device, programs: int, num_keys: int) -> int:
    """Programs over the keys of one row block, so that decoding fills the GPU twice."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(2 * processors // programs, num_keys // MIN_SPLIT))
