"""Small language models of every kind, with attention that matters, and a way to put one on disk as a trained run."""

import dataclasses
from pathlib import Path

import torch

from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import GPT, build
from trainkit_gka import checkpoint

SHAPE = GPTConfig(sequence_len=16, vocab_size=70, n_layer=4, n_head=4, n_kv_head=4, n_embd=64, window_pattern="SL")
# The preset, which make pretrain-d20-best trains.
PRESET = dict(attention="gka", gka_values="unrotated", head_offsets="PS", value_embeds="every-second")
PRESET |= dict(channel_bandwidths=True, head_gates=True)
VARIANTS = [
    dict(attention="softmax"),
    dict(attention="vlt"),
    dict(attention="gka"),
    dict(attention="gka", head_offsets="PS"),
    dict(attention="gka", head_offsets="PNSS", value_embeds="every-second"),
    dict(attention="gka", gka_values="unrotated"),
    dict(attention="gka", gka_values="unrotated", head_offsets="PS"),
    dict(attention="GGGA"),
    dict(attention="VAG", value_embeds="none"),
    dict(attention="softmax", head_offsets="PS", offset_layers="all", value_embeds="every-layer"),
    dict(attention="VGA", head_offsets="PNSS", offset_layers="all"),
    dict(attention="GA", head_offsets="PNS", offset_layers="all", gka_values="unrotated"),
    dict(attention="gka", channel_bandwidths=True),
    dict(attention="gka", gka_values="unrotated", head_offsets="PS", channel_bandwidths=True, head_gates=True),
    PRESET,
    dict(attention="VGA", head_offsets="PS", offset_layers="all", channel_bandwidths=True, head_gates=True),
]


def awake(config: GPTConfig, seed: int = 0) -> GPT:
    """A model whose zero-initialised projections are not zero, so that attention matters."""
    torch.manual_seed(seed)
    model = build(config, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.normal_(std=0.1)
        for name, parameter in model.named_parameters():
            if name.endswith(("channel_log_scales", "head_gate.weight")):
                parameter.normal_()
        model.lm_head.weight.normal_(std=0.1)
    return model


@torch.inference_mode()
def greedy(model: GPT, ids: list[int], count: int, end: int) -> list[int]:
    """The likeliest tokens after `ids`: a pass without a cache for each, up to the first that is `end` or more."""
    tokens: list[int] = []
    while len(tokens) < count:
        token = int(model(torch.tensor([[*ids, *tokens]]))[0, -1].argmax())
        if token >= end:
            break
        tokens.append(token)
    return tokens


def write_run(folder: Path, model: GPT, tokenizer_folder: Path, step: int = 7) -> Path:
    """A run folder with one checkpoint of `model`, as the trainer writes it."""
    state = {
        "commit": "abc1234",
        "model_config": dataclasses.asdict(model.config),
        "train_config": {"depth": model.config.n_layer, "seed": 42},
        "data": {
            "tokenizer_sha256": "",
            "source": [["shard_00000.parquet", 1000], ["shard_00001.parquet", 500]],
            "sequence_len": model.config.sequence_len,
        },
        "progress": {"step": step},
        "tokens": 1000 * step,
        "steps": step,
    }
    files = {"tokenizer.json": tokenizer_folder / "tokenizer.json"}
    checkpoint.save(folder / "checkpoints", step, {"model": model.state_dict()}, state, files)
    return folder
