"""The structs of source/request.h and source/decode.h: how Python packs the arguments of a call into bytes for C."""

import struct
from itertools import chain
from operator import itemgetter

import torch

NO_TENSOR = (0, 0, 0, 0)


class Layout:
    """The members of a C struct, in its order: first the GkaTensors, then numbers and addresses.

    name: the struct's. tensors: names of its GkaTensors. numbers: names of the other members by their type, as the
    module struct abbreviates it: q int64_t or an address, d double, f float, i int32_t.
    """

    def __init__(self, name: str, tensors: str, numbers: dict[str, str]) -> None:
        self.name, self.tensors = name, tensors.split()
        types = (f"{len(names.split())}{code}" for code, names in numbers.items())
        self._struct = struct.Struct("".join(("4q" * len(self.tensors), *types)))
        self._tensors, self._numbers = itemgetter(*self.tensors), itemgetter(*" ".join(numbers.values()).split())
        self.size = self._struct.size

    def pack(self, members: dict) -> bytes:
        """The bytes of the struct: 4 numbers for a tensor, else one. Raises KeyError where a member is missing."""
        return self._struct.pack(*chain.from_iterable(self._tensors(members)), *self._numbers(members))


REQUEST = Layout(
    "GkaRequest",
    tensors="x keys values y grad_y dx dkeys dvalues residual",
    numbers=dict(
        q="log_sigma row_state dlog_sigma batch num_queries num_keys num_heads head_dim before after",
        f="eps bound",
        i="own_keys own_values centred threads",
    ),
)
DECODE = Layout(
    "GkaDecode",
    tensors="x keys values y",
    numbers=dict(
        q="cos sin channel_scales lengths key_delays value_delays log_sigma batch num_queries num_keys num_heads "
        "head_dim before after half half_tables threads",
        d="bound eps",
    ),
)


def tensor(t: torch.Tensor | None) -> tuple[int, ...]:
    """A GkaTensor: the address of (B, T, H, D) numbers, and how far apart two sequences, tokens and heads are."""
    return NO_TENSOR if t is None else (t.data_ptr(), *t.stride()[:3])


def address(t: torch.Tensor | None) -> int:
    """Where the numbers of a tensor are; 0, a null pointer, without one."""
    return 0 if t is None else t.data_ptr()
