"""The attention matrices W of a ViT, layer by layer, whatever kinds of attention its layers have.

Fused attention never builds W. A copy of the layer in float64 therefore repeats the layer's own call without fusion,
and shows W where it passes through `attn_drop`, as our attention and timm's have it. It is checked: the copy must give
the layer's own output.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deit_gka.model.attention import kind_of
from gka import without_autocast
from trainkit_gka.cli import UserError, reason_of

TOLERANCE = 1e-3  # float32 outputs differ from float64 ones by 1e-6
ROUNDINGS = 8  # how many times its own epsilon a half-precision output may be off


@dataclass(frozen=True)
class LayerMaps:
    """W of one attention layer, and its bandwidths; without the leading B after `of_image`."""

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


@dataclass(frozen=True)
class Call:
    """A layer's arguments and output."""

    attention: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    output: torch.Tensor


@torch.no_grad()
def attention_maps(model: nn.Module, images: torch.Tensor) -> list[LayerMaps]:
    """W of every layer, and the bandwidths where there are some, from one forward pass in evaluation mode.

    model: one of ours, or of timm's with blocks whose attention has `attn_drop` (ViT, DeiT, DINOv2 and 3, SigLIP, EVA,
    BEiT, ...), in any mode, dtype and place; it stays as it is. images: normalised, (B, 3, height, width), where the
    model is; B may be 0. Raises UserError for images of another shape, and, naming the layer, for attention whose W
    cannot be had, is not row-stochastic, or does not give the layer's output.
    """
    if images.ndim != 4:
        raise UserError(f"images must be (B, 3, height, width), got {tuple(images.shape)}; one image is image[None]")
    calls: list[Call] = []

    def keep(attention: nn.Module, args: tuple, kwargs: dict[str, Any], output: torch.Tensor) -> None:
        calls.append(Call(attention, args, kwargs, output))

    layers, modes = _layers_of(model), {module: module.training for module in model.modules()}
    hooks = [attention.register_forward_hook(keep, with_kwargs=True) for attention in layers]
    try:
        model.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return [_maps(number, call) for number, call in enumerate(calls, start=1)]


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """The attention layers of a ViT in order. Raises UserError if W of one of them is not known here."""
    blocks, name = list(getattr(model, "blocks", [])), type(model).__name__
    if not blocks:
        raise UserError(f"the attention of {name} is not known here; give a vision transformer such as deit_*, vit_*")
    layers = [getattr(block, "attn", None) for block in blocks]
    for number, layer in enumerate(layers, start=1):
        if not isinstance(getattr(layer, "attn_drop", None), nn.Module) or not hasattr(layer, "num_heads"):
            block = f"{type(blocks[number - 1]).__name__} with {type(layer).__name__}"
            raise UserError(
                f"the attention of {name} is not known here: layer {number} is a {block}, without attn_drop"
            )
    return layers


def _maps(number: int, call: Call) -> LayerMaps:
    """The maps of layer `number`, from 1."""
    attention, x = call.attention, call.args[0]
    layer = f"layer {number} ({type(attention).__name__})"
    try:
        weights, again = _weights_and_output(call)
    except RuntimeError as error:
        raise UserError(f"W of {layer} cannot be computed in float64: {reason_of(error)}") from error
    shape = (*x.shape[:1], attention.num_heads, *x.shape[1:2] * 2)
    if weights is None or weights.shape != shape:
        seen = "nothing" if weights is None else f"a tensor of shape {tuple(weights.shape)}"
        raise UserError(f"W of {layer} is not known here: {seen} came to attn_drop instead of {shape}")
    if not ((weights.sum(-1) - 1).abs() < TOLERANCE).all():
        raise UserError(f"W of {layer} is not known here: rows of what came to attn_drop do not sum to 1")
    output = call.output.to(again)
    error = float((again - output).norm() / output.norm().clamp(min=1e-30))
    if not error < max(TOLERANCE, ROUNDINGS * torch.finfo(call.output.dtype).eps):
        raise UserError(
            f"the recomputed W of {layer} does not give the model's output (relative error {error:.1e}): "
            "its attention is not one that these figures know"
        )
    has_sigma = hasattr(attention, "log_sigma")
    compared = attention.scaled(x.unflatten(-1, (attention.num_heads, -1))) if has_sigma else None
    return LayerMaps(
        kind=kind_of(attention),
        weights=weights.float().cpu(),
        error=error,
        sigma=attention.log_sigma.exp().float().cpu() if has_sigma else None,
        initial_sigma=attention.sigma_squared**0.5 if has_sigma else None,
        features=None if compared is None else compared.float().cpu(),
    )


def _weights_and_output(call: Call) -> tuple[torch.Tensor | None, torch.Tensor]:
    """W at `attn_drop` and the output, of a copy in float64 that repeats the call without fusion."""
    place = torch.device("cpu") if call.output.device.type == "mps" else call.output.device  # MPS has no float64
    attention = copy.deepcopy(call.attention).to(place, torch.float64).eval()
    for module in attention.modules():  # other programs' hooks
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    attention.fused_attn = False
    seen: list[torch.Tensor] = []
    attention.attn_drop.register_forward_pre_hook(lambda module, args: seen.append(args[0]))

    def exact(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(place, torch.float64 if value.is_floating_point() else value.dtype)

    with without_autocast(place.type):
        output = attention(*map(exact, call.args), **{name: exact(value) for name, value in call.kwargs.items()})
    return seen[-1] if seen else None, output
