"""Gaussian kernel attention through torch's scaled_dot_product_attention: exact, never builds N x N.

The kernel's exponent is a dot product of features with two more channels (docs/mathematics.md):

    S_ij = -|x_i - k_j|^2 / (2 sigma^2) = [x_i / sigma^2, -|x_i|^2 / (2 sigma^2), 1] . [k_j, 1, -|k_j|^2 / (2 sigma^2)]

Heads of constant norm need neither: plain attention with q = x / sigma^2. `eps` is ignored: since K_ii = 1 it changes y
by at most a relative 1e-6. In forward mode the product is made of torch's operations that are not fused, which have
derivatives of every order.

Half precision is computed in float32, but for self-attention on the devices of KEEPS_HALF, where torch's kernels are
many times faster in half precision. There each norm takes three channels, which add up to the float32 number.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gka.bandwidth import inverse_variance
from gka.expansion import expand, extended, norm2, of_constant_norm
from gka.padding_and_masks import bias, visible, with_zeros_and_nan, without_nonfinite, without_padding
from gka.request import PADDING_AND_MASKS, GaussianRequest, Request, Serves, SoftmaxRequest

MOST_PACKED = 2**14
SERVES = Serves(
    options=frozenset({"causal", "window", *PADDING_AND_MASKS, "forward_mode"}),
    applies_eps=False,
    fused_on=("cuda", "cpu"),
)
KEEPS_HALF = frozenset({"cuda"})  # kinds of devices
# The product's scale, by which queries and norms are divided: float16 then holds |x|^2 / (2 sigma^2) up to 1e6. Beyond
# that y is NaN.
SCALES = {torch.bfloat16: 1.0, torch.float16: 16.0}


def unavailable(request: Request) -> str | None:
    """Why a dense mask would be too large, or None: else SDPA serves every request on every device."""
    if request.cu_seqlens is None or request.num_keys <= MOST_PACKED:
        return None
    return (
        f"sdpa makes a dense mask of cu_seqlens, for at most {MOST_PACKED} tokens, got {request.num_keys}: "
        "split the call between documents, or give a padded batch with lengths"
    )


def dot_product(request: SoftmaxRequest) -> torch.Tensor:
    """softmax(scale * q.k + mask) v, (B, Tq, H, D)."""
    return _attend(request.x, request.key_features, request.value_features, request, request.scale)


def gaussian(request: GaussianRequest) -> torch.Tensor:
    """y, (B, Tq, H, D) in x.dtype.

    With constant norms x / sigma^2 is rounded to x.dtype, and with others where `_keeps_half`; else half precision is
    computed in float32.
    """
    original, (request, nan_rows) = request, without_nonfinite(without_padding(request))
    x, values, offset, scale = request.x, request.values, None, 1.0
    if request.constant_norm:
        q, k = of_constant_norm(request)
    elif _keeps_half(request):
        scale, half_norm2 = SCALES[x.dtype], -0.5 * norm2(x)
        inverse = inverse_variance(request.log_sigma) / scale
        scaled, exponent = (x * inverse[:, None]).to(x.dtype), half_norm2 * inverse
        a, b = exponent.to(x.dtype), (half_norm2 * inverse.detach()).to(x.dtype)
        rest = _rest(exponent, a)
        # What sigma gets from b it gets through these, each a sum over a row of dS. Gradients of b are sums over
        # columns: they are no small numbers, and rounding them costs dlog_sigma up to ten times its size.
        one = (inverse / inverse.detach()).expand(exponent.shape).to(x.dtype)
        q, k = extended(scaled, [a, *rest, one, one, one]), extended(x, [1.0, 1.0, 1.0, b, *rest])
    else:
        scaled, keys, values, a, b, offset = expand(request)
        q, k = extended(scaled, [a, 1.0]), extended(keys, [1.0, b])
    # Values are as wide as keys: with unequal head sizes torch falls back to N x N.
    wider = k.shape[-1] - request.head_dim
    v = k if values is None else F.pad(values, (0, wider)) if wider else values
    y = _attend(q, k, v, request, scale)[..., : request.head_dim]
    return with_zeros_and_nan(original, (y if offset is None else y + offset).to(x.dtype), nan_rows)


def _keeps_half(request: GaussianRequest) -> bool:
    """Whether features of any norm are multiplied in half precision.

    Each row must see its own token: rounding x / sigma^2 moves S_ij by about machine epsilon times |x_i| |x_i - k_j| /
    sigma^2, which is small for the near keys that then have all the weight. Foreign keys and those of an attn_mask,
    whose numbers would be rounded too, may all be far.
    """
    sees_itself = request.own_keys and request.attn_mask is None
    is_half = request.x.dtype.itemsize == 2 and request.x.device.type in KEEPS_HALF
    return is_half and sees_itself and not request.forward_mode


def _rest(t: torch.Tensor, rounded: torch.Tensor) -> list[torch.Tensor]:
    """Two numbers in the precision of `rounded` that it lacks of t, a float32."""
    lacking = (t - rounded).detach()
    middle = lacking.to(rounded.dtype)
    return [middle, (lacking - middle).to(rounded.dtype)]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request, scale: float) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    attn_mask, is_causal = _mask(request, q.dtype)
    # torch's fused kernels have first derivatives in reverse mode, and no others.
    with sdpa_kernel(SDPBackend.MATH) if request.forward_mode else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale).transpose(1, 2)


def _mask(request: Request, dtype: torch.dtype) -> tuple[torch.Tensor | None, bool]:
    """What torch's function takes as attn_mask and is_causal."""
    hiding = request.hiding
    if not hiding or (hiding == ["causal"] and request.num_queries == request.num_keys):
        return None, bool(hiding)
    seen = visible(request)
    if {*request.mask.conditions, "cu_seqlens"}.issuperset(hiding):  # which leave every row a key
        return seen, False
    added = bias(request, seen, dtype)
    seen = seen | ~seen.any(-1, keepdim=True)  # rows without keys get all; `with_zeros_and_nan` clears them
    return seen if added is None else torch.where(seen, added, float("-inf")), False
