"""What an implementation gets: one request, made and checked at the door; and its declaration of what it serves.

A request is never changed; `dataclasses.replace` makes another. It is no frozen dataclass because making one takes
longer, which a small call would notice.

A new option of the operator is a field of `Options` and of `GaussianRequest`, or of `Mask` if it is about who may look
at whom, and a name in `Serves.options` of every implementation that reads it; the door refuses it for the others
(dispatch.py). Its default is None: an option counts as requested if it is neither None nor False.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch

from gka.masking import Mask, names_set
from gka.validation import FLOATING

Tables = tuple[torch.Tensor, torch.Tensor]
TURNED_OFF = "turned off"  # begins a reason that the user chose; "auto" does not log it


@dataclass(frozen=True)
class Serves:
    """What an implementation declares; the door refuses the rest, tests and benchmarks read it."""

    options: frozenset[str]  # the conditions of `Mask` and the options of `GaussianRequest` that it reads
    applies_eps: bool  # False: it drops eps
    fused_on: tuple[str, ...] = ()  # types of device on which it does not store all scores: there it is timed
    dtypes: tuple[torch.dtype, ...] = FLOATING
    min_head_dim: int = 1
    max_head_dim: int | None = None


@dataclass(kw_only=True, eq=False)
class Request:
    """The tensors of one attention, in one dtype and on one device, and who may look at whom.

    Legend: B batch, Tq queries, Tk keys, H heads, D head_dim.
    """

    x: torch.Tensor  # queries, (B, Tq, H, D)
    keys: torch.Tensor | None  # (B, Tk, H, D), or None: x
    values: torch.Tensor | None  # (B, Tk, H, D), or None: the keys
    mask: Mask
    needs_grad: bool
    lengths: torch.Tensor | None = None  # (B,), tokens that each row of keys has; the rest is padding
    key_padding_mask: torch.Tensor | None = None  # (B, Tk) bool, True for padding
    attn_mask: torch.Tensor | None = None  # broadcast to (B, H, Tq, Tk): bool, True = visible, or added to exponents
    cu_seqlens: torch.Tensor | None = None  # (documents + 1,) int32, where documents begin and end; B is 1 and Tk is Tq
    forward_mode: bool | None = None  # whether a derivative in forward mode is being taken
    hiding: list[str] = field(init=False)  # names of what keeps some query from some key
    requested: list[str] = field(init=False)  # these, and the other options that are set

    def __post_init__(self) -> None:
        conditions, options = self.mask.conditions, names_set(self, OPTIONS)
        self.hiding = conditions + [name for name in options if name in PADDING_AND_MASKS]
        self.requested = conditions + options

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


@dataclass(kw_only=True, eq=False)
class GaussianRequest(Request):
    """One call of `gaussian_attention` or `decode_attention`. Fields with a default are the options."""

    log_sigma: torch.Tensor  # (H,)
    eps: float | None  # added to the row sum (paper eq. 4); None: the rows are normalised as a softmax
    constant_norm: bool  # the keys of a head promise to have one norm
    rotary: Tables | None = None  # (cos, sin): the keys are the values, rotated by them and normalised
    channel_scales: torch.Tensor | None = None  # (H, D), with rotary: multiplies the values before they are rotated
    cache_lengths: Sequence[int] | None = None  # tokens of each sequence, Tk at most; the last query is the last
    key_delays: Sequence[int] | None = None  # H numbers: the key at place j is that of token j - delay
    value_delays: Sequence[int] | None = None

    @property
    def limits(self) -> tuple[int, int]:
        """(before, after) of the mask as kernels take them: -1 for no limit."""
        before, after = self.mask.reach
        return -1 if before is None else before, -1 if after is None else after

    def operands(self, addressable: Callable[[torch.Tensor], torch.Tensor]) -> tuple:
        """(x, keys or None, values or None, log_sigma, before, after); `addressable` copies features where it must."""
        keys, values = (None if t is None else addressable(t) for t in (self.keys, self.values))
        return addressable(self.x), keys, values, self.log_sigma.contiguous(), *self.limits


@dataclass(kw_only=True, eq=False)
class SoftmaxRequest(Request):
    """One call of `dot_product_attention`; x are its queries."""

    scale: float


OPTIONS = tuple(option.name for option in fields(GaussianRequest) if option.default is None)
PADDING = {"lengths", "key_padding_mask"}
PADDING_AND_MASKS = {*PADDING, "attn_mask", "cu_seqlens"}
