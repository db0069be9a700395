"""From a model's size to its run: batch size, horizon, scales of learning rate and weight decay, and the curves over steps.

nanochat's rules: a d12 model of the same settings is the reference with 2^19 tokens per step; batch size grows with tokens^0.383.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from nanochat_gka.accounting import flops_per_token, meta_model, scaling_parameters
from nanochat_gka.config import GPTConfig
from nanochat_gka.gpt import GPT

REFERENCE_DEPTH = 12
REFERENCE_BATCH = 2**19
BATCH_EXPONENT = 0.383
MOMENTUM = (0.85, 0.95)
MOMENTUM_STEPS = 300


@dataclass(frozen=True)
class Horizon:
    """total_batch_size: tokens per step. lr_scale multiplies every learning rate, weight_decay_scale Muon's weight decay."""

    total_batch_size: int
    steps: int
    lr_scale: float
    weight_decay_scale: float

    @property
    def tokens(self) -> int:
        return self.total_batch_size * self.steps


def plan(model: GPT, shape: Callable[[int], GPTConfig], *, ratio: float = 10.5, total_batch_size: int = -1, num_iterations: int = -1,
         target_flops: float = -1.0) -> Horizon:  # fmt: skip
    """The horizon of `model`; `shape(depth)` gives the configuration at another depth with the same settings.

    The first of num_iterations, target_flops and ratio that is set (> 0) decides the number of steps. Raises ValueError if none is,
    or if the horizon is shorter than one step.
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
        raise ValueError("set one of num_iterations, target_flops and target_param_data_ratio to a positive value")
    if steps < 1:
        raise ValueError(f"the horizon is shorter than one step of {total_batch_size} tokens; lower total_batch_size or raise the horizon")
    batch_ratio = total_batch_size / REFERENCE_BATCH
    return Horizon(total_batch_size, steps, math.sqrt(batch_ratio), math.sqrt(batch_ratio) * reference_tokens / tokens)


def lr_multiplier(step: int, steps: int, warmup_ratio: float = 0.0, warmdown_ratio: float = 0.5, final_lr_frac: float = 0.0) -> float:
    """Linear warm-up, constant, linear warm-down to final_lr_frac; `step` counts from 0."""
    warmup, warmdown = round(warmup_ratio * steps), round(warmdown_ratio * steps)
    if step < warmup:
        return (step + 1) / warmup
    if step <= steps - warmdown:
        return 1.0
    progress = (steps - step) / warmdown
    return progress + (1 - progress) * final_lr_frac


def muon_momentum(step: int) -> float:
    """0.85 to 0.95 over the first 300 steps."""
    low, high = MOMENTUM
    return low + (high - low) * min(step / MOMENTUM_STEPS, 1.0)


def weight_decay_multiplier(step: int, steps: int) -> float:
    """Muon's weight decay falls linearly to zero."""
    return 1 - step / steps
