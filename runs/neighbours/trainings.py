"""Small models with the attention of every method: the demo's vision transformer on digits, and a language model.

The vision runs are the trainer's own with another `attn_layer`. The language runs take the trainer's model, rows,
rates, schedule and optimiser; queries, keys and values are nanochat's, or GKA's features for a method without
projections, and only their mixing is another.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import timm.models.vision_transformer as vit
import torch
import tyro

from deit_gka.train import Trainer as VisionTrainer
from deit_gka.training.config import TrainConfig as VisionConfig
from nanochat_gka.data.loader import PackedData, Stream
from nanochat_gka.model.gpt import GPT, build
from nanochat_gka.train import TrainConfig as LanguageConfig
from nanochat_gka.train import accumulate_gradients
from nanochat_gka.training.bits_per_byte import bits_per_byte
from nanochat_gka.training.optim import Group, MuonAdamW, parameter_groups
from nanochat_gka.training.schedule import lr_multiplier, muon_momentum, weight_decay_multiplier
from runs.demo import language, vision
from runs.neighbours.layers import ABOUT, OURS
from runs.neighbours.methods import METHODS, MixingLayer
from trainkit_gka.distributed import running
from trainkit_gka.loop import finish_record, launch
from trainkit_gka.progress import progress_bar

DIGIT_TOKENS = (vision.IMAGE_SIZE // 4) ** 2 + 1  # patches of 4 pixels and the CLS token
# Of 17 tokens low-rank methods get half, so that they are approximations here too; Performer has its own D ln D.
DIGIT_SIZES = {"linformer": 8, "nystromformer": 8, "skyformer": 16, "krause": 8, "kernelized-rpe": 8}
DEPTH, STEPS = 4, 400  # of the language model
Trained = tuple[dict[str, Any], dict[str, Any]]  # settings, numbers


def timm_name(name: str) -> str:
    """The name under which timm builds the method's layers for digits."""
    if name in OURS:
        return name

    class NeighbourLayer(MixingLayer):
        def __init__(self, dim: int, num_heads: int, **unused):
            super().__init__(METHODS[name](num_heads, dim // num_heads, DIGIT_TOKENS, size=DIGIT_SIZES.get(name)))

    vit.ATTN_LAYERS[f"neighbour-{name}"] = NeighbourLayer
    return f"neighbour-{name}"


def method_on_digits(method: str, seed: int, epochs: int, out: Path) -> Trained | None:
    """Train the demo's vision recipe with a method's layers; a run that was stopped continues. None if a signal ended
    it.
    """
    flags = ["--model", "deit_tiny_patch16_224", *vision.MODEL_FLAGS, f"attn_layer={timm_name(method)}"]
    flags += ["--out", out / "digits", "--model-tag", f"{method}-{epochs}-seed{seed}"]
    flags += ["--results", out / "digits.jsonl", "--epochs", epochs, "--seed", seed]
    flags += ["--warmup-epochs", min(vision.WARMUP_EPOCHS, epochs)]
    flags += [*vision.DATA_FLAGS, *vision.RECIPE_FLAGS, *vision.REPORT_FLAGS]
    config = tyro.cli(VisionConfig, args=list(map(str, flags)))
    launch(config, VisionTrainer)
    record = finish_record(config.folder, VisionTrainer.FINISH_KEYS)
    kept = ("parameters", "top1", "ema_top1", "images_per_second")
    settings = {**config.identity(), "method_size": DIGIT_SIZES.get(method)}
    return record and (settings, {key: record[key] for key in kept})


# Language


def plug(model: GPT, name: str) -> None:
    """Let every layer of a GPT with the flags of `base` mix with the causal form of a method."""
    shape = model.config
    for attention in model.attentions:
        attention.mixing = METHODS[name](shape.n_head, shape.head_dim, shape.sequence_len, causal=True)
        if hasattr(attention, "log_sigma"):
            attention.log_sigma = None  # the operator's, which nothing reads now

        def attend(rotary, queries, stored, mixing=attention.mixing):
            q, k, v = (t.transpose(1, 2) for t in (queries, stored[0], stored[-1]))  # features are stored once
            return mixing(q, k, v).transpose(1, 2)

        attention.attend = attend


def base(name: str) -> list[str]:
    """The flags of the trainer's layers that have a method's projections."""
    return ["--attention", name if name in OURS else "softmax" if ABOUT[name].projections else "gka"]


def language_config(method: str, seed: int, steps: int, packed: Path, out: Path) -> LanguageConfig:
    """The demo's settings without value embeddings, which GKA does not have."""
    own = {"data": packed, "depth": DEPTH, "num-iterations": steps, "seed": seed, "out": out / "language"}
    own |= {"value-embeds": "none", "window-pattern": "L"}
    words = [*language.words(language.TRAIN_FLAGS | own), *base(method)]
    return tyro.cli(LanguageConfig, args=[str(word) for word in words])


def groups_of(model: GPT, config: LanguageConfig, horizon) -> list[Group]:
    """The trainer's groups; what a method learns is trained as sigma is."""
    named = dict(model.named_parameters())
    own = [key for key in named if ".mixing." in key]
    known = SimpleNamespace(
        config=model.config, named_parameters=lambda: [item for item in named.items() if item[0] not in own]
    )
    groups = parameter_groups(known, config, horizon.lr_scale, horizon.weight_decay_scale)
    betas = (config.adam_beta1, config.adam_beta2)
    if own:
        groups.append(Group("adamw", own, [named[key] for key in own], config.sigma_lr * horizon.lr_scale, betas))
    return groups


def method_on_text(method: str, seed: int, steps: int, packed: Path, out: Path) -> Trained:
    """Train a language model that mixes with a method; it is not kept."""
    config, data = language_config(method, seed, steps, packed, out), PackedData(packed)
    with running("cpu", seed) as runtime:
        model = build(config.shape(config.depth, data.sequence_len, data.tokenizer.vocab_size), runtime.device)
        if method not in OURS:
            plug(model, method)
        horizon, stream = config.horizon(model, 1), Stream(data.split("train"), seed)
        rows = horizon.total_batch_size // data.sequence_len
        optimizer = MuonAdamW(groups_of(model, config, horizon), runtime)
        with progress_bar() as bar:
            task = bar.add_task(f"{method}, seed {seed}", total=steps, status="")
            for step in range(steps):
                optimizer.zero_grad()
                loss = accumulate_gradients(model, stream, step, rows, rows, runtime)
                rate = lr_multiplier(step, steps, config.warmup_ratio, config.warmdown_ratio, config.final_lr_frac)
                optimizer.step(rate, muon_momentum(step), weight_decay_multiplier(step, steps))
                bar.update(task, advance=1, status=f"loss {loss.item():.3f}")
        with torch.no_grad():
            evaluated = data.eval_rows("val", config.eval_tokens, config.eval_rows)
            loss = bits_per_byte(model, evaluated, data.tokenizer.token_bytes(), runtime, rows)
    settings = {"depth": config.depth, "steps": steps, "seed": seed, "tokens": steps * horizon.total_batch_size}
    settings |= {"width": model.config.n_embd, "sequence_len": data.sequence_len, "rates": config.matrix_lr}
    return settings, {"parameters": sum(p.numel() for p in model.parameters()), "val_bpb": loss}
