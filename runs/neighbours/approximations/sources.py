"""Cases of trained models: the features and bandwidths that their heads really have."""

from pathlib import Path

import torch

from deit_gka.data.sources.digits import Digits
from deit_gka.data.transforms import eval_transform
from deit_gka.figures.maps import attention_layers
from deit_gka.figures.subjects import of_run
from deit_gka.model.attention import GKA
from nanochat_gka.data.builtin import read_texts
from nanochat_gka.model.attention import GKAAttention
from nanochat_gka.model.checkpoints import load
from runs.neighbours.approximations.case import Case, random_case
from trainkit_gka import checkpoint
from trainkit_gka.cli import UserError

RANDOM = {"random": False, "random, causal": True}
SEGMENT = 2048  # tokens of a text at most; longer cases are texts beside each other
MOST_OF_BANK = 4096


def case_of(source: str, tokens: int, seed: int = 0) -> Case:
    """The case of a name in RANDOM or of a run's folder. Raises UserError if the run has no GKA layer, or is none."""
    if source in RANDOM:
        return random_case(tokens, RANDOM[source], seed)
    return (_of_language if _is_language(Path(source)) else _of_images)(Path(source), tokens)


def _is_language(run: Path) -> bool:
    saved = checkpoint.load_newest(run / "checkpoints")
    if saved is None:
        raise UserError(f"no checkpoint in {run}; make demo trains models")
    return "model_config" in saved.state


@torch.inference_mode()
def _of_language(run: Path, tokens: int) -> Case:
    """Queries, keys and values of all heads of all layers on the built-in text, causal; windows are left out.

    No document is longer than `SEGMENT` tokens; the bank is the text that follows.
    """
    loaded = load(run)
    model, bank_tokens = loaded.model.eval(), min(tokens, MOST_OF_BANK)
    length = min(SEGMENT, model.rotary.length, tokens)
    seen: list[tuple[torch.Tensor, ...]] = []

    def keep(layer: GKAAttention, arguments: tuple) -> None:
        x, value_embedding, rotary = arguments[:3]
        queries, stored = layer.project(x, value_embedding, rotary, slice(0, x.shape[1]))
        seen.append((queries, *layer.keys_and_values(rotary, x.shape[1], stored)))

    layers = [layer for layer in model.attentions if isinstance(layer, GKAAttention)]
    _check(layers, run)
    for layer in layers:
        layer.register_forward_pre_hook(keep)
    needed = -(-tokens // length) + -(-bank_tokens // length)
    ids = [number for text in read_texts() for number in loaded.tokenizer.encode(text)]
    if len(ids) < needed * (length - 1):
        raise UserError(f"--tokens {tokens} is more than the built-in text has")
    rows = torch.tensor(ids[: needed * (length - 1)]).view(needed, length - 1)
    for row in rows:
        model(torch.cat([torch.tensor([loaded.tokenizer.bos_id]), row])[None])
    by_layer = [seen[number :: len(layers)] for number in range(len(layers))]
    queries, keys, values = (
        torch.cat([torch.cat([part[name][0] for part in parts]) for parts in by_layer], dim=1).transpose(0, 1)
        for name in range(3)
    )
    sigma = torch.cat([layer.log_sigma.exp() for layer in layers])
    return _cut(queries, keys, values, sigma, True, tokens, bank_tokens)


@torch.inference_mode()
def _of_images(run: Path, tokens: int) -> Case:
    """Features of all heads of all layers of a ViT on the digits; the tokens of many images are one long sequence."""
    drawn = of_run(run)
    layers = [layer for layer in attention_layers(drawn.model) if isinstance(layer, GKA)]
    _check(layers, run)
    seen: dict[torch.nn.Module, torch.Tensor] = {}
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, arguments: seen.update({layer: arguments[0]}))
    transform, digits = eval_transform(drawn.model.patch_embed.img_size, **drawn.settings), Digits("train")
    per_image = drawn.model.patch_embed.num_patches + drawn.model.num_prefix_tokens
    count = -(-tokens // per_image)
    if count > len(digits):
        raise UserError(f"the digits have {len(digits) * per_image:,} tokens, not {tokens:,}")
    drawn.model(torch.stack([transform(digits.read(index)[0].convert("RGB")) for index in range(count)]))
    x = torch.cat([seen[layer].flatten(0, 1).unflatten(-1, (layer.num_heads, -1)) for layer in layers], dim=1)
    x = x.transpose(0, 1)[:, :tokens].contiguous()
    sigma = torch.cat([layer.log_sigma.exp() for layer in layers])
    return Case(x, x, x, sigma, False, x[:, :0])


def _check(layers: list, run: Path) -> None:
    if not layers:
        raise UserError(f"{run} has no GKA layer: there is nothing to approximate")


def _cut(queries, keys, values, sigma, causal: bool, tokens: int, bank_tokens: int) -> Case:
    """The case of the first tokens, with the next ones as its bank. What is one tensor stays one."""
    same = torch.equal(queries, keys), torch.equal(keys, values)
    bank = keys[:, -bank_tokens:].contiguous()
    queries = queries[:, :tokens].contiguous()
    keys = queries if same[0] else keys[:, :tokens].contiguous()
    values = keys if same[1] else values[:, :tokens].contiguous()
    return Case(queries, keys, values, sigma, causal, bank)
