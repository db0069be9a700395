"""The attention matrices W of a ViT, layer by layer, whatever kinds of attention its layers have.

Fused attention never builds W, so it is computed again in float64 from the layer's own input, and checked: applied to
the layer's values it must give the layer's own output.
"""

import copy
from dataclasses import dataclass, replace

import torch
from timm.layers import Attention
from torch import nn

from deit_gka.model.attention import TimmAttention, kind_of
from trainkit.cli import UserError

TOLERANCE = 1e-3  # float32 outputs differ from float64 ones by 1e-6


@dataclass(frozen=True)
class LayerMaps:
    """What one attention layer did; the leading B is missing after `of_image`."""

    kind: str  # a row of gka/kinds.py
    weights: torch.Tensor  # W, (B, H, N, N), float32, rows sum to 1
    error: float  # |output by W - the layer's output| / |the layer's output|
    sigma: torch.Tensor | None  # (H,), and None, as the two below, for kinds without a bandwidth
    initial_sigma: float | None
    features: torch.Tensor | None  # (B, N, H, D), whose distances are in the kernel

    def of_image(self, index: int) -> "LayerMaps":
        """The maps of one image of the batch."""
        features = None if self.features is None else self.features[index]
        return replace(self, weights=self.weights[index], features=features)


def attention_maps(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """The row-stochastic W of every layer, float32 (B, H, N, N), from one forward pass.

    images: normalised, (B, 3, S, S).
    """
    return [layer.weights for layer in extract(model, images)]


@torch.inference_mode()
def extract(model: nn.Module, images: torch.Tensor) -> list[LayerMaps]:
    """The maps of every layer, from one forward pass of normalised images (B, 3, height, width).

    Raises UserError for attention that is neither ours nor timm's, or whose W does not give the layer's output.
    """
    seen: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []

    def keep(attention: nn.Module, args: tuple, output: torch.Tensor) -> None:
        seen.append((attention, args[0], output))

    hooks = [attention.register_forward_hook(keep) for attention in attention_layers(model)]
    try:
        model.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
    return [_maps(number, *layer) for number, layer in enumerate(seen, start=1)]


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The attention layers of a ViT in order. Raises UserError if W of one of them is not known here."""
    layers = [getattr(block, "attn", None) for block in getattr(model, "blocks", [])]
    if not layers or not all(isinstance(layer, (TimmAttention, Attention)) for layer in layers):
        name = type(model).__name__
        raise UserError(f"the attention of {name} is not known here; give a vision transformer such as deit_*, vit_*")
    return layers


def _maps(number: int, attention: nn.Module, x: torch.Tensor, output: torch.Tensor) -> LayerMaps:
    """The maps of layer `number` (from 1), from its input (B, N, C) and its output."""
    exact, x = _exact(attention), x.double()
    weights, again = _weights_and_output(exact, x)
    error = float((again - output).norm() / output.norm().clamp(min=1e-30))
    if not error < TOLERANCE:
        raise UserError(
            f"the recomputed W of layer {number} does not give the model's output (relative error {error:.1e}): "
            "its attention is not one that these figures know"
        )
    has_sigma = hasattr(attention, "log_sigma")
    return LayerMaps(
        kind=kind_of(attention),
        weights=weights.float().cpu(),
        error=error,
        sigma=attention.log_sigma.exp().float().cpu() if has_sigma else None,
        initial_sigma=attention.sigma_squared**0.5 if has_sigma else None,
        features=x.unflatten(-1, (attention.num_heads, -1)).float().cpu() if has_sigma else None,
    )


def _exact(attention: nn.Module) -> nn.Module:
    """A copy in float64, without the hooks that its parts may have."""
    exact = copy.deepcopy(attention).double()
    for module in exact.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return exact


def _weights_and_output(attention: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """W, (B, H, N, N), of one layer for its input (B, N, C), and the output (B, N, C) that follows from it."""
    if isinstance(attention, TimmAttention):
        heads = x.unflatten(-1, (attention.num_heads, -1))
        weights = attention.weights(x, heads, None, False)
        return weights, attention.proj(torch.einsum("bhij,bjhd->bihd", weights, attention.values(heads)).flatten(2))
    queries, keys, values = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
    queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    weights = (torch.einsum("bihd,bjhd->bhij", queries, keys) * attention.scale).softmax(dim=-1)
    mixed = attention.norm(torch.einsum("bhij,bjhd->bihd", weights, values).flatten(2))
    gate = getattr(attention, "gate", None)
    return weights, attention.proj(mixed if gate is None else mixed * gate(x).sigmoid())
