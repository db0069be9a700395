"""The operator's one door: validate, choose the implementation, call it. Layout everywhere: (B, T, H, D).

Legend: B batch, T tokens (Tq queries, Tk keys), H heads, D head_dim.
"""

import contextlib

import torch

from gka import validation
from gka.impl import flex, reference, sdpa
from gka.impl.triton import op as triton_op
from gka.masking import Mask

# A fused implementation is a module with `gaussian` and `unavailable` (why it cannot serve a request, or None); one for the softmax baseline
# has `dot_product` too.
FUSED = {"triton": triton_op, "flex": flex, "sdpa": sdpa}
SOFTMAX = {name: module for name, module in FUSED.items() if hasattr(module, "dot_product")}
EPS = 1e-6


def gaussian_attention(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    *,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    constant_norm: bool = False,
    eps: float = EPS,
    return_weights: bool = False,
    impl: str = "auto",
):
    """Gaussian kernel attention: y_i = sum_j W_ij v_j, W = row-normalised exp(-|x_i - k_j|^2 / (2 sigma_h^2)) (paper eq. 3, 4 and 7).

    Args:
      x: features, (B, Tq, H, D), float64, float32, bfloat16 or float16. They are queries and, by default, keys and values too.
      log_sigma: log-bandwidth per head, (H,), float32. |log_sigma| is clamped to 20.
      keys: (B, Tk, H, D); None means x. With foreign keys no affinity need be near 1 and the row sum may underflow, so the rows are
        normalised as a softmax and `eps` is not used. The last query is aligned with the last key (one decode query sees all of a cache).
      values: (B, Tk, H, D); None means the keys. x, keys and values share dtype and device; under autocast dtypes may differ and its own is taken.
      causal: query i sees keys j <= i.
      window: query i sees i - window <= j <= i (with causal; window + 1 keys), |i - j| <= window without. None: no limit.
        The paper's W counts the token itself: window = W - 1.
      constant_norm: a promise that all keys of a head have the same norm, for example after a per-head RMS norm. |k_j|^2 then
        cancels and the fused paths become plain attention. Not checked; the reference does not use it.
      eps: added to the row sum (paper eq. 4) by implementations that know it: reference and triton. sdpa and flex drop it; as K_ii = 1 that
        changes y by less than a relative `eps`.
      return_weights: also return W, (B, H, Tq, Tk). Only the reference builds W; "auto" then means it.
      impl: "reference" (the literal equations), "triton" (the fused kernels, CUDA), "sdpa" (any device), "flex" (CUDA; forward only on CPU),
        or "auto", see `select_impl`. All have first derivatives in reverse mode; the reference has those of any order, forward mode and torch.func.

    Precision: the reference takes differences, in float32 for half precision. Without constant_norm sdpa and flex compute in float32 too, but
    expand |x - k|^2: gradients are known to about machine epsilon times |x|^2 / sigma^2. An offset common to all features is taken off first
    unless there is a causal mask, with which features far from 0 on the scale of sigma are best normalised. Where that product passes 1 %, a
    UserWarning says so, on CPU tensors outside torch.compile. With constant_norm sdpa and flex round x / sigma^2 to x.dtype and leave the offset.
    triton keeps exponents in float32 and leaves the offset. float64 features are computed in float64. Norms above 1e19 overflow float32.

    Returns: y, (B, Tq, H, D) in x.dtype; with return_weights, (y, W).

    Raises: TypeError for a wrong type or dtype; ValueError for a wrong rank, shape, device, value, or an implementation that cannot
    serve the request. Both name the argument.
    """
    validation.check_features("x", x)
    validation.check_log_sigma(log_sigma, x)
    validation.check_eps(eps)
    foreign_keys = keys is not None
    keys = x if keys is None else keys
    values = keys if values is None else values
    x, keys, values = _to_autocast_dtype(x, keys, values)
    mask = _check(x, keys, values, causal, window)
    name = select_impl(x, log_sigma=log_sigma, keys=keys, values=values, causal=causal, window=window, constant_norm=constant_norm,
                       return_weights=return_weights, impl=impl)  # fmt: skip

    with without_autocast(x.device.type):
        if name == "reference":
            y, weights = reference.gaussian(x, keys, values, log_sigma, mask, None if foreign_keys else eps)
            return (y, weights) if return_weights else y
        keys, values = _drop_hidden(mask, x.shape[1], keys, values)
        mask = mask.simplify(x.shape[1], keys.shape[1])
        return FUSED[name].gaussian(x, keys, values, log_sigma, mask, constant_norm, None if foreign_keys else eps)


def dot_product_attention(
    q, k, v, *, causal: bool = False, window: int | None = None, scale: float | None = None, impl: str = "auto"
):
    """softmax(scale * q.k) v with the same layout, masks and implementations: the baseline every comparison uses.

    q: (B, Tq, H, D); k, v: (B, Tk, H, D), one device and, unless autocast is on, one dtype. scale: None means 1 / sqrt(D).
    Returns (B, Tq, H, D).
    Raises as `gaussian_attention`; impl="reference" is not offered.
    """
    validation.check_features("q", q)
    q, k, v = _to_autocast_dtype(q, k, v)
    mask = _check(q, k, v, causal, window, names=("k", "v"))
    if impl not in ("auto", *SOFTMAX):
        raise ValueError(f"dot_product_attention's impl must be one of auto, {', '.join(SOFTMAX)}, got {impl!r}")
    k, v = _drop_hidden(mask, q.shape[1], k, v)
    mask = mask.simplify(q.shape[1], k.shape[1])
    needs_grad = _needs_grad(q, k, v)
    if impl == "auto":
        impl = "flex" if q.is_cuda and mask.window is not None and not flex.unavailable(q, needs_grad) else "sdpa"
    elif obstacle := SOFTMAX[impl].unavailable(q, needs_grad):
        raise ValueError(f'impl="{impl}" is unavailable: {obstacle}; use impl="auto"')
    return SOFTMAX[impl].dot_product(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale)


def select_impl(x, *, log_sigma=None, keys=None, values=None, causal=False, window=None, constant_norm=False, return_weights=False,
                impl: str = "auto") -> str:  # fmt: skip
    """The name of the implementation that `gaussian_attention` runs for these arguments; never "auto".

    auto: "reference" if W is wanted; on CUDA "triton", or where it cannot serve the request "flex" if SDPA would need a dense mask or extra
    channels; else "sdpa". Raises ValueError if `impl` is unknown or cannot serve the request.
    """
    check_impl(impl)
    if return_weights:
        if impl not in ("auto", "reference"):
            raise ValueError(f'return_weights needs impl="reference" (or "auto"): impl={impl!r} never builds W')
        return "reference"
    if impl == "reference":
        return impl
    needs_grad = _needs_grad(x, log_sigma, keys, values)
    request = dict(needs_grad=needs_grad, keys=keys, constant_norm=constant_norm)
    if impl != "auto":
        if obstacle := FUSED[impl].unavailable(x, **request):
            raise ValueError(f'impl="{impl}" is unavailable: {obstacle}; use impl="auto"')
        return impl
    if not x.is_cuda:
        return "sdpa"
    if not triton_op.unavailable(x, **request):
        return "triton"
    windowed = (
        Mask(causal, window).simplify(x.shape[1], x.shape[1] if keys is None else keys.shape[1]).window is not None
    )
    return "flex" if (windowed or not constant_norm) and not flex.unavailable(x, **request) else "sdpa"


def _needs_grad(*tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def without_autocast(device_type: str):
    """A context in which operations keep their arguments' dtype; also for devices that have no autocast, such as meta."""
    return (
        torch.autocast(device_type, enabled=False)
        if torch.amp.is_autocast_available(device_type)
        else contextlib.nullcontext()
    )


def check_impl(impl) -> None:
    """impl is "auto", "reference" or a name in FUSED; ValueError otherwise."""
    if impl not in ("auto", "reference", *FUSED):
        raise ValueError(f"impl must be one of auto, reference, {', '.join(FUSED)}, got {impl!r}")


def _check(x, keys, values, causal, window, names=("keys", "values")) -> Mask:
    validation.check_mask(causal, window)
    if keys is not x:
        validation.check_features(names[0], keys, like=x)
    if values is not keys:
        validation.check_features(names[1], values, like=x)
    validation.check_lengths(x.shape[1], keys.shape[1], values.shape[1], causal or window is not None)
    return Mask(causal, window)


def _drop_hidden(mask: Mask, num_queries: int, keys, values):
    """Cut off the keys that no query can see (decoding with a window); keeps `values is keys`."""
    first = mask.first_visible_key(num_queries, keys.shape[1])
    if first == 0:
        return keys, values
    trimmed = keys[:, first:]
    return trimmed, trimmed if values is keys else values[:, first:]


def _to_autocast_dtype(x, keys, values):
    """Under autocast take its dtype once, here, so that norms are taken of the rounded features and stay float32.

    Comes before the checks, as mixed dtypes are welcome then; what cannot be cast is left for them. Arguments that are one tensor stay one.
    """
    if (
        not torch.amp.is_autocast_available(x.device.type)
        or not torch.is_autocast_enabled(x.device.type)
        or x.dtype == torch.float64
    ):
        return x, keys, values
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(t):
        return t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    cast_x = cast(x)
    cast_keys = cast_x if keys is x else cast(keys)
    return cast_x, cast_keys, cast_keys if values is keys else cast(values)
