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


def sdpa(mask: Mask, backend: SDPBackend | None = None) -> Softmax:
    """torch's softmax attention held to one kernel; None leaves the choice to torch.

    A dense mask only where the kernel has no other way.
    """
    added = added_masks(mask)

    def attend(q, k, v):
        dense = None if mask.window is None else added(k.shape[1] - q.shape[1], k.shape[1], 0, k.shape[1], q)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            y = F.scaled_dot_product_attention(q, k, v, dense, is_causal=mask.causal and dense is None)
        return y.transpose(1, 2)

    return attend


def sdpa_in_blocks(mask: Mask, block: int) -> Softmax:
    """Windowed self-attention as a call of SDPA for every `block` queries, with the keys that one of them sees alone.

    The blocks in the middle of the sequence share one small mask.
    """
    added = added_masks(mask)
    before, after = mask.reach

    def attend(q, k, v):
        tokens = q.shape[1]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        parts = []
        for first in range(0, tokens, block):
            last = min(first + block, tokens)
            begin, end = max(0, first - before), min(tokens, last + after)
            visible = added(first, last, begin, end, q)
            keys, values = (t[:, :, begin:end] for t in (k, v))
            parts.append(F.scaled_dot_product_attention(q[:, :, first:last], keys, values, visible))
        return torch.cat(parts, dim=2).transpose(1, 2)

    return attend


def added_masks(mask: Mask) -> Callable[[int, int, int, int, torch.Tensor], torch.Tensor]:
    """of(first, last, begin, end, like): what SDPA adds to the scores of queries at the positions first to last and
    keys at begin to end, (rows, columns) in the dtype of `like`. Made once for each part.
    """

    @functools.cache
    def made(rows: int, offset: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        hidden = ~mask.visible(torch.arange(offset, offset + rows)[:, None], torch.arange(columns))
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -math.inf).to(device)

    return lambda first, last, begin, end, like: made(last - first, first - begin, end - begin, like.dtype, like.device)


def products(mask: Mask) -> Softmax:
    """Two matrix products around a softmax, by blocks of queries where the mask hides keys.

    On CPUs that multiply bfloat16 the backward pass of torch's fused kernel takes several times as long as these
    products in bfloat16, and the forward pass is slower too. Scores and weights are rounded to the dtype of q, so sharp
    attention is up to ten times less exact than by the fused kernel.
    """

    def attend(q, k, v):
        num_queries, num_keys = q.shape[1], k.shape[1]
        first_key = mask.first_visible_key(num_queries, num_keys)
        num_keys -= first_key
        visible = mask.simplify(num_queries, num_keys)
        before, after = visible.reach
        q, k, v = (t.transpose(1, 2) for t in (q * q.shape[-1] ** -0.5, k[:, first_key:], v[:, first_key:]))
        block = num_queries if visible == Mask() else PRODUCTS_BLOCK
        mixed = []
        for row in range(0, num_queries, block):
            positions = torch.arange(row, min(row + block, num_queries), device=q.device) + (num_keys - num_queries)
            first = row + num_keys - num_queries
            last = first + positions.shape[0] - 1
            begin = 0 if before is None else max(0, first - before)
            end = num_keys if after is None else min(num_keys, last + after + 1)
            scores = q[:, :, row : row + block] @ k[:, :, begin:end].transpose(-2, -1)
            if visible != Mask():
                seen = visible.visible(positions[:, None], torch.arange(begin, end, device=q.device))
                scores = scores.masked_fill(~seen, float("-inf"))
            mixed.append(scores.softmax(-1) @ v[:, :, begin:end])
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


def visible_keys(lengths: list[int], tokens: int) -> torch.Tensor:
    """Which keys are no padding, (B, 1, 1, T)."""
    return (torch.arange(tokens) < torch.tensor(lengths)[:, None])[:, None, None]


def padded_products(lengths: list[int], tokens: int) -> Softmax:
    """Sequences of different lengths as two matrix products around a softmax, with a mask that hides padded keys."""
    on = functools.cache(torch.zeros(1).masked_fill(~visible_keys(lengths, tokens), -math.inf).to)

    def attend(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q * q.shape[-1] ** -0.5, k, v))
        scores = q @ k.transpose(-2, -1) + on(q.device, q.dtype)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return attend


def padding_mask(lengths: list[int], tokens: int) -> Softmax:
    """Sequences of different lengths in one call of SDPA, whose mask hides the padded keys."""
    on = functools.cache(visible_keys(lengths, tokens).to)

    def attend(q, k, v):
        parts = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*parts, on(q.device)).transpose(1, 2)

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
