"""The parts of attention around the operator that are not the paper's, one definition for the layer, for decoding and
for the trainers' models: rotary positions, bandwidths of channels, gates of heads, value embeddings; and the presets.

Head offsets and spatial offsets are in offsets.py.
Legend: B batch, T tokens, H heads, D head_dim, C = H * D.
"""

from typing import Any

import torch

from gka.request import Tables

ROTARY_BASE = 10_000.0
GATE_CHANNELS = 32  # of a token that the gate of value embeddings reads
GATE_SCALE = 0.1

# The settings of `GaussianKernelAttention` by its `preset`; None is the paper's form, whose settings a preset changes.
# sigma_squared is a function of head_dim.
PRESETS: dict[str | None, dict[str, Any]] = {
    None: dict(
        bias=True, sigma_squared=lambda head_dim: head_dim**0.5, head_norm=False, channel_bandwidths=False,
        head_offsets="", spatial_offsets="", head_gates=False, rotary=False,
    ),
    "text": dict(
        bias=False, sigma_squared=lambda head_dim: head_dim / 4, head_norm=True, channel_bandwidths=True,
        head_offsets="PS", head_gates=True, rotary=ROTARY_BASE,
    ),
    "image": dict(spatial_offsets="LRUB"),
}  # fmt: skip


def settings_of(preset: str | None, head_dim: int, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a preset for heads of that width; what is `given` and not None wins.

    Raises ValueError for an unknown preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be text, image or None (the paper's form), got {preset!r}")
    settings = {**PRESETS[None], **PRESETS[preset]}
    settings["sigma_squared"] = settings["sigma_squared"](head_dim)
    return settings | {name: value for name, value in given.items() if value is not None}


def rotary_tables(positions: torch.Tensor, head_dim: int, base: float = ROTARY_BASE) -> Tables:
    """(cos, sin) of the angles at `positions`, a float (T,): (T, D / 2) each, in its dtype and on its device."""
    channel = torch.arange(0, head_dim, 2, dtype=positions.dtype, device=positions.device)
    frequencies = 1.0 / (base ** (channel / head_dim))
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x, (B, T, H, D), with the pair of channels c and c + D / 2 turned by minus the angle, in x.dtype.

    cos, sin: of the angles, broadcast to (B, T, H, D / 2). This is nanochat's direction; Llama turns by plus the angle,
    that is with -sin.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1).to(x.dtype)


def rotate_to(x: torch.Tensor, rotary: float | Tables, positions: torch.Tensor | None = None) -> torch.Tensor:
    """x, (B, T, H, D), turned (`rotate`) to `positions`, whole numbers (T,); None: 0 to T - 1.

    rotary: the base of the angles, theta, which are computed in float32 or x.dtype if that is float64; or tables (cos,
    sin), (length, D / 2) each. Raises ValueError for more tokens than tables have, unless there are positions.
    """
    num_tokens, head_dim = x.shape[1], x.shape[3]
    if isinstance(rotary, tuple):
        if positions is None and num_tokens > len(rotary[0]):
            raise ValueError(f"rotary has tables of {len(rotary[0])} positions, and there are {num_tokens} tokens")
        cos, sin = (table[:num_tokens] if positions is None else table[positions] for table in rotary)
    else:
        positions = torch.arange(num_tokens, device=x.device) if positions is None else positions
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = rotary_tables(positions.to(dtype), head_dim, rotary)
    return rotate(x, cos[:, None], sin[:, None])


def scaled(x: torch.Tensor, log_scales: torch.Tensor) -> torch.Tensor:
    """x times exp(log_scales), channel by channel, in x.dtype: what the kernel compares, with a bandwidth per channel.

    log_scales: (C,) for x (B, T, C), or (H, D) for (B, T, H, D).
    """
    return x * log_scales.exp().to(x.dtype)


def head_gates(logits: torch.Tensor) -> torch.Tensor:
    """2 sigmoid(0.1 logits), the factors of the heads' outputs, (B, T, H), which are 1 for logits of 0.

    Gated attention (arXiv 2505.06708) with one number per head, as modded-nanogpt's.
    """
    return 2 * torch.sigmoid(GATE_SCALE * logits)


def add_value_embedding(values: torch.Tensor, logits: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """values + 2 sigmoid(logits) * embedding, head by head: (B, T, H, D), (B, T, H) and (B, T, H, D)."""
    return values + (2 * torch.sigmoid(logits))[..., None] * embedding
