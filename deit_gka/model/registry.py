"""deit_{tiny,small,base}_{gka,vlt}_patch16_224, and ..._distilled_patch16_224 with DeiT's distillation token: timm's own ViT with our attention in
its `attn_layer`. The softmax twins are timm's deit_*.

import timm, deit_gka
model = timm.create_model("deit_tiny_gka_patch16_224")                            # the paper's GKA-Ti
model = timm.create_model("deit_small_gka_patch16_224", sigma_squared=1.0)        # another starting bandwidth
model = timm.create_model("vit_small_patch16_224", attn_layer="gka")              # any timm ViT
"""

import timm.models.vision_transformer as vit
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from deit_gka.model.attention import ATTENTION, with_settings

SIZES = {
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),
    "small": dict(embed_dim=384, depth=12, num_heads=6),
    "base": dict(embed_dim=768, depth=12, num_heads=12),
}
CROP_PCT = 0.875  # resize to 256, crop 224, as DeiT evaluates (timm's own deit entries say 0.9)

vit.ATTN_LAYERS.update(ATTENTION)


def model_name(size: str, kind: str, distilled: bool = False) -> str:
    """timm's name of DeiT in a size of SIZES with one kind of attention; softmax is timm's own model."""
    ours = f"_{kind}" if kind in ATTENTION else ""
    return f"deit_{size}{ours}{'_distilled' * distilled}_patch16_224"


# timm's decorator reads this name of this module.
default_cfgs = generate_default_cfgs({
    f"deit_{size}_{kind}{distilled}_patch16_224": dict(
        url="", num_classes=1000, input_size=(3, 224, 224), pool_size=None, crop_pct=CROP_PCT, interpolation="bicubic", fixed_input_size=True,
        mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD, first_conv="patch_embed.proj", classifier=("head", "head_dist") if distilled else "head",
        license="mit",
    )
    for size in SIZES for kind in ATTENTION for distilled in ("", "_distilled")
})  # fmt: skip


def _build(
    size: str, kind: str, pretrained: bool, settings: dict, distilled: bool = False, **kwargs
) -> VisionTransformer:
    settings = {name: value for name, value in settings.items() if value is not None}
    # The plain kind goes in by name, so that timm can write the model's configuration down.
    attn_layer = with_settings(kind, **settings) if settings else kind
    arguments = dict(patch_size=16, **SIZES[size], attn_layer=attn_layer)
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        VisionTransformerDistilled if distilled else VisionTransformer, f"deit_{size}_{kind}{'_distilled' * distilled}_patch16_224", pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"), **dict(arguments, **kwargs),
    )  # fmt: skip


def _gka(size: str, pretrained: bool, sigma_squared: float | None, impl: str | None, **kwargs) -> VisionTransformer:
    """sigma_squared: start of every head's sigma^2, None = sqrt(head_dim) = 8. impl: as in `gka.gaussian_attention`."""
    return _build(size, "gka", pretrained, dict(sigma_squared_start=sigma_squared, operator=impl), **kwargs)


def _vlt(size: str, pretrained: bool, value_bias: bool, **kwargs) -> VisionTransformer:
    """value_bias: keep the bias W_V had, as the paper's parameter count does."""
    return _build(size, "vlt", pretrained, dict(keep_value_bias=None if value_bias else False), **kwargs)


@register_model
def deit_tiny_gka_patch16_224(pretrained=False, sigma_squared=None, impl=None, **kwargs) -> VisionTransformer:
    """GKA-Ti: 4.38M parameters, 1.98 GFLOPs (paper, parameter and compute efficiency table)."""
    return _gka("tiny", pretrained, sigma_squared, impl, **kwargs)


@register_model
def deit_small_gka_patch16_224(pretrained=False, sigma_squared=None, impl=None, **kwargs) -> VisionTransformer:
    """GKA-S: 16.73M parameters, 7.11 GFLOPs."""
    return _gka("small", pretrained, sigma_squared, impl, **kwargs)


@register_model
def deit_base_gka_patch16_224(pretrained=False, sigma_squared=None, impl=None, **kwargs) -> VisionTransformer:
    """GKA-B: 65.31M parameters, 26.76 GFLOPs."""
    return _gka("base", pretrained, sigma_squared, impl, **kwargs)


@register_model
def deit_tiny_vlt_patch16_224(pretrained=False, value_bias=True, **kwargs) -> VisionTransformer:
    """VLT-Ti: 5.28M parameters, 2.33 GFLOPs (paper, ablation of projection matrices)."""
    return _vlt("tiny", pretrained, value_bias, **kwargs)


@register_model
def deit_small_vlt_patch16_224(pretrained=False, value_bias=True, **kwargs) -> VisionTransformer:
    """VLT-S: 20.28M parameters, 8.50 GFLOPs."""
    return _vlt("small", pretrained, value_bias, **kwargs)


@register_model
def deit_base_vlt_patch16_224(pretrained=False, value_bias=True, **kwargs) -> VisionTransformer:
    """VLT-B: 79.49M parameters, 32.34 GFLOPs."""
    return _vlt("base", pretrained, value_bias, **kwargs)


@register_model
def deit_tiny_gka_distilled_patch16_224(pretrained=False, sigma_squared=None, impl=None, **kwargs) -> VisionTransformer:
    """GKA-Ti with a distillation token and its own head."""
    return _gka("tiny", pretrained, sigma_squared, impl, distilled=True, **kwargs)


@register_model
def deit_small_gka_distilled_patch16_224(
    pretrained=False, sigma_squared=None, impl=None, **kwargs
) -> VisionTransformer:
    """GKA-S with a distillation token and its own head."""
    return _gka("small", pretrained, sigma_squared, impl, distilled=True, **kwargs)


@register_model
def deit_base_gka_distilled_patch16_224(pretrained=False, sigma_squared=None, impl=None, **kwargs) -> VisionTransformer:
    """GKA-B with a distillation token and its own head."""
    return _gka("base", pretrained, sigma_squared, impl, distilled=True, **kwargs)


@register_model
def deit_tiny_vlt_distilled_patch16_224(pretrained=False, value_bias=True, **kwargs) -> VisionTransformer:
    """VLT-Ti with a distillation token and its own head."""
    return _vlt("tiny", pretrained, value_bias, distilled=True, **kwargs)


@register_model
def deit_small_vlt_distilled_patch16_224(pretrained=False, value_bias=True, **kwargs) -> VisionTransformer:
    """VLT-S with a distillation token and its own head."""
    return _vlt("small", pretrained, value_bias, distilled=True, **kwargs)


@register_model
def deit_base_vlt_distilled_patch16_224(pretrained=False, value_bias=True, **kwargs) -> VisionTransformer:
    """VLT-B with a distillation token and its own head."""
    return _vlt("base", pretrained, value_bias, distilled=True, **kwargs)
