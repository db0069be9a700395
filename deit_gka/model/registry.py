"""DeiT's three sizes with our attention as timm models: deit_{tiny,small,base}_{gka,vlt}[_distilled]_patch16_224.

They are timm's own ViT with other attention in its blocks; the softmax models are timm's deit_*. Any ViT of timm's
takes our kinds by attn_layer: timm's table of attention layers gains rows, and nothing else of timm changes. The
package's README has examples (Use it in timm).
"""

import itertools
from functools import partial, update_wrapper
from typing import Any, ClassVar

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import DiffAttention
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ATTN_LAYERS, Block, VisionTransformer, checkpoint_filter_fn
from torch import nn

from deit_gka.model.attention import ATTENTION
from deit_gka.model.offsets import place_offsets
from gka import KINDS, layer_kinds

SIZES = {
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),
    "small": dict(embed_dim=384, depth=12, num_heads=6),
    "base": dict(embed_dim=768, depth=12, num_heads=12),
}
OUR_KINDS = [kind for kind in ATTENTION if kind != "softmax"]
SETTINGS = {name for kind in ATTENTION.values() for name in kind.SETTINGS}
CROP_PCT = 0.875  # resize to 256, crop 224, as DeiT evaluates (timm's own deit entries say 0.9)

# Any ViT of timm's, by attn_layer


class AttentionByLayer(DiffAttention):
    """Builds a kind of attention for every layer; no object of this class is made. See `attention_class`.

    It is a DiffAttention because timm tells these alone the number of their layer, `depth`.
    """

    pattern: str
    settings: ClassVar[dict[str, Any]]

    def __new__(cls, dim: int, *, depth: int, **arguments) -> nn.Module:
        kind = ATTENTION[layer_kinds(cls.pattern, depth + 1)[depth]]
        settings = {name: value for name, value in cls.settings.items() if name in kind.SETTINGS}
        return kind(dim, **arguments, **settings)


def attention_class(pattern: str, **settings) -> type[AttentionByLayer]:
    """The class for timm's attn_layer of a ViT with a kind of attention for every layer.

    pattern: as in `gka.layer_kinds`. settings: arguments of the attention classes, which name them in SETTINGS; a layer
    takes those of its kind. Raises ValueError for another pattern, and for settings of no kind in it.
    """
    kinds = sorted(set(layer_kinds(pattern, len(pattern))))
    for name in settings:
        if not any(name in ATTENTION[kind].SETTINGS for kind in kinds):
            raise ValueError(f"{name} is not a setting of {' or '.join(kinds)} attention")
    return type("AttentionByLayer", (AttentionByLayer,), {"pattern": pattern, "settings": settings})


TIMMS = frozenset(ATTN_LAYERS)  # timm's names of attention layers


def attention_by_layer(pattern: str) -> str:
    """Make a pattern by layer such as GGGA a name that attn_layer of timm's ViTs takes in this process, and return it.

    Kinds and patterns of up to four capital letters are such names already, so that exported models load by timm alone.
    Raises ValueError for what is no pattern of `gka.layer_kinds`.
    """
    ATTN_LAYERS.setdefault(pattern, attention_class(pattern))
    return pattern


def is_pattern(attn_layer: Any) -> bool:
    """Whether timm's argument is a name or pattern of ours, and not one of timm's names."""
    return isinstance(attn_layer, str) and attn_layer not in TIMMS


ATTN_LAYERS.update(ATTENTION)
for length in range(1, 5):
    for letters in itertools.product([KINDS[kind].letter for kind in ATTENTION], repeat=length):
        attention_by_layer("".join(letters))

# DeiT with our attention


def model_name(size: str, kind: str, distilled: bool = False) -> str:
    """timm's name of DeiT in a size of SIZES with one kind of attention; softmax is timm's own model."""
    ours = f"_{kind}" if kind in OUR_KINDS else ""
    return f"deit_{size}{ours}{'_distilled' * distilled}_patch16_224"


def create(
    size: str,
    kind: str,
    distilled: bool,
    pretrained: bool = False,
    attention: str = "",
    attn_layer: str = "",
    norm_weight: bool = True,
    **arguments,
) -> VisionTransformer:
    """DeiT in a size of SIZES.

    distilled: with DeiT's second token and head. attention: another kind than the name's, or a pattern by layer such as
    GGGA; timm's attn_layer says the same. norm_weight: False takes weight and bias from the norm before attention;
    GKA's distances then count all channels alike. arguments: timm's, and settings of the kinds of attention.
    Raises ValueError as `attention_class`.
    """
    settings = {name: arguments.pop(name) for name in SETTINGS & arguments.keys()}
    model = build_model_with_cfg(
        VisionTransformerDistilled if distilled else VisionTransformer,
        model_name(size, kind, distilled),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=arguments.pop("out_indices", 3), feature_cls="getter"),
        attn_layer=attention_class(attn_layer or attention or kind, **settings),
        **dict(patch_size=16, block_fn=Block if norm_weight else without_norm_weight, **SIZES[size]) | arguments,
    )
    place_offsets(model)
    return model


def without_norm_weight(**arguments) -> Block:
    """A block of timm's whose norm before attention has no weight and bias."""
    block = Block(**arguments)
    block.norm1 = nn.LayerNorm(arguments["dim"], eps=block.norm1.eps, elementwise_affine=False)
    return block


def configuration(distilled: bool) -> dict[str, Any]:
    """timm's configuration of a model: images, head, licence."""
    images = dict(input_size=(3, 224, 224), fixed_input_size=True, crop_pct=CROP_PCT, interpolation="bicubic")
    images |= dict(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
    layers = dict(first_conv="patch_embed.proj", classifier=("head", "head_dist") if distilled else "head")
    return dict(url="", license="mit", num_classes=1000, pool_size=None, **images, **layers)


MODELS = [(size, kind, distilled) for distilled in (False, True) for kind in OUR_KINDS for size in SIZES]
# timm's decorator reads this name of this module.
default_cfgs = generate_default_cfgs({model_name(*model): configuration(model[2]) for model in MODELS})
for model in MODELS:
    entrypoint = update_wrapper(partial(create, *model), create)
    entrypoint.__name__ = model_name(*model)  # under which timm registers it
    register_model(entrypoint)
