"""The attention matrices W of a language model on one text, layer by layer, whatever kinds of attention it has.

Fused attention never builds W, so it is computed again in float64 from the layer's own input, and checked: applied to
the values that the heads read, it must give what the layer mixed and what it put out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanochat_gka.model.attention import Attention
from nanochat_gka.model.gpt import GPT
from trainkit_gka.cli import UserError

TOLERANCE = 1e-3  # float32 outputs differ from float64 ones by 1e-6


@dataclass(frozen=True)
class LayerWeights:
    """What one attention layer did with a text of T tokens. All tensors are on the CPU; H heads of D channels.

    Query i sees the slots j with max(0, i - window) <= j <= i. Slot j of head h holds the key of token
    max(0, j - key_offsets[h]) and the value of token max(0, j - value_offsets[h]); the offsets are 0 except for head
    offsets (`--head-offsets`), where one of a head's two may be more.

    Of gka layers W follows from `features`, `sigma`, `window` and `key_offsets` alone:
    W[h, i, j] = exp(-|features[i, h] - keys[j, h]|^2 / (2 sigma[h]^2)), divided by the sum over the slots that i sees.
    """

    kind: str  # a row of gka/kinds.py
    window: int  # tokens before the query that it sees
    weights: torch.Tensor  # W, (H, T, T), float32: queries down, slots across; 0 where hidden, rows sum to 1
    error: float  # the larger of |again - the layer's own| / |the layer's own| for the mixed heads and for the output
    key_offsets: torch.Tensor  # (H,), int64
    value_offsets: torch.Tensor  # (H,), int64
    sigma: torch.Tensor | None  # (H,), float32; None, as the two below, for kinds without a bandwidth
    initial_sigma: float | None
    features: torch.Tensor | None  # (T, H, D), float32: after rotation and norm, what is compared; the queries
    channel_scales: torch.Tensor | None  # exp(a), (H, D), float32; None without channel bandwidths

    @property
    def keys(self) -> torch.Tensor | None:
        """The features that each slot holds as key, (T, H, D); None for kinds without a bandwidth."""
        if self.features is None:
            return None
        tokens = _tokens_of_slots(self.key_offsets, len(self.features)).T[:, :, None]
        return self.features.gather(0, tokens.expand_as(self.features))

    @property
    def reads(self) -> torch.Tensor:
        """W by the token whose value is mixed, (H, T, T): W itself without head offsets. Rows sum to 1."""
        return by_token_read(self.weights, self.value_offsets)


def by_token_read(weights: torch.Tensor, value_offsets: torch.Tensor) -> torch.Tensor:
    """W by slot to W by the token whose value is mixed, (H, T, T) each, of heads with offsets (H,). Rows keep sums."""
    if not value_offsets.any():
        return weights
    tokens = _tokens_of_slots(value_offsets, weights.shape[-1])[:, None, :]
    return torch.zeros_like(weights).scatter_add(-1, tokens.expand_as(weights), weights)


def _tokens_of_slots(offsets: torch.Tensor, slots: int) -> torch.Tensor:
    """The token that every slot holds, (H, slots)."""
    return (torch.arange(slots) - offsets[:, None]).clamp(min=0)


@torch.inference_mode()
def extract(model: GPT, ids: Sequence[int] | torch.Tensor) -> list[LayerWeights]:
    """The maps of every layer, from one forward pass of a text's token ids, (T,).

    The model must compute in float32, as it does on a CPU. Raises UserError for a text that is empty or too long, and
    if W of a layer does not give the layer's output.
    """
    ids = torch.as_tensor(ids, dtype=torch.long, device=model.device)
    if not 1 <= len(ids) <= model.rotary.length:
        raise UserError(f"the text must have 1 to {model.rotary.length:,} tokens, it has {len(ids):,}")
    inputs: dict[Attention, tuple] = {}
    mixed: dict[Attention, torch.Tensor] = {}
    outputs: dict[Attention, torch.Tensor] = {}
    hooks = []
    for attention in model.attentions:
        hooks.append(attention.register_forward_pre_hook(lambda layer, args: inputs.update({layer: args})))
        hooks.append(attention.register_forward_hook(lambda layer, args, output: outputs.update({layer: output})))
        # The projection that follows is 0 in untrained models: alone, the output would prove nothing.
        projection = attention.c_proj
        hooks.append(
            projection.register_forward_pre_hook(lambda _, args, layer=attention: mixed.update({layer: args[0]}))
        )
    try:
        model.eval()(ids[None])
    finally:
        for hook in hooks:
            hook.remove()
    return [_maps(layer, *inputs[layer][:3], mixed[layer], outputs[layer]) for layer in model.attentions]


def _maps(attention: Attention, x, value_embedding, rotary, mixed: torch.Tensor, output: torch.Tensor) -> LayerWeights:
    """The maps of a layer from its arguments, what its heads mixed, (1, T, C), and its output, (1, T, C)."""
    has_sigma, none = attention.kind.has_bandwidth, [0] * attention.config.n_head
    logarithms = attention.channel_log_scales
    value_embedding = None if value_embedding is None else value_embedding.double()
    x = x.double()
    queries, keys, values = attention.slots(x, value_embedding, rotary)
    weights = attention.weights(queries, keys)
    computed = torch.einsum("bhij,bjhd->bihd", weights, values)
    if attention.head_gate is not None:
        computed = computed * attention.gates(x)[..., None]
    computed = computed.flatten(2)
    error = max(_relative(computed, mixed), _relative(attention.c_proj(computed), output))
    if not error < TOLERANCE:
        raise UserError(
            f"the recomputed W of layer {attention.layer + 1} does not give the model's output (relative error "
            f"{error:.1e}): its attention is not one that these figures know"
        )
    return LayerWeights(
        kind=attention.kind.name,
        window=attention.window,
        weights=weights[0].float().cpu(),
        error=error,
        key_offsets=torch.tensor(attention.pairing.key_delays if attention.pairing else none),
        value_offsets=torch.tensor(attention.pairing.value_delays if attention.pairing else none),
        sigma=attention.log_sigma.exp().float().cpu() if has_sigma else None,
        initial_sigma=attention.config.initial_sigma_squared**0.5 if has_sigma else None,
        features=queries[0].float().cpu() if has_sigma else None,
        channel_scales=None if logarithms is None else attention.heads(logarithms.exp().float()).cpu(),
    )


def _relative(computed: torch.Tensor, expected: torch.Tensor) -> float:
    """How far what was computed again is from the layer's own."""
    return float((computed - expected).norm() / expected.norm().clamp(min=1e-30))
