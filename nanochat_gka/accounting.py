"""Print parameters, FLOPs, training horizon and memory of a model (the paper's size and compute table).

python -m nanochat_gka.accounting --depth 20 --attention gka --target-param-data-ratio 8.25
"""

import json
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from nanochat_gka.model.accounting import flops_per_token, meta_model, parameter_counts, plan, scaling_parameters
from nanochat_gka.model.config import ModelFlags, has_gka
from nanochat_gka.training.memory import fixed_bytes
from trainkit_gka.cli import Bounds, Count, CountOrAutomatic, run


@dataclass(frozen=True)
class AccountingConfig(ModelFlags):
    """Print the size and compute of a model, without building it in memory.

    least_bytes_on_8_gpus is the need of training on each of them, by arithmetic: weights, gradients, optimiser state,
    and room for the optimiser's step. Activations have that room before; many rows at once need more.
    """

    max_seq_len: Count = 2048
    """Context length, in tokens."""
    vocab_size: Count = 32768
    """Tokens in the vocabulary."""
    target_param_data_ratio: Annotated[float, Bounds(0, open_least=True)] = 10.5
    """Training tokens per scaling parameter."""
    total_batch_size: CountOrAutomatic = -1
    """Tokens per step; -1 = automatic."""
    json: bool = False
    """Print JSON instead of a table."""


def account(config: AccountingConfig) -> dict:
    """Everything the command prints, as numbers."""

    shape = partial(config.shape, sequence_len=config.max_seq_len, vocab_size=config.vocab_size)
    model = meta_model(shape(config.depth))
    horizon = plan(model, shape, ratio=config.target_param_data_ratio, total_batch_size=config.total_batch_size)
    counts = parameter_counts(model)
    return {
        "depth": config.depth,
        "attention": config.attention,
        **({"gka_values": config.gka_values} if has_gka(config.attention, config.depth) else {}),
        **({"channel_bandwidths": True} if config.channel_bandwidths else {}),
        **({"head_gates": True} if config.head_gates else {}),
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
        "least_bytes_on_1_gpu": sum(fixed_bytes(model, "cuda")),
        "least_bytes_on_8_gpus": sum(fixed_bytes(model, "cuda", ranks=8)),
    }


def main(config: AccountingConfig) -> None:
    numbers = account(config)
    if config.json:
        print(json.dumps(numbers, indent=1))
        return
    for name, value in numbers.items():
        number = f"{value:,}" if isinstance(value, int) else value
        print(f"{name:<32} {number:>28}" + (f"  = {value:.4e}" if isinstance(value, int) and value > 1e9 else ""))


if __name__ == "__main__":
    run(main, AccountingConfig)
