"""What an implementation is asked for: one frozen object, made and checked at the door; and what it says it serves.

A new option of the operator is a field of `GaussianRequest`, or of `Mask` if it is about who may look at whom, and a
name in `Serves.options` of every implementation that reads it. The door refuses it for the others (dispatch.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from gka import validation
from gka.autocast import to_autocast_dtype
from gka.masking import Mask
from gka.validation import readable

Tables = tuple[torch.Tensor, torch.Tensor]
Prepared = dict[str, Any]
TURNED_OFF = "turned off"  # starts a reason that is the user's own wish, which "auto" does not log


@dataclass(frozen=True)
class Serves:
    """What an implementation declares; the door refuses the rest, tests and benchmarks read it."""

    options: frozenset[str]  # the conditions of `Mask` and the options of `GaussianRequest` that it reads
    applies_eps: bool  # False: it drops eps
    fused_on: tuple[str, ...] = ()  # types of device on which it does not store all scores: there it is timed
    dtypes: tuple[torch.dtype, ...] = validation.FLOATING
    min_head_dim: int = 1
    max_head_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """The tensors of one attention, in one dtype and on one device, and who may look at whom.

    Legend: B batch, Tq queries, Tk keys, H heads, D head_dim.
    """

    x: torch.Tensor  # queries, (B, Tq, H, D)
    keys: torch.Tensor | None  # (B, Tk, H, D), or None: x
    values: torch.Tensor | None  # (B, Tk, H, D), or None: the keys
    mask: Mask
    needs_grad: bool
    lengths: torch.Tensor | None = None  # (B,), tokens that each row of keys has; what is behind them is padding
    key_padding_mask: torch.Tensor | None = None  # (B, Tk) bool, True for padding
    attn_mask: torch.Tensor | None = (
        None  # broadcast to (B, H, Tq, Tk): bool, True = visible, or added to the exponents
    )
    forward_mode: bool | None = None  # whether a derivative in forward mode is being taken
    asks: tuple[str, ...] = field(init=False)  # names of the mask's conditions and of the options that are set

    def __post_init__(self) -> None:
        asks = (*_set_among(CONDITIONS, self.mask), *_set_among(OPTIONS, self))
        object.__setattr__(self, "asks", asks)

    @property
    def own_keys(self) -> bool:
        """Whether the queries are the keys too (self-attention)."""
        return self.keys is None

    @property
    def own_values(self) -> bool:
        """Whether the keys are the values too."""
        return self.values is None

    @property
    def key_features(self) -> torch.Tensor:
        """The keys, whichever tensor they are."""
        return self.x if self.keys is None else self.keys

    @property
    def value_features(self) -> torch.Tensor:
        """The values, whichever tensor they are."""
        return self.key_features if self.values is None else self.values

    @property
    def num_queries(self) -> int:
        return self.x.shape[1]

    @property
    def num_keys(self) -> int:
        return self.key_features.shape[1]

    @property
    def head_dim(self) -> int:
        return self.x.shape[3]


@dataclass(frozen=True, kw_only=True)
class GaussianRequest(Request):
    """One call of `gaussian_attention` or `decode_attention`. Fields with a default are the options."""

    log_sigma: torch.Tensor  # (H,)
    eps: float | None  # added to the row sum (paper eq. 4); None: the rows are normalised as a softmax
    constant_norm: bool  # the keys of a head promise to have one norm
    rotary: Tables | None = None  # (cos, sin): the keys are turned by them and normalised, the values are not
    channel_scales: torch.Tensor | None = None  # (H, D), with rotary: what is turned is multiplied with it before
    cache_lengths: Sequence[int] | None = (
        None  # tokens that each sequence has of Tk, of which the last query is the last
    )
    key_delays: Sequence[int] | None = None  # H numbers: token j stands for the key of token j - delay
    value_delays: Sequence[int] | None = None

    @property
    def limits(self) -> tuple[int, int]:
        """(before, after) of the mask as kernels take them: -1 for no limit."""
        before, after = self.mask.reach
        return -1 if before is None else before, -1 if after is None else after

    def operands(self, addressable: Callable[[torch.Tensor], torch.Tensor]) -> tuple:
        """(x, keys or None, values or None, log_sigma, before, after) as a fused kernel takes them: features through
        `addressable`, which copies those that the kernel cannot address.
        """
        keys, values = (None if t is None else addressable(t) for t in (self.keys, self.values))
        return addressable(self.x), keys, values, self.log_sigma.contiguous(), *self.limits


@dataclass(frozen=True, kw_only=True)
class SoftmaxRequest(Request):
    """One call of `dot_product_attention`; x are its queries."""

    scale: float


CONDITIONS = tuple(condition.name for condition in fields(Mask))
OPTIONS = tuple(option.name for option in fields(GaussianRequest) if option.default is None)
HIDING = {*CONDITIONS, "lengths", "key_padding_mask", "attn_mask"}  # what keeps some query from some key


def _set_among(names: tuple[str, ...], owner: object) -> list[str]:
    return [name for name in names if (value := getattr(owner, name, None)) is not None and value is not False]


def gaussian_request(
    x: torch.Tensor,
    log_sigma: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    causal: bool,
    window: int | None,
    *,
    eps: float,
    constant_norm: bool,
    lengths: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    whole: bool = False,
    names: tuple[str, str] = ("keys", "values"),
    **options: Any,
) -> GaussianRequest:
    """The arguments of `gaussian_attention` as a request, checked. options: fields of the request that have a default.

    whole: hidden keys stay. names: what keys and values are called in errors. Raises TypeError or ValueError naming the
    argument.
    """
    validation.check_features("x", x)
    validation.check_log_sigma(log_sigma, x)
    validation.check_eps(eps)
    keys = x if keys is None else keys
    applied_eps = eps if keys is x and attn_mask is None else None  # without its own key a row sum may underflow
    values = keys if values is None else values
    needs_grad = _needs_grad(x, log_sigma, keys, values, attn_mask)
    if options:
        needs_grad = needs_grad or _needs_grad(*(options.get("rotary") or ()), options.get("channel_scales"))
    hides = lengths is not None or key_padding_mask is not None or attn_mask is not None
    prepared = _prepared(x, keys, values, causal, window, names=names, whole=whole or hides)
    if hides:
        given: dict[str, Any] = dict(lengths=lengths, key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        validation.check_hidden(x, keys.shape[1], **given)
        options |= given | _padding(lengths, key_padding_mask, keys.shape[1])
    return GaussianRequest(
        **prepared, needs_grad=needs_grad, log_sigma=log_sigma, eps=applied_eps, constant_norm=constant_norm, **options
    )


def _padding(lengths: torch.Tensor | None, mask: torch.Tensor | None, num_keys: int) -> dict[str, torch.Tensor | None]:
    """The same padding in the form that costs least, as far as the values can be looked at."""
    if lengths is not None and readable(lengths) and bool((lengths == num_keys).all()):
        lengths = None
    if mask is not None and readable(mask) and not bool((mask[:, :-1] > mask[:, 1:]).any()):  # on the right alone
        lengths, mask = ((~mask).sum(1) if mask.any() else None), None
    return dict(lengths=lengths, key_padding_mask=mask)


def softmax_request(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, scale: float | None
) -> SoftmaxRequest:
    """The arguments of `dot_product_attention` as a request, checked. Raises TypeError or ValueError."""
    validation.check_features("q", q)
    prepared = _prepared(q, k, v, causal, window, names=("k", "v"))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return SoftmaxRequest(**prepared, needs_grad=_needs_grad(q, k, v), scale=scale)


def _prepared(
    x: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    causal: bool,
    window: int | None,
    names: tuple[str, str],
    whole: bool = False,
) -> Prepared:
    """x, keys, values and mask of a request: cast, checked, and None for what is another tensor again.

    Conditions of the mask that hide nothing are removed and, unless `whole`, keys that no query sees are cut off
    (decoding with a window).
    """
    x, keys, values = to_autocast_dtype(x, keys, values)
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
    mask = mask.simplify(num_queries, num_keys - first)
    others = dict(keys=None if own_keys else keys, values=None if own_values else values)
    # dual_level, jvp, jacfwd and hessian; tensors that carry a tangent under another transform do not tell.
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return dict(x=x, **others, mask=mask, forward_mode=forward_mode or None)


def _needs_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
