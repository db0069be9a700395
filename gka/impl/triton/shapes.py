"""Uninitialised results of the kernels, for launches and for torch's fake tensors."""

import torch


def output_like(x: torch.Tensor, keys: torch.Tensor | None, constant_norm: bool):
    """(y, level, norm) of `gka::attend`."""
    batch, length, heads, _ = x.shape
    level = x.new_empty((batch, heads, length), dtype=torch.float32)
    norm = x.new_empty((0,) if constant_norm or keys is not None else level.shape, dtype=torch.float32)
    return x.new_empty(x.shape), level, norm


def gradients_like(x, keys, values, log_sigma) -> list[torch.Tensor]:
    """[dx, dlog_sigma] of `gka::attend_backward` and, where they are not x, dkeys and dvalues."""
    gradients = [t.new_empty(t.shape) for t in (keys, values) if t is not None]
    return [x.new_empty(x.shape), torch.empty_like(log_sigma), *gradients]
