"""The attention matrices W of a language model on one text, layer by layer, whatever kinds of attention it has.

Fused attention never builds W, so it is computed again in float64 from the layer's own input, and checked: applied to
the values that the heads read, it must give the layer's mixed heads and its output.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch

from nanochat_gka.model.attention import Attention
from nanochat_gka.model.gpt import GPT
from trainkit_gka.cli import UserError

TOLERANCE = 1e-3  # float32 outputs differ from float64 ones by 1e-6


@dataclass(frozen=True)
class LayerWeights:
    """The attention of one layer on a text of T tokens. All tensors are on the CPU; H heads of D channels.

    Query i sees the slots j with max(0, i - window) <= j <= i. Slot j of head h holds the key of token
    max(0, j - key_offsets[h]) and the value of token max(0, j - value_offsets[h]); the offsets are 0 except for head
    offsets (`--head-offsets`), where one of a head's two may be more.

    Of gka layers W follows from `features`, `sigma`, `window` and `key_offsets` alone: W[h, i, j] is
    exp(-|features[i, h] - key[j, h]|^2 / (2 sigma[h]^2)), divided by the sum over the slots that i sees.
    """

    kind: str  # a row of gka/kinds.py
    window: int  # tokens before the query that it sees
    weights: torch.Tensor  # W, (H, T, T), float32: queries down, slots across; 0 where hidden, rows sum to 1
    error: float  # |recomputed - model| / |model|, the larger of that of the mixed heads and that of the output
    key_offsets: torch.Tensor  # (H,), int64
    value_offsets: torch.Tensor  # (H,), int64
    sigma: torch.Tensor | None  # (H,), float32; None, as the two below, for kinds without a bandwidth
    initial_sigma: float | None
    features: torch.Tensor | None  # (T, H, D), float32, after rotation and norm: the queries
    channel_scales: torch.Tensor | None  # exp(a), (H, D), float32; None without channel bandwidths

    @cached_property
    def reads(self) -> torch.Tensor:
        """W by the token whose value is mixed, (H, T, T): W itself without head offsets. Rows sum to 1."""
        tokens = (torch.arange(self.weights.shape[-1]) - self.value_offsets[:, None]).clamp(min=0)
        index = tokens[:, None, :].expand_as(self.weights)
        return torch.zeros_like(self.weights).scatter_add(-1, index, self.weights)


@torch.inference_mode()
def extract(model: GPT, ids: Sequence[int] | torch.Tensor) -> list[LayerWeights]:
    """The maps of every layer, from one forward pass of a text's token ids, (T,).

    The model must compute in float32, as it does on a CPU. Raises UserError for a text that is empty or too long, and
    if W of a layer does not give the layer's output.
    """
    ids = torch.as_tensor(ids, dtype=torch.long, device=model.device)
    if not 1 <= len(ids) <= model.rotary.length:
        raise UserError(f"the text must have 1 to {model.rotary.length:,} tokens, it has {len(ids):,}")
    inputs, outputs, mixed = {}, {}, {}
    with ExitStack() as hooks:
        for attention in model.attentions:
            hooks.enter_context(attention.register_forward_pre_hook(lambda layer, args: inputs.update({layer: args})))
            hooks.enter_context(attention.register_forward_hook(lambda layer, _, out: outputs.update({layer: out})))
            # Output projections are 0 in untrained models: alone, the layer's output would prove nothing.
            hooks.enter_context(attention.c_proj.register_forward_pre_hook(lambda c, args: mixed.update({c: args[0]})))
        model.eval()(ids[None])
    return [_maps(layer, *inputs[layer][:3], mixed[layer.c_proj], outputs[layer]) for layer in model.attentions]


def _maps(attention: Attention, x, value_embedding, rotary, mixed: torch.Tensor, output: torch.Tensor) -> LayerWeights:
    """The maps of a layer from its arguments, its mixed heads, (1, T, C), and its output, (1, T, C)."""
    has_sigma = attention.kind.has_bandwidth
    none = [0] * attention.config.n_head
    pairing = attention.pairing
    x, logarithms = x.double(), attention.channel_log_scales
    queries, stored = attention.project(x, value_embedding, rotary, slice(0, x.shape[1]))
    keys, values = attention.keys_and_values(rotary, x.shape[1], stored)
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
        key_offsets=torch.tensor(pairing.key_delays if pairing else none),
        value_offsets=torch.tensor(pairing.value_delays if pairing else none),
        sigma=attention.log_sigma.exp().float().cpu() if has_sigma else None,
        initial_sigma=attention.config.initial_sigma_squared**0.5 if has_sigma else None,
        features=queries[0].float().cpu() if has_sigma else None,
        channel_scales=None if logarithms is None else attention.heads(logarithms.exp().float()).cpu(),
    )


def _relative(computed: torch.Tensor, expected: torch.Tensor) -> float:
    """|computed - expected| / |expected|."""
    return float((computed - expected).norm() / expected.norm().clamp(min=1e-30))
