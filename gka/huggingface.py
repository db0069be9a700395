"""Models of Hugging Face's transformers with Gaussian kernel attention, such as BERT, ViT and Llama.

    from gka.huggingface import use_gka
    model = use_gka(BertForSequenceClassification(config))      # then train it: Trainer, padded batches, saving

The heads of what a layer is given are queries, keys and values; where the model rotates them, values stay as they were.
transformers is imported when the function is called.
"""

from typing import Any

import torch
from torch import nn

from gka.api import gaussian_attention
from gka.bandwidth import at_least_float32, initial_log_sigma

NAME = "gka"  # of the attention, in a model's configuration
UNLIKE = ("opt", "whisper")  # model types that scale queries before they are compared
CROSS = ("encoder_attn",)  # names of cross attention, beside those with "cross"
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))  # names of a layer's three


def use_gka(model: nn.Module, sigma_squared: float | None = None) -> nn.Module:
    """The model, a `PreTrainedModel`, with the three projections of every attention layer gone and a `log_sigma` there.

    What they had learned is lost, so that a pretrained model must be trained again; output projections and everything
    else stay. To load what `save_pretrained` wrote, build the model from its configuration, call this, and load the
    state: `model.load_state_dict(safetensors.torch.load_file(...))`. Sequences packed into one row are not kept apart:
    pad them. Static caches are refused.

    sigma_squared: starting sigma^2 of every head; None means sqrt(head_dim). Raises ValueError for a model without such
    layers, whose keys have fewer heads than the queries, or which norms or scales queries apart from keys.
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
        done = any(name.endswith("log_sigma") for name, _ in model.named_parameters())
        reason = "it has GKA already" if done else "it has none with q_proj, k_proj, v_proj or query, key, value"
        raise ValueError(f"no attention layer of the model can be changed: {reason}")
    changes = []  # all of them are checked before the model is changed
    for path, layer, names in layers:
        widths = {getattr(layer, name).out_features for name in names} | {getattr(layer, names[0]).in_features}
        if len(widths) > 1:
            raise ValueError(f"{path}: queries, keys and values must be as wide as the model, got {sorted(widths)}")
        config: Any = layer.config
        if hasattr(layer, "k_norm") or config.model_type in UNLIKE:
            raise ValueError(f"{path}: queries are not what the keys are there, which GKA needs")
        num_heads = getattr(layer, "num_heads", config.num_attention_heads)
        weight = getattr(layer, names[0]).weight
        start = (widths.pop() // num_heads) ** 0.5 if sigma_squared is None else sigma_squared
        log_sigma = nn.Parameter(initial_log_sigma(num_heads, start).to(weight.device))
        looks_elsewhere = any(part in CROSS or "cross" in part for part in path.lower().split(".")[-2:])
        changes.append((layer, names, log_sigma, looks_elsewhere))
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(NAME)
            part.config._attn_implementation = NAME  # a part of a larger model may keep its own otherwise
    for layer, names, log_sigma, looks_elsewhere in changes:
        for name in names:
            setattr(layer, name, nn.Identity())
        layer.log_sigma, layer.looks_elsewhere = log_sigma, looks_elsewhere
        layer.config._attn_implementation = NAME
    return model


def _padding(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **arguments: Any
) -> torch.Tensor | None:
    """transformers' mask interface: padding as (B, Tk), True for tokens, or None."""
    from transformers.masking_utils import bidirectional_mask_function, flash_attention_mask

    is_causal = arguments.get("mask_function") is not bidirectional_mask_function
    if is_causal and kv_offset + kv_length != int(q_offset) + q_length:
        raise ValueError("GKA serves caches as long as what they hold: use the dynamic cache, not a static one")
    mask = flash_attention_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **arguments)
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

    Without a cache the keys are the queries, whatever tensors they are; later they are longer.
    """
    is_self = query.shape == key.shape and not module.looks_elsewhere
    x, keys, values = (t.transpose(1, 2) for t in (query, key, value))
    compared = query if is_self else key
    same = not torch.compiler.is_compiling() and value.data_ptr() == compared.data_ptr()
    same = same and value.stride() == compared.stride()
    causal = bool(module.is_causal if is_causal is None else is_causal)
    masks: dict[str, Any] = dict(causal=causal, window=sliding_window - 1 if sliding_window else None)
    if attention_mask is not None and attention_mask.dim() == 2:
        masks["key_padding_mask"] = ~attention_mask.bool()
    elif attention_mask is not None:  # it says what is causal too
        masks |= dict(attn_mask=attention_mask, causal=False)
    log_sigma = at_least_float32(module.log_sigma)
    tensors: dict[str, Any] = dict(keys=None if is_self else keys, values=None if same else values)
    return gaussian_attention(x, log_sigma, **tensors, **masks), None
