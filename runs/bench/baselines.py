"""Softmax attention, the baseline: torch's kernels, products, what skips keys that a mask hides, the definition.

All are functions of q, k and v, (B, T, H, D).
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gka import dot_product_attention
from gka.masking import Mask
from nanochat_gka.model import attention

Softmax = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BLOCKS = (64, 128, 256)  # queries that share a call of SDPA; the fastest counts
PRODUCTS_BLOCK = 256  # queries that share two products
MOST_SCORES = 2**26  # that a model's layer may keep: 128 MiB in bfloat16


def definition(q, k, v, mask: Mask):
    """softmax(q.k / sqrt(D)) v with T x T matrices, in the inputs' dtype: float64 makes it the oracle of the
    baselines.
    """
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask.dense(q.shape[1], k.shape[1], q.device), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def blocks(mask: Mask, num_queries: int, num_keys: int, size: int) -> list[tuple[slice, int, slice]]:
    """(queries, offset, keys) for every `size` queries: themselves, the keys that one of them sees, and the place of
    the first of them among these keys.
    """
    before, after = mask.reach
    parts = []
    for row in range(0, num_queries, size):
        last_row = min(row + size, num_queries)
        first, last = (place + num_keys - num_queries for place in (row, last_row))
        begin = 0 if before is None else max(0, first - before)
        end = num_keys if after is None else min(num_keys, last + after)
        parts.append((slice(row, last_row), first - begin, slice(begin, end)))
    return parts


def sdpa(mask: Mask, backend: SDPBackend | None = None, block: int | None = None) -> Softmax:
    """torch's softmax attention held to one kernel; None leaves the choice to torch.

    Windows, for which the kernel has no other way, take a call with a mask for every `block` queries (None: for all),
    with the keys that one of them sees alone; the blocks in the middle of the sequence share one small mask.
    """

    @functools.cache
    def added(rows: int, offset: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        hidden = ~mask.visible(torch.arange(offset, offset + rows)[:, None], torch.arange(columns))
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -math.inf).to(device)

    def attend(q, k, v):
        num_queries, num_keys = q.shape[1], k.shape[1]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            if mask.window is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal).transpose(1, 2)
            parts = []
            for rows, offset, seen in blocks(mask, num_queries, num_keys, block or num_queries):
                few, keys, values = q[:, :, rows], k[:, :, seen], v[:, :, seen]
                visible = added(few.shape[2], offset, keys.shape[2], q.dtype, q.device)
                parts.append(F.scaled_dot_product_attention(few, keys, values, visible))
        return (torch.cat(parts, dim=2) if parts[1:] else parts[0]).transpose(1, 2)

    return attend


def products(mask: Mask) -> Softmax:
    """Two matrix products around a softmax, by blocks of queries where the mask hides keys.

    On CPUs that multiply bfloat16 the backward pass of torch's fused kernel takes several times as long as these
    products in bfloat16, and the forward pass is slower too. Scores and weights are rounded to the dtype of q, so sharp
    attention is up to ten times less exact than by the fused kernel.
    """

    def attend(q, k, v):
        num_queries, num_keys = q.shape[1], k.shape[1]
        visible = mask.simplify(num_queries, num_keys)
        q, k, v = (t.transpose(1, 2) for t in (q * q.shape[-1] ** -0.5, k, v))
        block = num_queries if visible == Mask() else PRODUCTS_BLOCK
        mixed = []
        for rows, offset, seen in blocks(visible, num_queries, num_keys, block):
            scores = q[:, :, rows] @ k[:, :, seen].transpose(-2, -1)
            if visible != Mask():
                i, j = (torch.arange(count, device=q.device) for count in scores.shape[2:])
                scores = scores.masked_fill(~visible.visible(i[:, None] + offset, j), float("-inf"))
            mixed.append(scores.softmax(-1) @ v[:, :, seen])
        return torch.cat(mixed, dim=2).transpose(1, 2)

    return attend


@contextlib.contextmanager
def fastest_in_language_models() -> Iterator[None]:
    """Inside, softmax attention of nanochat_gka's models runs as `products` where these are the faster way."""
    usual = attention.dot_product_attention

    def fastest(q, k, v, *, causal: bool = False, window: int | None = None):
        if products_are_faster(q, k):
            return products(Mask(causal, window))(q, k, v)
        return dot_product_attention(q, k, v, causal=causal, window=window)

    attention.dot_product_attention = fastest
    try:
        yield
    finally:
        attention.dot_product_attention = usual


def products_are_faster(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether `products` should replace torch's fused kernel: in bfloat16 on CPUs that multiply it."""
    scores = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and scores <= MOST_SCORES and multiplies_bfloat16()


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return supported is not None and supported()


# torch.compile calls it while it traces, as it does build.obstacle (gka/impl/cpu/build.py).
multiplies_bfloat16._dynamo_marked_constant = True  # type: ignore[attr-defined]


def padded(lengths: list[int], tokens: int, as_products: bool) -> Softmax:
    """Sequences of different lengths with a mask that hides padded keys: one call of SDPA, or two matrix products."""
    visible = (torch.arange(tokens) < torch.tensor(lengths)[:, None])[:, None, None]  # (B, 1, 1, T)
    on = functools.cache((torch.zeros(1).masked_fill(~visible, -math.inf) if as_products else visible).to)

    def attend(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if as_products:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + on(q.device, q.dtype)
            return (scores.softmax(-1) @ v).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, on(q.device)).transpose(1, 2)

    return attend


def one_by_one(lengths: list[int]) -> Softmax:
    """A call of SDPA for every sequence, without its padding."""

    def attend(q, k, v):
        rows = []
        for row, length in enumerate(lengths):
            parts = (t[row : row + 1, :length].transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(*parts).transpose(1, 2)
            rows.append(F.pad(y, (0, 0, 0, 0, 0, q.shape[1] - length)))
        return torch.cat(rows)

    return attend
