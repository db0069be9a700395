"""What a trained language model can do in its context, and what its heads do, measured without training anything.

Legend: B rows, T tokens of a row, H heads, L layers.
"""

import math
from typing import Any

import torch

from nanochat_gka.data.loader import Rows
from nanochat_gka.figures import measures
from nanochat_gka.figures.maps import by_token_read
from nanochat_gka.model.attention import Attention
from nanochat_gka.model.gpt import GPT
from runs.study.forms.attention import NoAttention

NAME_TOKENS = 3  # of a made-up name


@torch.inference_mode()
def induction(model: GPT, count: int, length: int, bos: int, generator: torch.Generator) -> dict[str, float]:
    """Of `count` sequences of `length` random tokens that stand twice in a row, after the token `bos`.

    accuracy: how often the most likely token is right in the second half, from its second token on (the first cannot
    be known). gain: nats a token by which the loss there is below that of the first half.
    """
    tokens = torch.randint(model.config.vocab_size, (count, length), generator=generator)
    ids = torch.cat([torch.full((count, 1), bos), tokens, tokens], dim=1).to(model.device)
    logits, targets = model(ids[:, :-1]), ids[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    again = slice(length + 1, 2 * length)
    right = (logits[:, again].argmax(-1) == targets[:, again]).float().mean()
    return {"accuracy": float(right), "gain": float(losses[:, :length].mean() - losses[:, again].mean())}


@torch.inference_mode()
def copying(model: GPT, ids: torch.Tensor, generator: torch.Generator) -> dict[str, float]:
    """Of natural rows, (B, T), in which a made-up name of three random tokens stands a quarter of a row in, and again
    three quarters in.

    accuracy: how often the most likely token continues the second mention as the first did, given its first token.
    gain: nats a token by which the loss there is below that of the first mention.
    """
    ids, width = ids.clone(), ids.shape[1]
    first, second = width // 4, 3 * width // 4
    names = torch.randint(model.config.vocab_size, (len(ids), NAME_TOKENS), generator=generator).to(ids.device)
    for start in (first, second):
        ids[:, start : start + NAME_TOKENS] = names
    logits = model(ids)
    losses, right = [], 0.0
    for start in (first, second):
        predicted = logits[:, start : start + NAME_TOKENS - 1]  # of the name's second token, third, ...
        losses.append(float(torch.nn.functional.cross_entropy(predicted.flatten(0, 1), names[:, 1:].flatten())))
        right = float((predicted.argmax(-1) == names[:, 1:]).float().mean())
    return {"accuracy": right, "gain": losses[0] - losses[1]}


@torch.inference_mode()
def loss_by_position(model: GPT, rows: Rows, batch: int) -> dict[str, float]:
    """Nats a token of natural rows, by the place in the row: the mean over places 1, 2-3, 4-7, 8-15, ..., as "4-7"."""
    total = torch.zeros(rows.sequence_len, dtype=torch.float64)
    for start in range(0, len(rows), batch):
        ids, targets = (t.to(model.device) for t in rows.batch(range(start, min(start + batch, len(rows)))))
        losses = model(ids, targets, reduction="none").view(ids.shape)
        total += losses.sum(0).double().cpu()
    means, found = total / len(rows), {}
    for power in range(math.ceil(math.log2(rows.sequence_len + 1))):
        low, high = 2**power, min(2 ** (power + 1) - 1, rows.sequence_len)
        found[f"{low}-{high}" if high > low else str(low)] = float(means[low - 1 : high].mean())
    return found


@torch.inference_mode()
def weights(model: GPT, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """W of every layer that has one, on one text of T token ids: layer -> (H, T, T), by token read, on the CPU.

    With KV shift a slot's value is of two tokens; there it counts as the later one's.
    """
    inputs: dict[Attention, tuple] = {}
    layers = [layer for layer in model.attentions if not isinstance(layer, NoAttention)]
    hooks = [layer.register_forward_pre_hook(lambda layer, args: inputs.update({layer: args})) for layer in layers]
    try:
        model(ids[None])
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for layer in layers:
        x, value_embedding, rotary = inputs[layer][:3]
        queries, keys, _ = layer.slots(x, value_embedding, rotary)
        own = layer.weights(queries, keys)[0].float().cpu()
        delays = getattr(layer.pairing, "value_delays", None)
        found[layer.layer] = by_token_read(own, torch.tensor(delays)) if delays else own
    return found


def heads(model: GPT, texts: torch.Tensor) -> list[dict[str, Any]]:
    """Every head's entropy in nats, effective tokens, mean distance, weights of itself and of the token before, as
    means over texts, (B, T), and its sigma (None without one).
    """
    sums: dict[tuple[int, int], dict[str, float]] = {}
    for ids in texts:
        for layer, w in weights(model, ids.to(model.device)).items():
            entropy = torch.special.entr(w[:, 1:]).sum(-1).mean(-1)
            numbers = {name: measure(w) for name, measure in measures.MEASURES.items()} | {"entropy (nats)": entropy}
            for head in range(len(w)):
                own = sums.setdefault((layer, head), dict.fromkeys(numbers, 0.0))
                for name, values in numbers.items():
                    own[name] += float(values[head]) / len(texts)
    sigmas = model.bandwidths()
    return [
        {"layer": layer, "head": head, **numbers, "sigma": float(sigmas[layer][head]) if layer in sigmas else None}
        for (layer, head), numbers in sums.items()
    ]
