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


@torch.inference_mode()
def case_of(source: str, tokens: int) -> Case:
    """The case of a name in RANDOM or of a run's folder. Raises UserError if the run has no GKA layer, or is none."""
    if source in RANDOM:
        return random_case(tokens, RANDOM[source], seed=0)
    run = Path(source)
    saved = checkpoint.load_newest(run / "checkpoints")
    if saved is None:
        raise UserError(f"no checkpoint in {run}; make demo trains models")
    return (_of_language if "model_config" in saved.state else _of_images)(run, tokens)


def _of_language(run: Path, tokens: int) -> Case:
    """Queries, keys and values of all heads of all layers on the built-in text, causal; windows are left out.

    No document is longer than `SEGMENT` tokens; the bank is the text that follows.
    """
    loaded = load(run)
    model, bank_tokens = loaded.model.eval(), min(tokens, MOST_OF_BANK)
    length = min(SEGMENT, model.rotary.length, tokens)
    layers = _layers(model.attentions, GKAAttention, run)
    seen: dict[torch.nn.Module, list] = {layer: [] for layer in layers}  # of each document: queries, keys, values

    def keep(layer: GKAAttention, arguments: tuple) -> None:
        x, value_embedding, rotary = arguments[:3]
        queries, stored = layer.project(x, value_embedding, rotary, slice(0, x.shape[1]))
        seen[layer].append((queries, *layer.keys_and_values(rotary, x.shape[1], stored)))

    for layer in layers:
        layer.register_forward_pre_hook(keep)
    needed = -(-tokens // length) + -(-bank_tokens // length)
    ids = [number for text in read_texts() for number in loaded.tokenizer.encode(text)]
    if len(ids) < needed * (length - 1):
        raise UserError(f"--lengths {tokens} is more than the built-in text has")
    for row in torch.tensor(ids[: needed * (length - 1)]).view(needed, length - 1):
        model(torch.cat([torch.tensor([loaded.tokenizer.bos_id]), row])[None])
    queries, keys, values = (
        torch.cat([torch.cat(part, dim=1)[0] for part in parts], dim=1).transpose(0, 1)  # (H of all layers, N, D)
        for parts in zip(*(zip(*of_layer) for of_layer in seen.values()))
    )
    same = torch.equal(queries, keys), torch.equal(keys, values)  # what is one tensor stays one
    queries, bank = queries[:, :tokens].contiguous(), keys[:, -bank_tokens:].contiguous()
    keys = queries if same[0] else keys[:, :tokens].contiguous()
    values = keys if same[1] else values[:, :tokens].contiguous()
    return Case(queries, keys, values, _sigma(layers), True, bank)


def _of_images(run: Path, tokens: int) -> Case:
    """Features of all heads of all layers of a ViT on the digits; the tokens of many images are one long sequence."""
    drawn, seen = of_run(run), {}
    layers = _layers(attention_layers(drawn.model), GKA, run)
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
    return Case(x, x, x, _sigma(layers), False, bank=x[:, :0])


def _layers(attentions, kind: type, run: Path) -> list:
    layers = [layer for layer in attentions if isinstance(layer, kind)]
    if not layers:
        raise UserError(f"{run} has no GKA layer: there is nothing to approximate")
    return layers


def _sigma(layers: list) -> torch.Tensor:
    """(H of all layers,)."""
    return torch.cat([layer.log_sigma.exp() for layer in layers])
