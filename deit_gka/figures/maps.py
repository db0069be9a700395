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
    maps: list[LayerMaps] = []

    def add(attention: nn.Module, args: tuple, kwargs: dict[str, Any], output: torch.Tensor) -> None:
        maps.append(_maps(len(maps) + 1, attention, args, kwargs, output))

    layers, modes = _layers_of(model), {module: module.training for module in model.modules()}
    hooks = [attention.register_forward_hook(add, with_kwargs=True) for attention in layers]
    try:
        model.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return maps


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """The attention layers of a ViT in order. Raises UserError if W of one of them is not known here."""
    unknown = f"the attention of {type(model).__name__} is not known here"
    layers = []
    for number, block in enumerate(getattr(model, "blocks", []), start=1):
        layers.append(getattr(block, "attn", None))
        if not isinstance(getattr(layers[-1], "attn_drop", None), nn.Module) or not hasattr(layers[-1], "num_heads"):
            block = f"a {type(block).__name__} with {type(layers[-1]).__name__}, without attn_drop"
            raise UserError(f"{unknown}: layer {number} is {block}")
    if not layers:
        raise UserError(f"{unknown}; give a vision transformer such as deit_*, vit_*")
    return layers


def _maps(number: int, attention: nn.Module, args: tuple, kwargs: dict[str, Any], output: torch.Tensor) -> LayerMaps:
    """The maps of layer `number`, from 1, from its arguments and output."""
    layer = f"layer {number} ({type(attention).__name__})"
    x = args[0]
    try:
        weights, again = _weights_and_output(attention, args, kwargs, output.device)
    except RuntimeError as error:
        raise UserError(f"W of {layer} cannot be computed in float64: {reason_of(error)}") from error
    shape = (*x.shape[:1], attention.num_heads, *x.shape[1:2] * 2)
    if weights is None or weights.shape != shape or not ((weights.sum(-1) - 1).abs() < TOLERANCE).all():
        raise UserError(f"W of {layer} is not known here: what comes to attn_drop is no {shape} of rows that sum to 1")
    expected = output.to(again)
    error = float((again - expected).norm() / expected.norm().clamp(min=1e-30))
    if not error < max(TOLERANCE, ROUNDINGS * torch.finfo(output.dtype).eps):
        raise UserError(f"W of {layer} is not known here: it does not give the output (relative error {error:.1e})")
    maps = LayerMaps(kind_of(attention), weights.float().cpu(), error, None, None, None)
    if not hasattr(attention, "log_sigma"):
        return maps
    compared = attention.scaled(x.unflatten(-1, (attention.num_heads, -1)))
    return replace(
        maps,
        sigma=attention.log_sigma.exp().float().cpu(),
        initial_sigma=attention.sigma_squared**0.5,
        features=compared.float().cpu(),
    )


def _weights_and_output(
    attention: nn.Module, args: tuple, kwargs: dict[str, Any], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """W at `attn_drop` and the output, of a copy in float64 that repeats the call without fusion."""
    place = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
    attention = copy.deepcopy(attention).to(place, torch.float64).eval()
    for module in attention.modules():  # other programs' hooks
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    attention.fused_attn = False
    seen: list[torch.Tensor | None] = [None]
    attention.attn_drop.register_forward_pre_hook(lambda module, args: seen.append(args[0]))

    def exact(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(place, torch.float64 if value.is_floating_point() else value.dtype)

    with without_autocast(place.type):
        output = attention(*map(exact, args), **{name: exact(value) for name, value in kwargs.items()})
    return seen[-1], output


# Where the tokens of an image are, and how far its patches look


@dataclass(frozen=True)
class Tokens:
    """The layout of a ViT's tokens: the prefix (class, distillation, registers), then the patches row by row."""

    grid: tuple[int, int]  # rows, columns of patches
    patch: tuple[int, int]  # height, width in pixels
    prefix: int = 1
    has_class: bool = True  # the first token of the prefix is the class token

    @classmethod
    def of(cls, model: nn.Module) -> "Tokens":
        """The layout of one of timm's vision transformers."""
        embed, prefix = model.patch_embed, model.num_prefix_tokens
        return cls(embed.grid_size, embed.patch_size, prefix, prefix > 0 and model.has_class_token)

    @property
    def count(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def reader(self) -> str:
        """Whose row `read` gives, in words."""
        return "CLS row" if self.has_class else "mean row of the patches (the model has no class token)"

    def token(self, row: int, column: int) -> int:
        """The number of the token of a patch."""
        return self.prefix + self.grid[1] * row + column

    def read(self, weights: torch.Tensor) -> torch.Tensor:
        """The row that stands for the image, (..., N, N) -> (..., N): the class token's, else the patches' mean."""
        return weights[..., 0, :] if self.has_class else weights[..., self.prefix :, :].mean(-2)

    def patches(self, rows: torch.Tensor) -> torch.Tensor:
        """The weights of the patches where these are in the image, (..., N) -> (..., *grid)."""
        return rows[..., self.prefix :].unflatten(-1, self.grid)

    def queries(self) -> list[tuple[int, int]]:
        """The paper's four patches, (row, column): upper left, centre, lower right, upper right."""
        quarter, half, three = (tuple(side * part // 4 for side in self.grid) for part in (1, 2, 3))
        return [quarter, half, three, (quarter[0], three[1])]

    def query_tokens(self) -> list[int]:
        """The tokens of `queries`."""
        return [self.token(*query) for query in self.queries()]

    def distances(self) -> torch.Tensor:
        """Pixels between the centres of any two patches, (R * C, R * C)."""
        rows, columns = (torch.arange(side) * pixels for side, pixels in zip(self.grid, self.patch))
        centres = torch.cartesian_prod(rows, columns).float()
        return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")


def place_name(row: int, column: int) -> str:
    """A patch as pictures and pages name it, counted from 1. row, column: from 0."""
    return f"row {row + 1}, column {column + 1}"


def attended_distances(weights: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """How far every patch looks, in pixels: the distance to the patches, weighted by W. (..., N, N) -> (..., R * C).

    W is normalised over the patches. Weight on the patch itself is at distance 0.
    """
    among = weights[..., tokens.prefix :, tokens.prefix :]
    among = among / among.sum(-1, keepdim=True).clamp(min=torch.finfo(among.dtype).tiny)
    return (among * tokens.distances()).sum(-1)
