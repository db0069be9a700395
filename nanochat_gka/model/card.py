"""The README of an exported model, written from its config.json."""

from pathlib import Path
from typing import Any

CARD = """---
library_name: gka
pipeline_tag: text-generation
---

# {name}

A {layers}-layer language model of {parameters:,} parameters with {attention} attention, trained by the reference
implementation of Gaussian Kernel Attention (arXiv 2605.02144). It continues text. It was not taught to follow
instructions, and nothing was done to keep it from writing what is wrong or offensive.

| | |
|---|---|
| attention, layer by layer | {layer_kinds} |
| form of the attention | {form} |
| sigma (bandwidth), smallest and largest of each layer | {sigma} |
| width, heads, channels per head | {width}, {heads}, {head_dim} |
| context, vocabulary | {context:,} tokens, {vocabulary:,} |
| training tokens | {tokens:,} ({step:,} of {steps:,} steps) |
| training text | {source} |
| trained at commit | {commit} |
| exported at commit | {exported_at_commit} |
| sha256 of the weights | `{digest}` |

```python
from nanochat_gka.generation.engine import Engine
from nanochat_gka.model.checkpoints import load
from nanochat_gka.generation.sampling import Sampling

loaded = load("{folder}")
print(Engine(loaded.model, loaded.tokenizer).complete(["The "], Sampling())[0][0])
```

In Hugging Face's transformers, with this package and its extra `hf` installed:

```python
import nanochat_gka.hf  # registers the model; nothing remote is executed
from transformers import pipeline

write = pipeline("text-generation", model="{folder}")
print(write("The ", max_new_tokens=32)[0]["generated_text"])
```

Or `python -m nanochat_gka.generate --run {folder} --prompt "The " --stream`, and
`python -m nanochat_gka.eval_core --run {folder}`. The settings of the training run are in `config.json`, with
every head's sigma.
"""


def card(about: dict[str, Any], folder: Path) -> str:
    """The README of the model exported to `folder`; `about` is the content of its config.json."""
    model, training, kinds = about["model"], about["training"], about["attention"]
    ranges = [f"layer {layer}: {min(values):.3g} to {max(values):.3g}" for layer, values in about["sigma"].items()]
    files = training["source"]  # [name, bytes] of each
    megabytes = sum(size for _, size in files) / 1e6
    return CARD.format(
        name=about["name"],
        layers=model["n_layer"],
        parameters=about["parameters"],
        attention=" and ".join(dict.fromkeys(kinds)),
        layer_kinds=", ".join(kinds),
        form=_form(model, kinds),
        sigma="; ".join(ranges) or "none: no GKA layer",
        width=model["n_embd"],
        heads=model["n_head"],
        head_dim=model["n_embd"] // model["n_head"],
        context=model["sequence_len"],
        vocabulary=model["vocab_size"],
        tokens=training["tokens"],
        step=about["step"],
        steps=training["steps"],
        source=f"{len(files)} parquet files, {files[0][0]} to {files[-1][0]}, {megabytes:,.1f} MB",
        commit=training["commit"],
        exported_at_commit=about["exported_at_commit"],
        digest=about["sha256"]["model.safetensors"],
        folder=folder,
    )


def _form(model: dict[str, Any], kinds: list[str]) -> str:
    """The values of gka layers, and what a model's layers have beside the paper's form."""
    words = ["no GKA layer"]
    if "gka" in kinds:
        words = ["rotated values, the paper's form"]
        if model["gka_values"] == "normalised":
            words = ["values normalised and not rotated, not the paper's form"]
    words += [f"head offsets {model['head_offsets']}"] if model["head_offsets"] else []
    words += ["a bandwidth for every channel"] if model.get("channel_bandwidths") else []
    words += ["a gate for every head"] if model.get("head_gates") else []
    return "; ".join(words)
