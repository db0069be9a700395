"""The attention matrices W of a ViT, layer by layer, whatever kinds of attention its layers have."""

import torch
from torch import nn

from deit_gka.model.attention import TimmAttention


@torch.inference_mode()
def attention_maps(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """The row-stochastic W of every layer, float32 (B, H, N, N), from one forward pass.

    images: normalised, (B, 3, S, S).
    """
    maps: list[torch.Tensor] = []

    def keep(attention: nn.Module, args: tuple, kwargs: dict) -> None:
        maps.append(_weights(attention, args[0]).float().cpu())

    hooks = [block.attn.register_forward_pre_hook(keep, with_kwargs=True) for block in model.blocks]
    try:
        model.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
    return maps


def _weights(attention: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """W, (B, H, N, N), of one layer for its input (B, N, C), recomputed: fused attention never builds it."""
    if isinstance(attention, TimmAttention):
        return attention.weights(x, x.unflatten(-1, (attention.num_heads, -1)), None, False)
    queries, keys, _ = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
    queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    return (torch.einsum("bihd,bjhd->bhij", queries, keys) * attention.scale).softmax(dim=-1)
