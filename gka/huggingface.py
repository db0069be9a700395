"""Models of Hugging Face's transformers with Gaussian kernel attention, such as BERT, ViT and Llama.

    from gka.huggingface import use_gka
    model = use_gka(BertForSequenceClassification(config), preset="text")      # then train it: Trainer, saving, loading

The heads of what a layer is given are queries, keys and values; where the model rotates them, values stay as they were.
transformers is imported when the functions are called.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gka.api import gaussian_attention
from gka.bandwidth import at_least_float32, initial_log_sigma
from gka.offsets import HeadOffsets, head_offsets, neighbours, spatial_pattern
from gka.padding_and_masks import in_order
from gka.parts import head_gates, scaled, settings_of

NAME = "gka"  # of the attention, in a model's configuration
OFFSETS = "gka_offsets"  # set in the configuration of a model whose layers have head offsets
UNLIKE = ("opt", "whisper")  # model types that scale queries before they are compared
CROSS = ("encoder_attn",)  # names of cross attention, beside those with "cross"
OPTIONS = ("sigma_squared", "head_norm", "channel_bandwidths", "head_offsets", "head_gates", "spatial_offsets")
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))  # names of a layer's three


def use_gka(
    model: nn.Module, sigma_squared: float | None = None, preset: str | None = None, **options: Any
) -> nn.Module:
    """The model, a `PreTrainedModel`, with the three projections of every attention layer gone and a `log_sigma` there.

    What they had learned is lost, so that a pretrained model must be trained again; output projections and everything
    else stay. Heads are the queries', of the model's width; keys have as many, also where the model had fewer. To load
    what `save_pretrained` wrote, build the model from its configuration, call this with the same arguments, and load
    the state: `model.load_state_dict(safetensors.torch.load_file(...))`. Sequences packed into one row are not kept
    apart: pad them. Static caches are refused.

    Args:
      sigma_squared: starting sigma^2 of every head; None means sqrt(head_dim), or head_dim / 4 with preset="text".
      preset: as in `GaussianKernelAttention`: None is the paper's form, "text" for BERT and Llama, "image" for ViT.
        Positions are the model's, as it adds or rotates them. "image" takes the grid of patches from the configuration,
        with one token before them, or none. Cross attention stays in the paper's form.
      options: head_norm, head_offsets, channel_bandwidths, head_gates and spatial_offsets win over the preset.

    Raises ValueError for a model without such layers, whose heads together are not as wide as the model, or which norms
    or scales queries apart from keys, or whose settings do not go with the preset; TypeError for another option.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"use_gka takes a model of transformers, got {type(model).__name__}")
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _padding)
    layers = [
        (path, layer, names)
        for path, layer in model.named_modules()
        for names in PROJECTIONS
        if all(isinstance(getattr(layer, name, None), nn.Linear) for name in names)
    ]
    if not layers:
        wanted = " or ".join(", ".join(names) for names in PROJECTIONS)
        raise ValueError(f"no attention layer of the model has {wanted}: it is another kind, or has GKA already")
    changes = []  # all of them are checked before the model is changed
    for path, layer, names in layers:
        widths = {getattr(layer, name).in_features for name in names} | {getattr(layer, names[0]).out_features}
        if len(widths) > 1:
            raise ValueError(f"{path}: the heads together must be as wide as the model, got {sorted(widths)}")
        config: Any = layer.config
        if hasattr(layer, "k_norm") or config.model_type in UNLIKE:
            raise ValueError(f"{path}: queries are not what the keys are there, which GKA needs")
        num_heads = getattr(layer, "num_heads", config.num_attention_heads)
        looks_elsewhere = any(part in CROSS or "cross" in part for part in path.lower().split(".")[-2:])
        chosen = dict(preset=None) if looks_elsewhere else dict(preset=preset, **options)
        parts = _parts(path, config, getattr(layer, names[0]).weight, num_heads, sigma_squared=sigma_squared, **chosen)
        changes.append((layer, names, dict(looks_elsewhere=looks_elsewhere, **parts)))
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(NAME)
            part.config._attn_implementation = NAME  # a part of a larger model may keep its own otherwise
            attributes: Any = part
            attributes._weight_conversions = []  # else `save_pretrained` writes the names of an older version
    for layer, names, parts in changes:
        for name in names:
            setattr(layer, name, nn.Identity())
        for name, part in parts.items():
            setattr(layer, name, part)
        if layer.head_norm or layer.log_scale is not None:
            for name in names[:2]:
                setattr(layer, name, _Features(layer))
        layer.config._attn_implementation = NAME
        if layer.pairing is not None:
            setattr(layer.config, OFFSETS, True)
    return model


def _parts(
    path: str, config: Any, weight: torch.Tensor, num_heads: int, preset: str | None, **given: Any
) -> dict[str, Any]:
    """What becomes of a layer whose projections were like `weight`, (C, C): its parameters and settings by name."""
    if unknown := given.keys() - OPTIONS:
        raise TypeError(f"use_gka takes {', '.join(OPTIONS)}, got {', '.join(sorted(unknown))}")
    width, device = len(weight), weight.device
    settings = settings_of(preset, width // num_heads, given)
    pairing, pattern = head_offsets(settings["head_offsets"], num_heads), settings["spatial_offsets"]
    if pairing is not None and pattern:
        raise ValueError(
            "head_offsets are for tokens in a row, spatial_offsets for patches on a grid: take one of them"
        )
    gate = None
    if settings["head_gates"]:
        gate = nn.Linear(width, num_heads, bias=False, device=device, dtype=weight.dtype)
        nn.init.zeros_(gate.weight)
    return dict(
        log_sigma=nn.Parameter(initial_log_sigma(num_heads, settings["sigma_squared"]).to(device)),
        log_scale=nn.Parameter(torch.zeros(width, device=device)) if settings["channel_bandwidths"] else None,
        head_gate=gate,
        head_norm=settings["head_norm"],
        pairing=pairing,
        spatial=(spatial_pattern(pattern, num_heads), _grid(path, config)) if pattern else None,
    )


def _grid(path: str, config: Any) -> tuple[int, int]:
    """(rows, columns) of a vision model's patches. Raises ValueError for another model."""
    sizes = [getattr(config, name, None) for name in ("image_size", "patch_size")]
    images, patches = (size if isinstance(size, (tuple, list)) else (size, size) for size in sizes)
    if None in (*images, *patches):
        raise ValueError(f"{path}: spatial offsets need a configuration with image_size and patch_size")
    return images[0] // patches[0], images[1] // patches[1]


class _Features(nn.Module):
    """In the place of the projections to queries and keys: what is compared, before the model rotates it.

    Rotation keeps norms, so that what is normalised here has a constant norm there too. The parameters are the
    attention layer's, which is in a tuple, so that it is not a module of this one.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.layer = (layer,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the layer's input, (B, T, C), in the same shape."""
        [layer] = self.layer
        heads = _normalised(layer, x.unflatten(-1, (len(layer.log_sigma), -1)))
        if layer.log_scale is not None:
            heads = _normalised(layer, scaled(heads, layer.log_scale.to(x.device).view(heads.shape[2:])))
        return heads.flatten(-2)


def _normalised(layer: Any, heads: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(heads, heads.shape[-1:]) if layer.head_norm else heads


def _padding(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **arguments: Any
) -> torch.Tensor | None:
    """transformers' mask interface: padding as (B, Tk), True for tokens, or None."""
    from transformers.masking_utils import bidirectional_mask_function, flash_attention_mask

    is_causal = arguments.get("mask_function") is not bidirectional_mask_function
    if is_causal and kv_offset + kv_length != int(q_offset) + q_length:
        raise ValueError("GKA serves caches as long as what they hold: use the dynamic cache, not a static one")
    mask = flash_attention_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **arguments)
    if kv_offset and getattr(arguments.get("config"), OFFSETS, False):
        raise ValueError(
            "head offsets read a token that a cache of windows dropped: give past_key_values=DynamicCache()"
        )
    if mask is not None and mask.shape[1] < kv_length:  # transformers counts places by it, so these are wrong too
        places = f"attention_mask has {mask.shape[1]} places for {kv_length} keys"
        raise ValueError(
            f"{places}, as behind the virtual tokens of PEFT's prompt tuning: generate with use_cache=False"
        )
    return mask


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (B, H, T, D) each; returns (B, Tq, H, D), and no weights.

    Without a cache the keys are the queries, whatever tensors they are; later they are longer. The values are heads of
    the layer's input, as a cache keeps them.
    """
    is_self = query.shape == key.shape and not module.looks_elsewhere
    x, keys, values = (t.transpose(1, 2) for t in (query, key, value))
    entered = values[:, -x.shape[1] :]
    causal = bool(module.is_causal if is_causal is None else is_causal)
    masks: dict[str, Any] = dict(causal=causal, window=sliding_window - 1 if sliding_window else None)
    if attention_mask is not None and attention_mask.dim() == 2:
        masks["key_padding_mask"] = ~attention_mask.bool()
    elif attention_mask is not None:  # it says what is causal too
        masks |= dict(attn_mask=attention_mask, causal=False)
    keys = x if is_self else keys
    same = not torch.compiler.is_compiling() and value.data_ptr() == keys.data_ptr()
    same = same and values.stride() == keys.stride()
    values = keys if same else _normalised(module, values)
    if module.pairing is not None:
        keys, values = _paired(module.pairing, keys, values, masks)
    if module.spatial is not None:
        pattern, (rows, columns) = module.spatial
        prefix = values.shape[1] - rows * columns
        if prefix not in (0, 1):
            expected = f"{rows} x {columns} patches with one token before them, or none"
            raise ValueError(f"spatial offsets need {expected}, got {values.shape[1]} tokens")
        values = neighbours(values, pattern, (rows, columns), prefix)
    tensors: dict[str, Any] = dict(keys=None if keys is x else keys, values=None if values is keys else values)
    log_sigma = at_least_float32(module.log_sigma)
    y = gaussian_attention(x, log_sigma, **tensors, **masks, constant_norm=module.head_norm)
    if module.head_gate is not None:
        y = y * head_gates(module.head_gate(entered.flatten(2)))[..., None]
    return y, None


def _paired(
    pairing: HeadOffsets, keys: torch.Tensor, values: torch.Tensor, masks: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the slots of head offsets; the token before a token is the one before its padding, too."""
    if "attn_mask" in masks:
        raise ValueError("head offsets need attention_mask as (B, T), 1 for tokens, which says where sequences begin")
    if (hidden := masks.get("key_padding_mask")) is None:
        return pairing(keys, values)
    places = torch.arange(keys.shape[1], device=keys.device).expand(hidden.shape)
    last = places.masked_fill(hidden, -1).cummax(1).values  # the last token up to each place
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    before = torch.where(before < 0, places, before)

    def later(t: torch.Tensor, delays: tuple[int, ...]) -> torch.Tensor:
        is_late = torch.tensor(delays, device=t.device)[:, None] > 0
        return torch.where(is_late, in_order(t, before), t) if any(delays) else t

    return later(keys, pairing.key_delays), later(values, pairing.value_delays)
