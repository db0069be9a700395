"""Parameters, FLOPs and the training horizon of a model, from its shape (the paper's size and compute table).

FLOPs per token follow nanochat: 6 per matrix parameter (forward and backward) plus 12 * C * window per layer for scores
and mixing, full windows, no causal halving. Embedding look-ups, scalars and head offsets are
free. The horizon follows nanochat too: a model of depth 12 with the same settings is the reference, with 2^19
tokens per step, and the batch grows with tokens^0.383.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import GPT
from trainkit_gka.cli import UserError

REFERENCE_DEPTH = 12
REFERENCE_BATCH = 2**19
BATCH_EXPONENT = 0.383


def parameter_counts(model: GPT) -> dict[str, int]:
    """Parameters by nanochat's groups; bandwidths and gates are part of transformer_matrices."""
    modules = {
        "wte": model.transformer.wte,
        "value_embeds": model.value_embeds,
        "lm_head": model.lm_head,
        "transformer_matrices": model.transformer.h,
        "total": model,
    }
    counts = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
    total = counts.pop("total")
    counts["scalars"] = model.resid_lambdas.numel() + model.x0_lambdas.numel()
    assert sum(counts.values()) == total, "a parameter belongs to no group"
    return {**counts, "total": total}


def scaling_parameters(model: GPT) -> int:
    """The N of the data : parameter ratio: transformer matrices and the head."""
    counts = parameter_counts(model)
    return counts["transformer_matrices"] + counts["lm_head"]


def flops_per_token(model: GPT) -> int:
    """Training FLOPs (forward and backward) per token."""
    return 6 * scaling_parameters(model) + sum(layer.attention_flops for layer in model.attentions)


def meta_model(config: GPTConfig) -> GPT:
    """The model without memory for its weights: enough to count."""
    with torch.device("meta"):
        return GPT(config)


@dataclass(frozen=True)
class Horizon:
    """The length of a training, and the scales that follow from it."""

    total_batch_size: int  # tokens per step
    steps: int
    lr_scale: float  # of every learning rate
    weight_decay_scale: float  # of Muon's weight decay

    @property
    def tokens(self) -> int:
        return self.total_batch_size * self.steps


def plan(
    model: GPT,
    shape: Callable[[int], GPTConfig],
    *,
    ratio: float = 10.5,
    total_batch_size: int = -1,
    num_iterations: int = -1,
    target_flops: float = -1.0,
) -> Horizon:
    """The horizon of `model`; `shape(depth)` gives the configuration at another depth with the same settings.

    The first of num_iterations, target_flops and ratio (training tokens per scaling parameter) that is set (> 0)
    decides the number of steps. Raises UserError if none is set, or if the horizon is shorter than one step.
    """
    parameters, reference = scaling_parameters(model), scaling_parameters(meta_model(shape(REFERENCE_DEPTH)))
    # The ratio cancels below, as upstream's does; it need only be positive.
    tokens, reference_tokens = (int(max(ratio, 0.0) * n) or n for n in (parameters, reference))
    if total_batch_size <= 0:
        total_batch_size = 2 ** round(math.log2(REFERENCE_BATCH * (tokens / reference_tokens) ** BATCH_EXPONENT))
    if num_iterations > 0:
        steps = num_iterations
    elif target_flops > 0:
        steps = round(target_flops / (flops_per_token(model) * total_batch_size))
    elif ratio > 0:
        steps = tokens // total_batch_size
    else:
        raise UserError("set one of num_iterations, target_flops and target_param_data_ratio to a positive value")
    if steps < 1:
        raise UserError(f"the horizon is shorter than one step of {total_batch_size} tokens; lower total_batch_size")
    batch_ratio = total_batch_size / REFERENCE_BATCH
    return Horizon(total_batch_size, steps, math.sqrt(batch_ratio), math.sqrt(batch_ratio) * reference_tokens / tokens)
