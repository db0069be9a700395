"""The struct GkaRequest of source/request.h: how Python packs the arguments of a call into bytes for C."""

import struct
from itertools import chain
from operator import itemgetter

import torch

NO_TENSOR = (0, 0, 0, 0)
TENSORS = ("x", "keys", "values", "y", "grad_y", "dx", "dkeys", "dvalues", "residual")  # a GkaTensor each
NUMBERS = {  # by type, as the module struct abbreviates it: q int64_t or an address, f float, i int32_t
    "q": "log_sigma row_state dlog_sigma cu_seqlens cos sin channel_scales lengths key_delays value_delays batch "
    "num_queries num_keys num_heads head_dim before after",
    "f": "eps bound",
    "i": "own_keys own_values centred half half_tables threads",
}
_NAMES = " ".join(NUMBERS.values()).split()
NOTHING = dict.fromkeys(TENSORS, NO_TENSOR) | dict.fromkeys(_NAMES, 0)  # for the members that a phase does not read
_struct = struct.Struct("4q" * len(TENSORS) + "".join(f"{len(n.split())}{code}" for code, n in NUMBERS.items()))
_tensors, _numbers = itemgetter(*TENSORS), itemgetter(*_NAMES)
SIZE = _struct.size


def pack(members: dict) -> bytes:
    """The bytes of a GkaRequest: 4 numbers for a tensor, else one. Raises KeyError where a member is missing."""
    return _struct.pack(*chain.from_iterable(_tensors(members)), *_numbers(members))


def tensor(t: torch.Tensor | None) -> tuple[int, ...]:
    """A GkaTensor: the address of (B, T, H, D) numbers, and how far apart two sequences, tokens and heads are."""
    return NO_TENSOR if t is None else (t.data_ptr(), *t.stride()[:3])


def address(t: torch.Tensor | None) -> int:
    """Where the numbers of a tensor are; 0, a null pointer, without one."""
    return 0 if t is None else t.data_ptr()
