"""The operator's one door: options.py makes and checks the request, dispatch.py chooses and calls an implementation.

Layout everywhere: (B, T, H, D). Legend: B batch, T tokens (Tq queries, Tk keys), H heads, D head_dim.

Precision (docs/accuracy.md has a table of implementations): the reference takes differences; the others expand
|x - k|^2, so that gradients are known to about machine epsilon times |x|^2 / sigma^2. Where that passes 1 %, a
UserWarning says so, on CPU tensors outside torch.compile. An offset common to all features is subtracted first unless
there is a causal mask: under one, normalise features that are far from 0 on the scale of sigma (sdpa: also with
attn_mask and cu_seqlens). Norms above 1e19 overflow float32.
"""

import torch

from gka import validation
from gka.dispatch import BASELINES, choose, choose_baseline, run, weights
from gka.options import EPS, Options, gaussian_request, softmax_request


def gaussian_attention(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    *,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    lengths: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    constant_norm: bool = False,
    eps: float = EPS,
    impl: str = "auto",
) -> torch.Tensor:
    """y_i = sum_j W_ij v_j with W = row-normalised exp(-|x_i - k_j|^2 / (2 sigma_h^2)) (paper eq. 3, 4 and 7).

    Args:
      x: features, (B, Tq, H, D), float64, float32, bfloat16 or float16. They are queries and, by default, keys and
        values too. B may be 0; the reference then serves every request.
      log_sigma: log-bandwidth per head, (H,), float32. |log_sigma| is clamped to 20.
      keys: (B, Tk, H, D); None means x. With foreign keys no affinity need be near 1 and the row sum may underflow, so
        the rows are normalised as a softmax and `eps` is not used. The last query is aligned with the last key (one
        decode query sees all of a cache).
      values: (B, Tk, H, D); None means the keys. x, keys and values share dtype and device; under autocast their dtypes
        may differ, and all take autocast's.
      causal: query i sees keys j <= i.
      window: query i sees i - window <= j <= i (with causal; window + 1 keys), |i - j| <= window without. None: no
        limit. The paper's W counts the token itself: window = W - 1.
      lengths: (B,), int64 or int32: tokens that each row of keys has, 0 to Tk; what is behind them is padding.
      key_padding_mask: (B, Tk) bool, True where there is no token, as in torch.nn.MultiheadAttention; instead of
        lengths, for padding anywhere. Padding is neither key nor value. Where the keys are x, its rows of y and its
        gradients are zeros; so are rows of y that see no key.
      attn_mask: broadcast to (B, H, Tq, Tk) as in torch's scaled_dot_product_attention: bool, True where a query may
        look, or added to the exponents log K_ij. Rows are then normalised as a softmax, without eps.
      cu_seqlens: packed sequences: (documents + 1,) int32, on the device of x, which is (1, N, H, D). Document d has
        the tokens cu_seqlens[d] to cu_seqlens[d + 1] - 1; it may have none. The first number is 0, the last N, and none
        is below the one before it; this is checked on CPUs alone. A query sees keys of its own document only, of them
        those that causal and window let it see. keys and values must have N tokens too. Not together with lengths,
        key_padding_mask or attn_mask, nor in ONNX exports. sdpa, whose mask is dense, takes up to 2^14 tokens.
      constant_norm: a promise that all keys of a head have the same norm, for example after a per-head RMS norm.
        |k_j|^2 then cancels and the fused paths become plain attention. It is not checked; reference and cpu do not
        use it.
      eps: added to the row sum (paper eq. 4) by the implementations that apply it: reference, triton and cpu. sdpa and
        flex drop it; as K_ii = 1 that changes y by less than a relative `eps`.
      impl: "reference" (the literal equations), "triton" (the fused kernels, CUDA), "cpu" (the fused kernel in C++, no
        float64), "sdpa" (any device), "flex" (CUDA; forward only on CPU), or "auto", see `select_impl`. All have first
        derivatives in reverse mode; sdpa has forward mode too, and the reference all derivatives of any order.

    Returns: y, (B, Tq, H, D) in x.dtype (precision: top of the file). What a row may not see never touches it;
      with triton a NaN in a token that the mask hides may, within a tile.

    Raises: TypeError for a wrong type or dtype; ValueError for a wrong rank, shape, device, value, or an implementation
    that cannot serve the request. Both name the argument.
    """
    options = Options(
        causal=causal, window=window, lengths=lengths, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
        cu_seqlens=cu_seqlens, constant_norm=constant_norm, eps=eps,
    )  # fmt: skip
    literal = impl == "reference"  # the equations as they are, hidden keys included
    return run(gaussian_request(x, log_sigma, keys, values, options, keep_hidden_keys=literal), impl)


def gaussian_weights(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    *,
    keys: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    lengths: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    eps: float = EPS,
) -> torch.Tensor:
    """W of `gaussian_attention` for the same arguments, (B, H, Tq, Tk), in x.dtype or, for half precision, float32.

    Built by the reference, in O(Tq * Tk) memory: for pictures and measurements. W sums to 1 / (1 + eps / sum_j K_ij)
    along Tk, with foreign keys to 1. Raises as `gaussian_attention`.
    """
    options = Options(
        causal=causal, window=window, lengths=lengths, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
        cu_seqlens=cu_seqlens, eps=eps,
    )  # fmt: skip
    return weights(gaussian_request(x, log_sigma, keys, None, options, keep_hidden_keys=True))


def dot_product_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """softmax(scale * q.k) v with the same layout and masks: the baseline every comparison uses.

    q: (B, Tq, H, D); k, v: (B, Tk, H, D), one device and, unless autocast is on, one dtype. Returns (B, Tq, H, D).
    scale: None means 1 / sqrt(D). impl: "auto", "sdpa" or "flex", which has no cu_seqlens. Raises as
    `gaussian_attention`.
    """
    request = softmax_request(q, k, v, causal, window, cu_seqlens, scale)
    return BASELINES[choose_baseline(request, impl)].dot_product(request)


def select_impl(
    x: torch.Tensor,
    *,
    log_sigma: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    lengths: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    constant_norm: bool = False,
    impl: str = "auto",
) -> str:
    """The name of the implementation that `gaussian_attention` runs for these arguments; never "auto".

    auto: on CUDA "triton", or where it cannot serve the request "flex" if SDPA would need a
    dense mask or extra channels; on CPUs "cpu", whose library the first question loads or builds; else "sdpa", such as
    in forward mode. For a batch of 0 always "reference". Raises ValueError if `impl` is unknown or cannot serve the
    request.
    """
    validation.check_features("x", x)
    log_sigma = x.new_zeros(x.shape[2], dtype=torch.float32) if log_sigma is None else log_sigma
    options = Options(
        causal=causal, window=window, lengths=lengths, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
        cu_seqlens=cu_seqlens, constant_norm=constant_norm,
    )  # fmt: skip
    return choose(gaussian_request(x, log_sigma, keys, values, options), impl)
