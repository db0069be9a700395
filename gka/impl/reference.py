"""The paper's equations 3, 4 and 7, literally: build K, mask it, normalise its rows, mix. O(Tq * Tk) memory; the oracle
of every test.

It has derivatives of every order, reverse and forward, and the transforms of torch.func (kernel.py says what those
take).
"""

import torch

from gka.kernel import log_kernel
from gka.padding_and_masks import bias, padding, visible, with_zeros_and_nan, without_nonfinite, without_padding
from gka.request import PADDING_AND_MASKS, GaussianRequest, Request, Serves

SERVES = Serves(options=frozenset({"causal", "window", *PADDING_AND_MASKS, "forward_mode"}), applies_eps=True)


def unavailable(request: Request) -> str | None:
    """The reference serves every request on every device."""
    return None


def gaussian(request: GaussianRequest) -> torch.Tensor:
    """y, (B, Tq, H, D) in x.dtype. Half precision is computed in float32."""
    return output_and_weights(request)[0]


def output_and_weights(request: GaussianRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """(y: (B, Tq, H, D) in x.dtype, W: (B, H, Tq, Tk) in the computing dtype), from the definition."""
    clean, nan_rows = without_nonfinite(without_padding(request))
    dtype = torch.promote_types(clean.x.dtype, torch.float32)
    exponent = log_kernel(clean.x, clean.key_features, clean.log_sigma)
    seen = visible(clean)
    empty = ~seen.any(dim=-1, keepdim=True)  # rows without keys, and those of padded queries
    if clean.own_keys and (hidden := padding(clean)) is not None:
        empty = empty | hidden[:, None, :, None]
    if (added := bias(clean, seen, dtype)) is not None:
        exponent = exponent + added
    if clean.eps is None:
        weights = exponent.masked_fill(~(seen | empty), float("-inf")).softmax(dim=-1).masked_fill(empty, 0.0)
    else:
        affinity = exponent.exp() * seen
        weights = affinity / (affinity.sum(dim=-1, keepdim=True) + clean.eps).masked_fill(empty, 1.0)
        weights = weights.masked_fill(empty, 0.0)
    y = (weights @ clean.value_features.to(dtype).transpose(1, 2)).transpose(1, 2).to(clean.x.dtype)
    return with_zeros_and_nan(request, y, nan_rows), weights
