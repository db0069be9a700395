"""The same softmax as a FlexAttention score function and block mask: windows and padding skip whole tiles, the terms of
the norms are added to the scores.

Made for CUDA. On CPU torch offers FlexAttention's forward only, which is enough to test the score function. `eps` is
ignored.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from gka.expansion import expand, of_constant_norm
from gka.masking import Mask
from gka.padding_and_masks import padding, with_zeros_and_nan, without_nonfinite, without_padding
from gka.request import GaussianRequest, Request, Serves, SoftmaxRequest

if TYPE_CHECKING:  # imported where it is used: it brings SymPy, a quarter of the time that `import gka` takes
    from torch.nn.attention.flex_attention import BlockMask

TILE = 128
PROGRAMS = 128
WIDEST = 128  # width of queries that one more channel makes; it is rounded up to a power of two, in shared memory
SERVES = Serves(
    options=frozenset({"causal", "window", "lengths", "key_padding_mask"}),
    applies_eps=False,
    fused_on=("cuda",),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    min_head_dim=16,
)


def unavailable(request: Request) -> str | None:
    """Why FlexAttention cannot serve this request, or None if it can."""
    if not request.x.is_cuda and request.needs_grad:
        return "FlexAttention has no backward pass outside CUDA"
    if request.x.is_cuda and request.needs_grad and not torch.cuda.is_available():
        return "FlexAttention's backward pass cannot be traced without a GPU"
    return None


def dot_product(request: SoftmaxRequest) -> torch.Tensor:
    """softmax(scale * q.k + mask) v, (B, Tq, H, D)."""
    return _attend(request.x, request.key_features, request.value_features, request, request.scale)


def gaussian(request: GaussianRequest) -> torch.Tensor:
    """y, (B, Tq, H, D) in x.dtype. With constant norms x / sigma^2 is rounded to it, else half precision is computed in
    float32.

    x is scaled, not the scores: those would make the gradient of log_sigma one atomic addition per score.
    """
    original, (request, nan_rows) = request, without_nonfinite(without_padding(request))
    if request.constant_norm:
        y = _attend(*of_constant_norm(request, WIDEST), request.value_features, request, 1.0)
        return with_zeros_and_nan(original, y, nan_rows)
    scaled, keys, values, a, b, offset = expand(request)
    a, b = (F.pad(t.transpose(1, 2), (0, _round_up(t.shape[1]) - t.shape[1])) for t in (a, b))  # (B, H, whole tiles)

    def add_norms(score, batch, h, i, j):
        return score + (a[batch, h, i] + b[batch, h, j])

    y = _attend(scaled, keys, keys if values is None else values, request, 1.0, score_mod=add_norms)
    return with_zeros_and_nan(original, (y if offset is None else y + offset).to(request.x.dtype), nan_rows)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request, scale: float, score_mod: Any = None):
    from torch.nn.attention.flex_attention import flex_attention

    num_queries, num_keys, hidden = q.shape[1], k.shape[1], padding(request)
    is_fake = isinstance(q, torch._subclasses.FakeTensor)
    if is_fake or hidden is not None:  # what is kept is of real tensors, and serves other calls
        block_mask = _block_mask.__wrapped__(request.mask, num_queries, num_keys, q.device, hidden)
    else:
        block_mask = _block_mask(request.mask, num_queries, num_keys, q.device)
    # Whole tiles: FlexAttention's gradients are NaN for ragged lengths with a score_mod (pytorch#153799).
    q, k, v = (F.pad(t, (0, 0, 0, 0, 0, _round_up(t.shape[1]) - t.shape[1])).transpose(1, 2) for t in (q, k, v))
    traced = is_fake or torch.compiler.is_compiling()
    attend: Any = flex_attention if traced or not q.is_cuda else _compiled()
    # TF32 products beside float32 norms would not cancel.
    options = {"FLOAT32_PRECISION": "'ieee'"} if q.is_cuda and score_mod is not None else None
    y = attend(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, kernel_options=options)
    return y.transpose(1, 2)[:, :num_queries]


@functools.cache
def _compiled() -> Callable:
    """FlexAttention as fused programs, one for each number of tiles, head size and so on."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        # After 8 programs torch would go on without fusing, with all scores in memory.
        with torch._dynamo.config.patch(recompile_limit=PROGRAMS):
            return compiled(*tensors, **options)

    return attend


@functools.lru_cache(maxsize=64)
def _block_mask(
    mask: Mask, num_queries: int, num_keys: int, device: torch.device, hidden: torch.Tensor | None = None
) -> "BlockMask":
    """The mask over whole tiles without `hidden` keys, (B, Tk); no inference tensor, which training could not save."""
    from torch.nn.attention.flex_attention import create_block_mask

    with torch.inference_mode(False), torch.no_grad():
        offset: int | torch.Tensor = num_keys - num_queries
        end: int | torch.Tensor = num_keys
        if not torch.compiler.is_compiling():
            # As tensors they leave `_compiled` one program for all lengths that fill the same tiles.
            offset, end = (torch.tensor(n, device=device) for n in (num_keys - num_queries, num_keys))

        tokens = None if hidden is None else F.pad(~hidden, (0, _round_up(num_keys) - num_keys))

        def mask_mod(b, h, i, j):
            seen = mask.visible(i + offset, j)
            return seen & (j < end) if tokens is None else seen & tokens[b, j]

        sizes = _round_up(num_queries), _round_up(num_keys)
        return create_block_mask(mask_mod, None if hidden is None else len(hidden), None, *sizes, device=device)


def _round_up(length: int) -> int:
    return -(-length // TILE) * TILE
