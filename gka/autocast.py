"""torch.autocast at the operator's door: its dtype is taken once, on the arguments, and it is off inside."""

import contextlib

import torch

from gka.validation import Three


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for this kind of device."""
    # What is compiled is for a device that has it, and before torch 2.14 the question would break the graph.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """A context in which operations keep their arguments' dtype, also on devices without autocast, such as meta."""
    return torch.autocast(device_type, enabled=False) if autocasts(device_type) else contextlib.nullcontext()


def to_autocast_dtype(x: torch.Tensor, keys: torch.Tensor | None, values: torch.Tensor | None) -> Three:
    """(x, keys, values) with x for keys that are None and the keys for values that are None, and, under autocast, in
    its dtype: taken once, here, so that norms are taken of the rounded features and stay float32.

    Comes before the checks, as mixed dtypes are welcome under autocast; what cannot be cast is refused by the checks.
    Arguments that are one tensor stay one.
    """
    keys = x if keys is None else keys
    values = keys if values is None else values
    if not isinstance(x, torch.Tensor) or not autocasts(x.device.type) or x.dtype == torch.float64:
        return x, keys, values
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    cast_x = cast(x)
    cast_keys = cast_x if keys is x else cast(keys)
    return cast_x, cast_keys, cast_keys if values is keys else cast(values)
