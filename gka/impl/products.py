"""Softmax attention as two matrix products, which keep the scores: the baseline where torch's fused kernel is slow.

On CPUs that multiply bfloat16 the fused kernel's backward pass takes several times as long as these products in
bfloat16, and the forward pass is slower too. Blocks of queries leave out most of what a causal mask or a window hides.
Scores are rounded, so that sharp attention is up to ten times less exact than by the fused kernel: what is to be right
before it is fast does not take them, and benchmarks do.
"""

import contextlib
from collections.abc import Iterator

import torch

from gka.masking import Mask
from gka.request import CONDITIONS, Request, Serves, SoftmaxRequest

SERVES = Serves(options=frozenset(CONDITIONS), applies_eps=False)
BLOCK = 256  # queries
MOST_SCORES = 2**26  # that a call may keep: 128 MiB in bfloat16
_taken = False  # by impl="auto"


def unavailable(request: Request) -> str | None:
    """Why products should not serve this request: only for their memory."""
    scores = request.x.shape[0] * request.x.shape[2] * request.num_queries * request.num_keys
    return f"products keep {scores:,} scores, more than {MOST_SCORES:,}" if scores > MOST_SCORES else None


def dot_product(request: SoftmaxRequest) -> torch.Tensor:
    """softmax(scale * q.k + mask) v, (B, Tq, H, D); scores and weights are rounded to the dtype of q."""
    with torch.autocast(request.x.device.type, enabled=False):  # which has done its part, and would widen the weights
        return _attend(request)


def _attend(request: SoftmaxRequest) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (request.x * request.scale, request.key_features, request.value_features))
    num_queries, num_keys, mask = request.num_queries, request.num_keys, request.mask
    before, after = mask.reach
    block = num_queries if mask == Mask() else BLOCK
    mixed = []
    for row in range(0, num_queries, block):
        positions = torch.arange(row, min(row + block, num_queries), device=q.device) + (num_keys - num_queries)
        first = row + num_keys - num_queries
        last = first + positions.shape[0] - 1
        begin = 0 if before is None else max(0, first - before)
        end = num_keys if after is None else min(num_keys, last + after + 1)
        scores = q[:, :, row : row + block] @ k[:, :, begin:end].transpose(-2, -1)
        if mask != Mask():
            seen = mask.visible(positions[:, None], torch.arange(begin, end, device=q.device))
            scores = scores.masked_fill(~seen, float("-inf"))
        mixed.append(scores.softmax(-1) @ v[:, :, begin:end])
    return torch.cat(mixed, dim=2).transpose(1, 2)


def are_taken(x: torch.Tensor) -> bool:
    """Whether impl="auto" takes products for queries x: inside `where_fast`, in bfloat16 on CPUs that multiply it."""
    return _taken and x.device.type == "cpu" and x.dtype == torch.bfloat16 and _multiplies_bfloat16()


@contextlib.contextmanager
def where_fast() -> Iterator[None]:
    """impl="auto" takes products where they are faster than torch's fused kernel."""
    global _taken
    before, _taken = _taken, True
    try:
        yield
    finally:
        _taken = before


def _multiplies_bfloat16() -> bool:
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return supported is not None and supported()


_multiplies_bfloat16._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as impl/cpu/build.py has it
