"""DeiT's three sizes with our attention as timm models: deit_{tiny,small,base}_{gka,vlt}[_distilled]_patch16_224.

They are timm's own ViT with other attention in its blocks; the softmax models are timm's deit_*.

import timm, deit_gka
model = timm.create_model("deit_tiny_gka_patch16_224")                            # the paper's GKA-Ti
model = timm.create_model("deit_small_gka_patch16_224", sigma_squared=1.0)        # another starting bandwidth
model = timm.create_model("deit_tiny_gka_patch16_224", attention="GGGA")          # softmax in every fourth layer
model = timm.create_model("deit_tiny_gka_patch16_224", spatial_offsets="LUD")     # neighbours' values, see offsets.py
model = timm.create_model("vit_small_patch16_224", attn_layer="GGGA")             # any timm ViT; "gka" for all layers
"""

from functools import partial
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    build_model_with_cfg,
    deit,
    generate_default_cfgs,
    register_model,
    vision_transformer,
    vision_transformer_hybrid,
    vitamin,
)
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn
from torch import nn

from deit_gka.model.attention import ATTENTION
from deit_gka.model.blocks import block_of, check_settings
from deit_gka.model.offsets import place_offsets

SIZES = {
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),
    "small": dict(embed_dim=384, depth=12, num_heads=6),
    "base": dict(embed_dim=768, depth=12, num_heads=12),
}
OUR_KINDS = [kind for kind in ATTENTION if kind != "softmax"]
SETTINGS = {name for kind in ATTENTION.values() for name in kind.SETTINGS}
CROP_PCT = 0.875  # resize to 256, crop 224, as DeiT evaluates (timm's own deit entries say 0.9)

# Any ViT of timm's, by attn_layer


def build(
    architecture: type[nn.Module],
    name: str,
    pretrained: bool,
    attn_layer: str | type[nn.Module] = "",
    block_fn: type[nn.Module] = Block,
    **arguments,
) -> nn.Module:
    """timm's `build_model_with_cfg`, whose attn_layer may also be one of our classes, a kind's name or a pattern.

    Raises ValueError for another pattern, and for blocks whose attention cannot be chosen.
    """
    if attn_layer in ATTENTION.values():
        attn_layer = attn_layer.kind
    known = vision_transformer.ATTN_LAYERS  # ours, timm's, and what others add
    if isinstance(attn_layer, str) and (attn_layer in ATTENTION or attn_layer not in known):
        check_settings(attn_layer, {})
        arguments["block_fn"] = partial(block_of, attn_layer, {}, block_fn)
    else:
        arguments |= dict(attn_layer=attn_layer, block_fn=block_fn)
    return build_model_with_cfg(architecture, name, pretrained, **arguments)


for family in (deit, vision_transformer, vision_transformer_hybrid, vitamin):
    family.build_model_with_cfg = build  # so that timm.create_model takes them too
vision_transformer.ATTN_LAYERS.update(ATTENTION)  # and timm's classes take the names of the kinds

# DeiT with our attention


def model_name(size: str, kind: str, distilled: bool = False) -> str:
    """timm's name of DeiT in a size of SIZES with one kind of attention; softmax is timm's own model."""
    ours = f"_{kind}" if kind in OUR_KINDS else ""
    return f"deit_{size}{ours}{'_distilled' * distilled}_patch16_224"


def takes_attention(name: str) -> bool:
    """Whether the model called `name` is one of ours, which take `attention`; timm's other ViTs take `attn_layer`."""
    return name.split(".")[0] in default_cfgs


def _configuration(distilled: bool) -> dict[str, Any]:
    """What timm keeps of a model beside its architecture."""
    images = dict(input_size=(3, 224, 224), fixed_input_size=True, crop_pct=CROP_PCT, interpolation="bicubic")
    images |= dict(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
    layers = dict(first_conv="patch_embed.proj", classifier=("head", "head_dist") if distilled else "head")
    return dict(url="", license="mit", num_classes=1000, pool_size=None, **images, **layers)


# timm's decorator reads this name of this module.
default_cfgs = generate_default_cfgs(
    {
        model_name(size, kind, distilled): _configuration(distilled)
        for size in SIZES
        for kind in OUR_KINDS
        for distilled in (False, True)
    }
)


def create(
    size: str,
    kind: str,
    pretrained: bool,
    distilled: bool = False,
    attention: str | None = None,
    attn_layer: str | type[nn.Module] | None = None,
    block_fn: type[nn.Module] = Block,
    norm_weight: bool = True,
    **arguments,
) -> VisionTransformer:
    """DeiT in a size of SIZES.

    attention: another kind than the name's, or a pattern by layer such as GGGA; timm's attn_layer says the same.
    norm_weight: False takes weight and bias from the norm before attention. arguments: timm's, and settings of the
    kinds of attention, of which None is the default.
    Raises ValueError for settings that none of the kinds has.
    """
    chosen = attention if attn_layer is None else getattr(attn_layer, "kind", attn_layer)
    if not isinstance(chosen, str | None):
        raise ValueError(f"attn_layer of {model_name(size, kind, distilled)} is one of ours, got {chosen.__name__}")
    pattern = kind if chosen is None else chosen
    settings = {name: arguments.pop(name) for name in SETTINGS & arguments.keys()}
    settings = {name: value for name, value in settings.items() if value is not None}
    check_settings(pattern, settings)
    model = build_model_with_cfg(
        VisionTransformerDistilled if distilled else VisionTransformer,
        model_name(size, kind, distilled),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=arguments.pop("out_indices", 3), feature_cls="getter"),
        block_fn=partial(block_of, pattern, settings, block_fn, norm_weight=norm_weight),
        **dict(patch_size=16, **SIZES[size]) | arguments,
    )
    place_offsets(model)
    return model


@register_model
def deit_tiny_gka_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """The paper's GKA-Ti: 4.38M parameters, 1.98 GFLOPs at 224 pixels. arguments: see `create`."""
    return create("tiny", "gka", pretrained, **arguments)


@register_model
def deit_small_gka_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """The paper's GKA-S: 16.73M parameters, 7.11 GFLOPs at 224 pixels. arguments: see `create`."""
    return create("small", "gka", pretrained, **arguments)


@register_model
def deit_base_gka_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """The paper's GKA-B: 65.31M parameters, 26.76 GFLOPs at 224 pixels. arguments: see `create`."""
    return create("base", "gka", pretrained, **arguments)


@register_model
def deit_tiny_vlt_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """The paper's VLT-Ti: 5.28M parameters, 2.33 GFLOPs at 224 pixels. arguments: see `create`."""
    return create("tiny", "vlt", pretrained, **arguments)


@register_model
def deit_small_vlt_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """VLT in DeiT-S. arguments: see `create`."""
    return create("small", "vlt", pretrained, **arguments)


@register_model
def deit_base_vlt_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """VLT in DeiT-B. arguments: see `create`."""
    return create("base", "vlt", pretrained, **arguments)


# With DeiT's second token and head


@register_model
def deit_tiny_gka_distilled_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """GKA-Ti with a distillation token. arguments: see `create`."""
    return create("tiny", "gka", pretrained, distilled=True, **arguments)


@register_model
def deit_small_gka_distilled_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """GKA-S with a distillation token. arguments: see `create`."""
    return create("small", "gka", pretrained, distilled=True, **arguments)


@register_model
def deit_base_gka_distilled_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """GKA-B with a distillation token. arguments: see `create`."""
    return create("base", "gka", pretrained, distilled=True, **arguments)


@register_model
def deit_tiny_vlt_distilled_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """VLT-Ti with a distillation token. arguments: see `create`."""
    return create("tiny", "vlt", pretrained, distilled=True, **arguments)


@register_model
def deit_small_vlt_distilled_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """VLT in DeiT-S with a distillation token. arguments: see `create`."""
    return create("small", "vlt", pretrained, distilled=True, **arguments)


@register_model
def deit_base_vlt_distilled_patch16_224(pretrained: bool = False, **arguments) -> VisionTransformer:
    """VLT in DeiT-B with a distillation token. arguments: see `create`."""
    return create("base", "vlt", pretrained, distilled=True, **arguments)
