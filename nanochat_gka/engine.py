"""Text out of a model: sampling that re-runs the whole sequence for every token."""

import torch

from nanochat_gka.gpt import GPT
from nanochat_gka.tokenizer import Tokenizer


@torch.inference_mode()
def generate(model: GPT, tokenizer: Tokenizer, prompt: str, *, max_tokens: int = 64, num_samples: int = 1, temperature: float = 1.0,
             top_k: int = 0, seed: int = 42) -> list[str]:  # fmt: skip
    """`num_samples` continuations of `prompt` (without it), at most max_tokens each; a document's end stops a sample.

    temperature 0 is greedy; top_k > 0 samples among the k most likely tokens. Raises ValueError for a negative temperature or top_k
    and for a prompt longer than the model takes.
    """
    if temperature < 0 or top_k < 0:
        raise ValueError(f"temperature and top_k must be >= 0, got {temperature} and {top_k}")
    start = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    if len(start) > model.rotary.length:
        raise ValueError(f"the prompt has {len(start)} tokens, the model takes at most {model.rotary.length}")
    ids = torch.tensor([start] * num_samples, device=model.device)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    ended = torch.zeros(num_samples, dtype=torch.bool, device=model.device)
    for _ in range(min(max_tokens, model.rotary.length - len(start))):
        following = _pick(model(ids)[:, -1], temperature, top_k, generator)
        following[ended] = tokenizer.bos_id
        ids = torch.cat([ids, following[:, None]], dim=1)
        ended |= following == tokenizer.bos_id
        if ended.all():
            break
    return [tokenizer.decode(_until(row[len(start) :], tokenizer.bos_id)) for row in ids.tolist()]


def _pick(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k:
        threshold = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)[:, 0]


def _until(ids: list[int], stop: int) -> list[int]:
    return ids[: ids.index(stop)] if stop in ids else ids
