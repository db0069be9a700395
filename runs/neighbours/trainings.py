"""Small models with the attention of every method: the demo's vision transformer on digits, and a language model.

The vision runs are the trainer's own with another `attn_layer`. The language runs take the trainer's model, rows,
rates, schedule and optimiser; queries, keys and values are nanochat's, or GKA's features for a method without
projections, and only their mixing is another.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import timm.models.vision_transformer as vit
import torch
import tyro
from torch import nn

from deit_gka.training.config import TrainConfig as VisionConfig
from deit_gka.training.trainer import Trainer as VisionTrainer
from nanochat_gka.data.loader import PackedData, Stream
from nanochat_gka.model.gpt import GPT, build
from nanochat_gka.training.bits_per_byte import bits_per_byte
from nanochat_gka.training.config import TrainConfig as LanguageConfig
from nanochat_gka.training.gradients import accumulate_gradients
from nanochat_gka.training.optim import Group, MuonAdamW, parameter_groups
from nanochat_gka.training.schedule import lr_multiplier, muon_momentum, weight_decay_multiplier
from runs.demo import language, vision
from runs.neighbours.layers import ABOUT, OURS
from runs.neighbours.mixing import Mixing, MixingLayer
from trainkit_gka.distributed import running
from trainkit_gka.loop import finish_record, launch
from trainkit_gka.progress import console, progress_bar

DIGIT_TOKENS = (vision.IMAGE_SIZE // 4) ** 2 + 1  # patches of 4 pixels and the CLS token
# Of 17 tokens low-rank methods get half, so that they are approximations here too; Performer has its own D ln D.
DIGIT_SIZES = {"linformer": 8, "nystromformer": 8, "skyformer": 16, "krause": 8, "kernelized-rpe": 8}
DEPTH, STEPS = 4, 400  # of the language model


def timm_name(name: str) -> str:
    """The name under which timm builds the method's layers for digits."""
    if name in OURS:
        return name

    def layer(cls, dim: int, num_heads: int, **unused) -> nn.Module:
        mixing = Mixing.METHODS[name](num_heads, dim // num_heads, DIGIT_TOKENS, size=DIGIT_SIZES.get(name))
        return MixingLayer(mixing)

    vit.ATTN_LAYERS[f"neighbour-{name}"] = type("NeighbourLayer", (nn.Module,), {"__new__": layer})
    return f"neighbour-{name}"


def vision_config(name: str, seed: int, epochs: int, out: Path) -> VisionConfig:
    """The demo's recipe."""
    model = ["--model", "deit_tiny_patch16_224", *vision.MODEL_FLAGS, f"attn_layer={timm_name(name)}"]
    places = ["--out", out / "digits", "--model-tag", f"{name}-{epochs}-seed{seed}", "--results", out / "digits.jsonl"]
    length = ["--epochs", epochs, "--warmup-epochs", min(vision.WARMUP_EPOCHS, epochs), "--seed", seed]
    words = [*model, *places, *length, *vision.DATA_FLAGS, *vision.RECIPE_FLAGS, *vision.REPORT_FLAGS]
    return tyro.cli(VisionConfig, args=list(map(str, words)))


def train_digits(name: str, seed: int, epochs: int, out: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Settings and numbers of a vision run, which a run that was stopped continues; None if a signal ended it."""
    config = vision_config(name, seed, epochs, out)
    launch(config, VisionTrainer)
    record = finish_record(config.folder, VisionTrainer.FINISH_KEYS)
    if record is None:
        return None
    kept = ("parameters", "top1", "ema_top1", "images_per_second")
    settings = {**config.identity(), "method_size": DIGIT_SIZES.get(name)}
    return settings, {key: record[key] for key in kept}


# Language


def plug(model: GPT, name: str) -> None:
    """Let every layer of a GPT, as `language_config` has it, mix with the causal form of a method."""
    shape = model.config
    for attention in model.attentions:
        attention.mixing = Mixing.METHODS[name](shape.n_head, shape.head_dim, shape.sequence_len, causal=True)

        def attend(rotary, queries, stored, mixing=attention.mixing):
            q, k, v = (t.transpose(1, 2) for t in (queries, stored[0], stored[-1]))  # features are stored once
            return mixing(q, k, v).transpose(1, 2)

        attention.attend = attend


def base(name: str) -> dict[str, str]:
    """The flags of the trainer's layers that a method is plugged into: those with its projections and no bandwidth."""
    if name in OURS:
        return {"attention": name}
    return {"attention": "softmax"} if ABOUT[name].projections else {"attention": "gka", "kernel": "mean"}


def language_config(
    name: str, seed: int, steps: int, packed: Path, out: Path, flags: Sequence[str] = (), depth: int = DEPTH
) -> LanguageConfig:
    """The demo's settings without value embeddings, which GKA does not have. flags: words of others."""
    own = {"data": packed, "depth": depth, "num-iterations": steps, "seed": seed, "out": out / "language"}
    own |= {"value-embeds": "none", "window-pattern": "L"} | base(name)
    words = [*language.words(language.TRAIN_FLAGS | own), *flags]
    return tyro.cli(LanguageConfig, args=[str(word) for word in words])


def groups_of(model: GPT, config: LanguageConfig, horizon) -> list[Group]:
    """The trainer's groups; what a method learns beside a sigma is trained as sigma is."""
    named = dict(model.named_parameters())
    own = [key for key in named if ".mixing." in key and not key.endswith("log_sigma")]
    known = SimpleNamespace(
        config=model.config, named_parameters=lambda: [item for item in named.items() if item[0] not in own]
    )
    groups = parameter_groups(known, config, horizon.lr_scale, horizon.weight_decay_scale)
    betas = (config.adam_beta1, config.adam_beta2)
    if own:
        groups.append(Group("adamw", own, [named[key] for key in own], config.sigma_lr * horizon.lr_scale, betas))
    return groups


def train_language(
    name: str,
    seed: int,
    steps: int,
    packed: Path,
    out: Path,
    flags: Sequence[str] = (),
    change: Callable[[GPT], None] | None = None,
    depth: int = DEPTH,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and numbers of a language run, which is not kept. change: what is done to the model that was built."""
    config, data = language_config(name, seed, steps, packed, out, flags, depth), PackedData(packed)
    with running("cpu", seed) as runtime:
        model = build(config.shape(depth, data.sequence_len, data.tokenizer.vocab_size), runtime.device)
        if name not in OURS:
            plug(model, name)
        if change is not None:
            change(model)
        horizon, stream = config.horizon(model, 1), Stream(data.split("train"), seed)
        rows = horizon.total_batch_size // data.sequence_len
        optimizer = MuonAdamW(groups_of(model, config, horizon), runtime)
        with progress_bar() as bar:
            task = bar.add_task(f"{name}, seed {seed}", total=steps, status="")
            for step in range(steps):
                optimizer.zero_grad()
                loss = accumulate_gradients(model, stream, step, rows, rows, runtime)
                rate = lr_multiplier(step, steps, config.warmup_ratio, config.warmdown_ratio, config.final_lr_frac)
                optimizer.step(rate, muon_momentum(step), weight_decay_multiplier(step, steps))
                bar.update(task, advance=1, status=f"loss {loss.item():.3f}")
        with torch.no_grad():
            evaluated = data.eval_rows("val", config.eval_tokens, config.eval_rows)
            loss = bits_per_byte(model, evaluated, data.tokenizer.token_bytes(), runtime, rows)
    console.print(f"{name}, seed {seed}: {loss:.4f} validation bits per byte", highlight=False)
    settings = {"depth": depth, "steps": steps, "seed": seed, "tokens": steps * horizon.total_batch_size}
    settings |= {"width": model.config.n_embd, "sequence_len": data.sequence_len, "rates": config.matrix_lr}
    return settings, {"parameters": sum(p.numel() for p in model.parameters()), "val_bpb": loss}
