"""Which implementation serves a request, by what each declares and by its own check, and the call of it."""

import logging
from typing import Any, Protocol

import torch

from gka.autocast import without_autocast
from gka.impl import cpu, flex, reference, sdpa, triton
from gka.padding_and_masks import can_pack, in_place, must_pack, pack, weights_in_place
from gka.request import TURNED_OFF, GaussianRequest, Request, Serves, SoftmaxRequest

LOG = logging.getLogger("gka")


class Implementation(Protocol):
    """A module or package of gka/impl. One of the softmax baseline has `dot_product(request)` too: softmax(scale * q.k)
    v for a `SoftmaxRequest`, (B, Tq, H, D).
    """

    SERVES: Serves

    def unavailable(self, request: Any) -> str | None:
        """Why it cannot serve a request that it declares to serve, such as for want of a device; None if it can."""

    def gaussian(self, request: GaussianRequest) -> torch.Tensor:
        """y, (B, Tq, H, D) in the dtype of x."""


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": reference,
    "triton": triton,
    "cpu": cpu,
    "flex": flex,
    "sdpa": sdpa,
}
BASELINES = {"flex": flex, "sdpa": sdpa}

_logged: set[str] = set()


def run(request: GaussianRequest, impl: str) -> torch.Tensor:
    """y by the implementation that `choose` names. One that does not read padding gets packed tokens and lengths."""
    implementation = IMPLEMENTATIONS[choose(request, impl)]
    with without_autocast(request.x.device.type):
        mask = request.key_padding_mask
        if mask is None or ("key_padding_mask" in implementation.SERVES.options and not must_pack(request)):
            return implementation.gaussian(request)
        packed, order = pack(request)
        y = implementation.gaussian(packed)
        return in_place(y, order, mask) if request.own_keys else y


def weights(request: GaussianRequest) -> torch.Tensor:
    """W, (B, H, Tq, Tk), by the reference."""
    with without_autocast(request.x.device.type):
        if request.key_padding_mask is None or not must_pack(request):
            return reference.output_and_weights(request)[1]
        packed, order = pack(request)
        matrix = reference.output_and_weights(packed)[1]
        return weights_in_place(matrix, order, request.key_padding_mask, request.own_keys)


def choose(request: GaussianRequest, impl: str) -> str:
    """The name of the implementation that runs; never "auto". ValueError if `impl` is unknown or cannot serve it."""
    check_impl(impl)
    name, refused = find(request, impl)
    if name is None:
        raise unavailable(impl, refused)
    if refused and not refused.startswith(TURNED_OFF):
        _log_once(f'gka: impl="auto" takes {name}: {refused.splitlines()[0]}')
    return name


def choose_baseline(request: SoftmaxRequest, impl: str) -> str:
    """As `choose`, for the softmax baseline; "auto" is FlexAttention for windows on CUDA, else SDPA."""
    if impl not in ("auto", *BASELINES):
        raise ValueError(f"dot_product_attention's impl must be one of auto, {', '.join(BASELINES)}, got {impl!r}")
    preferred = ("flex", "sdpa") if request.x.is_cuda and request.mask.window is not None else ("sdpa",)
    name, refused = _first(request, preferred if impl == "auto" else (impl,))
    if name is None:
        raise unavailable(impl, refused)
    return "sdpa" if request.x.shape[0] == 0 else name


def find(request: GaussianRequest, impl: str) -> tuple[str | None, str]:
    """(The implementation that serves the request; why the first candidate does not, or ""), or (None, why the last one
    does not).

    A batch of 0 has nothing to compute, and no kernel to launch: the reference stands in.
    """
    is_empty = request.x.shape[0] == 0
    preferred = ("reference",) if is_empty else _preferred(request)
    name, refused = _first(request, preferred if impl == "auto" else (impl,))
    return ("reference", "") if is_empty and name is not None else (name, refused)


def _preferred(request: GaussianRequest) -> tuple[str, ...]:
    """The candidates of "auto", in this order."""
    if request.x.is_cuda:
        # Without FlexAttention these need a dense mask. Elsewhere it is slower than SDPA, on an H200 up to four times.
        pads = request.lengths is not None or request.key_padding_mask is not None
        return ("triton", "flex", "sdpa") if pads or request.mask.window is not None else ("triton", "sdpa")
    return ("cpu", "sdpa") if request.x.device.type == "cpu" else ("sdpa",)


def _first(request: Request, names: tuple[str, ...]) -> tuple[str | None, str]:
    refused, obstacle = "", None
    for name in names:
        obstacle = why_not(name, request)
        if obstacle is None:
            return name, refused
        refused = refused or obstacle
    return None, obstacle or ""


def why_not(name: str, request: Any) -> str | None:
    """Why an implementation cannot serve a request, or None: by what it declares, then by its `unavailable`."""
    implementation = IMPLEMENTATIONS[name]
    head_dim = request.head_dim
    serves = implementation.SERVES
    unread = [option for option in request.requested if option not in serves.options]
    if unread == ["key_padding_mask"] and "lengths" in serves.options and can_pack(request):
        unread = []  # `run` packs the tokens
    if unread:
        return f"{name} does not serve {', '.join(unread)}"
    if request.x.dtype not in serves.dtypes:
        return f"{name} takes {', '.join(str(dtype)[6:] for dtype in serves.dtypes)}, got {request.x.dtype}"
    if head_dim < serves.min_head_dim:
        return f"{name} needs head_dim >= {serves.min_head_dim}, got {head_dim}"
    if serves.max_head_dim is not None and head_dim > serves.max_head_dim:
        return f"{name} needs head_dim <= {serves.max_head_dim}, got {head_dim}"
    return implementation.unavailable(request)


def unavailable(impl: str, reason: str) -> ValueError:
    """The error where `impl` cannot serve a request."""
    return ValueError(f'impl="{impl}" is unavailable: {reason}' + ('; use impl="auto"' if impl != "auto" else ""))


def check_impl(impl: str) -> None:
    """impl is "auto" or a name in IMPLEMENTATIONS; ValueError otherwise."""
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of auto, {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


def _log_once(line: str) -> None:
    """Log a line, once in a process."""
    if line not in _logged:
        _logged.add(line)
        LOG.warning("%s", line)


# torch.compile calls it while it traces, as it does build.obstacle (impl/cpu/build.py).
_log_once._dynamo_marked_constant = True  # type: ignore[attr-defined]
