"""Parameters, FLOPs and the training horizon of a model, from its shape (the paper's size and compute table).

    python -m nanochat_gka.accounting --depth 20 --attention gka --target-param-data-ratio 8.25

FLOPs per token follow nanochat: 6 per matrix parameter (forward and backward) plus 12 * C * window per layer for scores and mixing,
full windows, no causal halving. Embedding look-ups and scalars are free.
"""

import json
from dataclasses import dataclass

import torch

from gka.runtime.cli import UserError, run
from nanochat_gka.config import GPTConfig
from nanochat_gka.gpt import GPT


def parameter_counts(model: GPT) -> dict[str, int]:
    """Parameters by nanochat's groups; bandwidths and gates are part of transformer_matrices."""
    counts = {
        "wte": _count(model.transformer.wte),
        "value_embeds": _count(model.value_embeds),
        "lm_head": _count(model.lm_head),
        "transformer_matrices": _count(model.transformer.h),
        "scalars": model.resid_lambdas.numel() + model.x0_lambdas.numel(),
    }
    total = _count(model)
    assert sum(counts.values()) == total, "a parameter belongs to no group"
    return {**counts, "total": total}


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def scaling_parameters(model: GPT) -> int:
    """The N of the data : parameter ratio: transformer matrices and the head."""
    counts = parameter_counts(model)
    return counts["transformer_matrices"] + counts["lm_head"]


def flops_per_token(model: GPT) -> int:
    """Training FLOPs (forward and backward) per token."""
    config = model.config
    attention = sum(12 * config.n_embd * min(config.window(layer), config.sequence_len) for layer in range(config.n_layer))
    return 6 * scaling_parameters(model) + attention


def meta_model(config: GPTConfig) -> GPT:
    """The model without memory for its weights: enough to count."""
    with torch.device("meta"):
        return GPT(config)


@dataclass
class AccountingConfig:
    """Size and compute of a model, without building it in memory."""

    depth: int = 20
    """number of layers; width, heads and horizon follow"""
    attention: str = "softmax"
    """softmax, gka, vlt, or a pattern of A (softmax), G, V tiled over the layers"""
    aspect_ratio: int = 64
    """width per layer"""
    head_dim: int = 128
    """channels per head"""
    max_seq_len: int = 2048
    """context length T"""
    vocab_size: int = 32768
    """tokens in the vocabulary"""
    window_pattern: str = "SSSL"
    """L full context, S half of it, tiled over the layers; the last layer is always L"""
    value_embeds: str = "auto"
    """auto (softmax layers), all or none"""
    head_offsets: str = ""
    """gka heads: letters N, P (predecessor), S (successor), tiled over the heads"""
    target_param_data_ratio: float = 10.5
    """training tokens per scaling parameter"""
    total_batch_size: int = -1
    """tokens per step; -1 = automatic"""
    json: bool = False
    """print JSON instead of a table"""


def account(config: AccountingConfig) -> dict:
    """Everything the command prints, as numbers."""
    from nanochat_gka.schedule import plan  # schedule counts with this module

    def shape(depth: int) -> GPTConfig:
        return GPTConfig.from_depth(
            depth, aspect_ratio=config.aspect_ratio, head_dim=config.head_dim, sequence_len=config.max_seq_len, vocab_size=config.vocab_size,
            window_pattern=config.window_pattern, attention=config.attention, value_embeds=config.value_embeds, head_offsets=config.head_offsets,
        )  # fmt: skip

    model = meta_model(shape(config.depth))
    horizon = plan(model, shape, ratio=config.target_param_data_ratio, total_batch_size=config.total_batch_size)
    counts = parameter_counts(model)
    return {
        "depth": config.depth,
        "attention": config.attention,
        "n_embd": model.config.n_embd,
        "n_head": model.config.n_head,
        "parameters": counts.pop("total"),
        **{f"parameters_{name}": count for name, count in counts.items()},
        "scaling_parameters": scaling_parameters(model),
        "flops_per_token": flops_per_token(model),
        "total_batch_size": horizon.total_batch_size,
        "steps": horizon.steps,
        "train_tokens": horizon.tokens,
        "train_flops": horizon.tokens * flops_per_token(model),
    }


def main(config: AccountingConfig) -> None:
    try:
        numbers = account(config)
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.json:
        print(json.dumps(numbers, indent=1))
        return
    for name, value in numbers.items():
        print(
            f"{name:<32} {f'{value:,}' if isinstance(value, int) else value:>28}"
            + (f"  = {value:.4e}" if isinstance(value, int) and value > 1e9 else "")
        )


if __name__ == "__main__":
    run(main, AccountingConfig)
