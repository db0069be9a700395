"""The operator's one door: check the arguments, make the request, choose the implementation, call it.

Layout everywhere: (B, T, H, D). Legend: B batch, T tokens (Tq queries, Tk keys), H heads, D head_dim.
"""

import contextlib
from typing import Any, Protocol

import torch

from gka import validation
from gka.impl import cpu, flex, reference, sdpa, triton
from gka.masking import Mask
from gka.request import GaussianRequest, SoftmaxRequest


class Implementation(Protocol):
    """A module or package of gka/impl. One that serves the softmax baseline has `dot_product(SoftmaxRequest)` too."""

    def unavailable(self, request: GaussianRequest) -> str | None:
        """Why it cannot serve this request, or None if it can."""

    def gaussian(self, request: GaussianRequest) -> torch.Tensor:
        """y, (B, Tq, H, D) in the dtype of x."""


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": reference,
    "triton": triton,
    "cpu": cpu,
    "flex": flex,
    "sdpa": sdpa,
}
BASELINES: dict[str, Any] = {name: impl for name, impl in IMPLEMENTATIONS.items() if hasattr(impl, "dot_product")}
EPS = 1e-6
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Prepared = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, Mask]


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
) -> Any:  # torch.Tensor, or with return_weights a pair of them: typed callers need no cast
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
      constant_norm: a promise that all keys of a head have the same norm, for example after a per-head RMS norm.
        |k_j|^2 then cancels and the fused paths become plain attention. It is not checked; reference and cpu do not
        use it.
      eps: added to the row sum (paper eq. 4) by the implementations that apply it: reference, triton and cpu. sdpa and
        flex drop it; as K_ii = 1 that changes y by less than a relative `eps`.
      return_weights: also return W, (B, H, Tq, Tk). Only the reference builds W; "auto" then means it.
      impl: "reference" (the literal equations), "triton" (the fused kernels, CUDA), "cpu" (the fused kernel in C++, no
        float64), "sdpa" (any device), "flex" (CUDA; forward only on CPU), or "auto", see `select_impl`. All have first
        derivatives in reverse mode; the reference has those of any order, forward mode and torch.func.

    Precision: the reference takes differences, in float32 for half precision. Without constant_norm sdpa and flex
    compute in float32 too, but expand |x - k|^2: gradients are known to about machine epsilon times |x|^2 / sigma^2. An
    offset common to all features is subtracted first unless there is a causal mask; with one, features that are far
    from 0 on the scale of sigma are best normalised. Where that product passes 1 %, a UserWarning says so, on CPU
    tensors outside torch.compile. With constant_norm sdpa and flex round x / sigma^2 to x.dtype and leave the offset.
    triton keeps exponents in float32 and leaves the offset; cpu subtracts it as sdpa does, with constant_norm too, but
    in bfloat16 on AMX does as triton. float64 features are computed in float64. Norms above 1e19 overflow float32.

    Returns: y, (B, Tq, H, D) in x.dtype; with return_weights, (y, W).

    Raises: TypeError for a wrong type or dtype; ValueError for a wrong rank, shape, device, value, or an implementation
    that cannot serve the request. Both name the argument.
    """
    validation.check_features("x", x)
    validation.check_log_sigma(log_sigma, x)
    validation.check_eps(eps)
    request = _gaussian_request(x, log_sigma, keys, values, causal, window, constant_norm, eps, return_weights, impl)
    name = _choose(request, return_weights, impl)
    with without_autocast(x.device.type):
        if return_weights:
            return reference.output_and_weights(request)
        return IMPLEMENTATIONS[name].gaussian(request)


def dot_product_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """softmax(scale * q.k) v with the same layout, masks and implementations: the baseline every comparison uses.

    q: (B, Tq, H, D); k, v: (B, Tk, H, D), one device and, unless autocast is on, one dtype. Returns (B, Tq, H, D).
    scale: None means 1 / sqrt(D). Raises as `gaussian_attention`; impl="reference" is not offered.
    """
    validation.check_features("q", q)
    q, keys, values, mask = _prepare(q, k, v, causal, window, names=("k", "v"))
    if impl not in ("auto", *BASELINES):
        raise ValueError(f"dot_product_attention's impl must be one of auto, {', '.join(BASELINES)}, got {impl!r}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    request = SoftmaxRequest(q, keys, values, mask, _needs_grad(q, k, v), scale)
    if impl == "auto":
        impl = "flex" if q.is_cuda and mask.window is not None and not flex.unavailable(request) else "sdpa"
    elif obstacle := BASELINES[impl].unavailable(request):
        raise _unavailable(impl, obstacle)
    return BASELINES["sdpa" if q.shape[0] == 0 else impl].dot_product(request)


def select_impl(
    x: torch.Tensor,
    *,
    log_sigma: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    constant_norm: bool = False,
    return_weights: bool = False,
    impl: str = "auto",
) -> str:
    """The name of the implementation that `gaussian_attention` runs for these arguments; never "auto".

    auto: "reference" if W is wanted; on CUDA "triton", or where it cannot serve the request "flex" if SDPA would need a
    dense mask or extra channels; on CPUs "cpu", whose library the first question loads or builds; else "sdpa". For a
    batch of 0 always "reference". Raises ValueError if `impl` is unknown or cannot serve the request.
    """
    log_sigma = x.new_zeros(x.shape[2], dtype=torch.float32) if log_sigma is None else log_sigma
    request = _gaussian_request(x, log_sigma, keys, values, causal, window, constant_norm, EPS, return_weights, impl)
    return _choose(request, return_weights, impl)


def check_impl(impl: str) -> None:
    """impl is "auto" or a name in IMPLEMENTATIONS; ValueError otherwise."""
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"impl must be one of auto, {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """A context in which operations keep their arguments' dtype, also on devices without autocast, such as meta."""
    if _autocasts(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _autocasts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _gaussian_request(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    causal: bool,
    window: int | None,
    constant_norm: bool,
    eps: float,
    return_weights: bool,
    impl: str,
) -> GaussianRequest:
    """The arguments of `gaussian_attention` as a request, checked, but for x, log_sigma and eps."""
    applied_eps = eps if keys is None else None  # with foreign keys the row sum may underflow
    keys = x if keys is None else keys
    values = keys if values is None else values
    needs_grad = _needs_grad(x, log_sigma, keys, values)
    whole = return_weights or impl == "reference"  # W is asked for as it is, hidden keys included
    prepared = _prepare(x, keys, values, causal, window, names=("keys", "values"), whole=whole)
    return GaussianRequest(*prepared, needs_grad, log_sigma, applied_eps, constant_norm)


def _prepare(
    x: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    causal: bool,
    window: int | None,
    names: tuple[str, str],
    whole: bool = False,
) -> Prepared:
    """(x, keys or None, values or None, mask) of a request: cast, checked, and None for what is another tensor again.

    Keys that no query sees are cut off (decoding with a window) and conditions of the mask that hide nothing removed,
    unless `whole`.
    """
    x, keys, values = _to_autocast_dtype(x, keys, values)
    validation.check_mask(causal, window)
    own_keys, own_values = keys is x, values is keys
    if not own_keys:
        validation.check_features(names[0], keys, like=x)
    if not own_values:
        validation.check_features(names[1], values, like=x)
    num_queries, num_keys = x.shape[1], keys.shape[1]
    validation.check_lengths(num_queries, num_keys, values.shape[1], causal or window is not None)
    mask = Mask(causal, window)
    first = 0 if whole else mask.first_visible_key(num_queries, num_keys)
    if first > 0:  # so keys are not x
        keys, values = keys[:, first:], values if own_values else values[:, first:]
    mask = mask if whole else mask.simplify(num_queries, num_keys - first)
    return x, None if own_keys else keys, None if own_values else values, mask


def _choose(request: GaussianRequest, return_weights: bool, impl: str) -> str:
    """See `select_impl`."""
    check_impl(impl)
    if return_weights:
        if impl not in ("auto", "reference"):
            raise ValueError(f'return_weights needs impl="reference" (or "auto"): impl={impl!r} never builds W')
        return "reference"
    if impl != "auto" and (obstacle := IMPLEMENTATIONS[impl].unavailable(request)):
        raise _unavailable(impl, obstacle)
    if request.x.shape[0] == 0:  # nothing to compute, and no kernel to launch on it
        return "reference"
    if impl != "auto":
        return impl
    if not request.x.is_cuda:
        if obstacle := cpu.unavailable(request):
            cpu.say_once(request, obstacle)
        return "sdpa" if obstacle else "cpu"
    if not triton.unavailable(request):
        return "triton"
    dense_or_extra = request.mask.window is not None or not request.constant_norm
    return "flex" if dense_or_extra and not flex.unavailable(request) else "sdpa"


def _unavailable(impl: str, obstacle: str) -> ValueError:
    return ValueError(f'impl="{impl}" is unavailable: {obstacle}; use impl="auto"')


def _needs_grad(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def _to_autocast_dtype(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Tensors:
    """Under autocast take its dtype once, here, so that norms are taken of the rounded features and stay float32.

    Comes before the checks, as mixed dtypes are welcome then; what cannot be cast is left for them. Arguments that are
    one tensor stay one.
    """
    kind = x.device.type
    if not _autocasts(kind) or x.dtype == torch.float64:
        return x, keys, values
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    cast_x = cast(x)
    cast_keys = cast_x if keys is x else cast(keys)
    return cast_x, cast_keys, cast_keys if values is keys else cast(values)
