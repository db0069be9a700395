"""DeiT's three sizes with our attention as timm models: deit_{tiny,small,base}_{gka,vlt}[_distilled]_patch16_224.

They are timm's own ViT with another `attn_layer`; the softmax models are timm's deit_*.

import timm, deit_gka
model = timm.create_model("deit_tiny_gka_patch16_224")                            # the paper's GKA-Ti
model = timm.create_model("deit_small_gka_patch16_224", sigma_squared=1.0)        # another starting bandwidth
model = timm.create_model("deit_tiny_gka_patch16_224", attention="GGGA")          # softmax in every fourth layer
model = timm.create_model("deit_tiny_gka_patch16_224", spatial_offsets="LUD")     # neighbours' values, see offsets.py
model = timm.create_model("vit_small_patch16_224", attn_layer="GGGA")             # any timm ViT; "gka" for all layers
"""

from typing import Any

import timm.models.vision_transformer as vit
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import DiffAttention
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from deit_gka.model.accounting import vit_cost
from deit_gka.model.attention import ATTENTION, AttentionNames, TimmAttention, attention_by_layer, settings_of
from deit_gka.model.offsets import place_offsets
from gka import KINDS

SIZES = {
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),
    "small": dict(embed_dim=384, depth=12, num_heads=6),
    "base": dict(embed_dim=768, depth=12, num_heads=12),
}
OUR_KINDS = [kind for kind in KINDS if issubclass(ATTENTION.get(kind, object), TimmAttention)]
# Names of the settings, and the kinds that have each.
SETTINGS = {
    setting: [kind for kind in ATTENTION if setting in settings_of(kind)]
    for setting in dict.fromkeys(setting for kind in ATTENTION for setting in settings_of(kind))
}
CROP_PCT = 0.875  # resize to 256, crop 224, as DeiT evaluates (timm's own deit entries say 0.9)

vit.ATTN_LAYERS = AttentionNames(vit.ATTN_LAYERS | ATTENTION)


def check_built_of(model: nn.Module, asked: Any) -> None:
    """Raises ValueError if a block lacks the attention that was asked for, an `attn_layer` that is not timm's own.

    Some of timm's blocks take `attn_layer` and do not use it.
    """
    layer = vit.ATTN_LAYERS.get(asked) if isinstance(asked, str) else asked
    if layer is None or layer.__module__.startswith("timm."):
        return
    is_pattern = issubclass(layer, DiffAttention)  # `attention_by_layer`
    expected = tuple(ATTENTION.values()) if is_pattern else layer
    blocks = [block for part in model.modules() for block in getattr(part, "blocks", ())]
    for block in blocks or [model]:
        if not any(isinstance(module, expected) for module in block.modules()):
            name = asked if isinstance(asked, str) else layer.__name__
            raise ValueError(f"{type(block).__name__} has an attention of its own, attn_layer={name!r} changes nothing")


def build_checked(architecture: type[nn.Module], name: str, pretrained: bool, **arguments) -> nn.Module:
    """timm's `build_model_with_cfg`, and `check_built_of`."""
    model = build_model_with_cfg(architecture, name, pretrained, **arguments)
    check_built_of(model, arguments.get("attn_layer"))
    return model


vit.build_model_with_cfg = build_checked  # so that timm.create_model says so too


def model_name(size: str, kind: str, distilled: bool = False) -> str:
    """timm's name of DeiT in a size of SIZES with one kind of attention; softmax is timm's own model."""
    ours = f"_{kind}" if kind in OUR_KINDS else ""
    return f"deit_{size}{ours}{'_distilled' * distilled}_patch16_224"


def takes_attention(name: str) -> bool:
    """Whether the model called `name` is one of ours, which take `attention`; timm's other ViTs take `attn_layer`."""
    return name.split(".")[0] in default_cfgs


def _configuration(distilled: bool) -> dict:
    """What timm keeps of a model beside its architecture."""
    images = dict(input_size=(3, 224, 224), fixed_input_size=True, crop_pct=CROP_PCT, interpolation="bicubic")
    images |= dict(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
    layers = dict(first_conv="patch_embed.proj", classifier=("head", "head_dist") if distilled else "head")
    return dict(url="", license="mit", num_classes=1000, pool_size=None, **images, **layers)


def take_norm_weights(model: VisionTransformer) -> None:
    """Leave every norm before attention without weight and bias. GKA's distances then count all channels alike."""
    for block in model.blocks:
        block.norm1 = nn.LayerNorm(model.embed_dim, eps=block.norm1.eps, elementwise_affine=False)


def _entry_point(size: str, kind: str, distilled: bool):
    """The function that timm calls for `model_name(size, kind, distilled)`."""
    name = model_name(size, kind, distilled)
    architecture = VisionTransformerDistilled if distilled else VisionTransformer

    def create(
        pretrained: bool = False, attention: str = kind, norm_weight: bool = True, **kwargs
    ) -> VisionTransformer:
        settings = {setting: kwargs.pop(setting) for setting in SETTINGS.keys() & kwargs.keys()}
        settings = {setting: value for setting, value in settings.items() if value is not None}
        features = dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter")
        arguments = dict(patch_size=16, **SIZES[size], attn_layer=attention_by_layer(attention, **settings)) | kwargs
        arguments |= dict(pretrained_filter_fn=checkpoint_filter_fn, feature_cfg=features)
        model = build_checked(architecture, name, pretrained, **arguments)
        place_offsets(model)
        if not norm_weight:
            take_norm_weights(model)
        return model

    shape = SIZES[size]
    cost = vit_cost(kind, shape["embed_dim"], shape["depth"], shape["num_heads"], distilled=distilled)
    create.__name__ = create.__qualname__ = name
    create.__doc__ = (
        f"DeiT-{size} with {kind} attention{' and a distillation token' * distilled}: "
        f"{cost.parameters / 1e6:.2f}M parameters, {cost.flops / 1e9:.2f} GFLOPs at 224 pixels.\n\n"
        "attention: another kind, or a pattern by layer such as GGGA. norm_weight: False takes weight and bias from "
        "the norm before attention. Settings of the kinds: "
        f"{', '.join(f'{setting} ({chr(32).join(kinds)})' for setting, kinds in SETTINGS.items())}."
    )
    return create


_MODELS = [(size, kind, distilled) for size in SIZES for kind in OUR_KINDS for distilled in (False, True)]
# timm's decorator reads this name of this module.
default_cfgs = generate_default_cfgs({model_name(*model): _configuration(model[-1]) for model in _MODELS})
globals().update({model_name(*model): register_model(_entry_point(*model)) for model in _MODELS})
