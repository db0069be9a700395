"""Parameters and FLOPs of a ViT from its shapes alone, as the paper's tables of vision models count them.

FLOPs are 2 x multiply-accumulates of one image's forward pass, matrix products only (gka/cost.py).
DeiT-S has 9.20 GFLOPs in the paper's comparison, which is this count, and 9.22 in its efficiency table, which counts
LayerNorm too.
"""

from dataclasses import dataclass

from timm.models import VisionTransformer
from torch import nn

import gka.flops  # noqa: F401  torch's FLOP counter then sees these FLOPs too
from deit_gka.model.attention import kind_of
from gka import KINDS, attention_cost, layer_kinds

MIB = 2**20


@dataclass(frozen=True)
class ModelCost:
    """The columns of the paper's tables."""

    parameters: int
    attention: int  # W_O, biases and bandwidths included
    mlp: int
    bandwidths: int
    flops: int  # one image, forward

    @property
    def raw_mib(self) -> float:
        """float32 weights in MiB, the paper's "MB"; the file that torch.save writes is about 0.05 larger."""
        return 4 * self.parameters / MIB


def vit_cost(
    attention: str,
    dim: int,
    depth: int,
    num_heads: int,
    *,
    image_size: int = 224,
    patch_size: int = 16,
    channels: int = 3,
    classes: int = 1000,
    mlp_ratio: float = 4,
    value_bias: bool = True,
    distilled: bool = False,
    norm_weight: bool = True,
    channel_bandwidths: bool = False,
) -> ModelCost:
    """Cost of a DeiT-shaped ViT (pre-norm, CLS token, learned positions, biases everywhere).

    attention: a kind's name, or a pattern by layer such as GGGA. distilled: with DeiT's second token and head.
    norm_weight: of the norms before attention. channel_bandwidths: of the GKA layers.
    Raises ValueError as `gka.layer_kinds` and `gka.attention_cost`.
    """
    patches, prefix = (image_size // patch_size) ** 2, 1 + distilled
    tokens, hidden, pixels = patches + prefix, int(mlp_ratio * dim), channels * patch_size**2
    kinds = layer_kinds(attention, depth)
    layers = [attention_cost(kind, dim, num_heads, tokens, value_bias=value_bias) for kind in kinds]
    sublayers = sum(layer.parameters for layer in layers) + channel_bandwidths * kinds.count("gka") * dim
    mlps = depth * (2 * dim * hidden + hidden + dim)
    heads = prefix * (dim * classes + classes) if classes else 0
    norms = ((1 + norm_weight) * depth + 1) * 2 * dim
    embedding = (pixels * dim + dim) + prefix * dim + tokens * dim  # patches, special tokens, positions
    flops = 2 * patches * pixels * dim + depth * 4 * tokens * dim * hidden + prefix * 2 * dim * classes
    return ModelCost(
        parameters=embedding + sublayers + mlps + norms + heads,
        attention=sublayers,
        mlp=mlps,
        bandwidths=sum(layer.bandwidths for layer in layers),
        flops=flops + sum(layer.flops for layer in layers),
    )


def cost_of(model: nn.Module) -> ModelCost | None:
    """Cost of a built timm ViT; None for architectures that `vit_cost` does not cover."""
    if not isinstance(model, VisionTransformer):
        return None
    layers, embed = [getattr(block, "attn", None) for block in model.blocks], model.patch_embed
    num_heads = {getattr(layer, "num_heads", None) for layer in layers}
    if len(num_heads) != 1 or num_heads == {None} or not hasattr(model.blocks[0].mlp, "fc1"):
        return None
    if not isinstance(getattr(embed, "proj", None), nn.Conv2d):  # a hybrid's patches come out of a network
        return None
    cost = vit_cost(
        "".join(KINDS[kind_of(layer)].letter for layer in layers),
        model.embed_dim,
        len(layers),
        num_heads.pop(),
        image_size=embed.img_size[0],
        patch_size=embed.patch_size[0],
        channels=embed.proj.in_channels,
        classes=model.num_classes,
        mlp_ratio=model.blocks[0].mlp.fc1.out_features / model.embed_dim,
        value_bias=any(getattr(layer, "value_bias", None) is not None for layer in layers),
        distilled=hasattr(model, "head_dist"),
        norm_weight=getattr(model.blocks[0].norm1, "weight", None) is not None,
        channel_bandwidths=any(getattr(layer, "log_scale", None) is not None for layer in layers),
    )
    known = cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    return cost if known else None  # registers, no biases, images that are not square, ...
