"""How the next token is chosen from the logits."""

import random
from dataclasses import dataclass
from typing import Annotated

import torch

from trainkit_gka.cli import Bounds, Count, Seed, UserError

# What upstream nanochat asks its base models to continue, in training and afterwards: greedily, by 16 tokens.
SAMPLE_PROMPTS = (
    "The capital of France is",
    "The chemical symbol of gold is",
    "If yesterday was Friday, then tomorrow will be",
    "The opposite of hot is",
    "The planets of the solar system are:",
    "My favorite color is",
    "If 5*x + 3 = 13, then x is",
)


@dataclass
class Sampling:
    """The flags of every command that writes text."""

    num_samples: Count = 1
    """Continuations of each prompt."""
    max_tokens: Count = 64
    """Length of a continuation, in tokens."""
    temperature: Annotated[float, Bounds(0)] = 0.8
    """Temperature of sampling; 0 = greedy."""
    top_k: Annotated[int, Bounds(0)] = 50
    """Sample among the k most likely tokens; 0 = all."""
    top_p: Annotated[float, Bounds(0, 1, open_least=True)] = 1.0
    """Sample among the most likely tokens that together have this probability; 1 = all."""
    seed: Seed = 42
    """Seed of the samples: the same seed gives the same text, however many prompts and samples run together."""

    def draws(self, prompt: str, sample: int) -> random.Random:
        """The random numbers of one continuation, whatever the other prompts, the batch and the device are."""
        return random.Random(f"{self.seed} {sample} {prompt}")


def pick(logits: torch.Tensor, draws: list[random.Random], sampling: Sampling) -> list[int]:
    """One token id for every row of logits, (B, V), each from one number of its own source.

    Raises UserError for logits that are not finite.
    """
    if not logits.isfinite().all():
        raise UserError("the model's logits are not numbers; its weights are damaged, or its training diverged")
    if sampling.temperature == 0:
        return logits.argmax(dim=-1).tolist()
    scaled = (logits.double() - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    probabilities = truncate(scaled.softmax(dim=-1), sampling.top_k, sampling.top_p)
    cumulative = probabilities.cumsum(dim=-1)
    uniform = torch.tensor([[source.random()] for source in draws], dtype=cumulative.dtype, device=cumulative.device)
    # The first token whose cumulative probability exceeds the draw: never one of probability 0.
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0].tolist()


def truncate(probabilities: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """(B, V) probabilities with the unlikely ones set to 0, not normalised again.

    First those beyond the top_k most likely go (0 = all stay), then those beyond the smallest set of the most likely
    that together have top_p of what is left. Equally likely tokens stay or go by their order.
    """
    size = probabilities.shape[-1]
    if top_p == 1 and (top_k or size) >= size:
        return probabilities
    values, indices = probabilities.topk(min(top_k or size, size), dim=-1)
    if top_p < 1:
        before = values.cumsum(dim=-1) - values
        values = values.masked_fill(before >= top_p * values.sum(dim=-1, keepdim=True), 0.0)
    return torch.zeros_like(probabilities).scatter(-1, indices, values)
