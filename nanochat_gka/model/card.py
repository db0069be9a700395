"""The README of an exported model, written from its config.json."""

from pathlib import Path
from typing import Any

from nanochat_gka.model.config import GPTConfig

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
| what GKA heads mix | {mixes} |
| sigma (bandwidth), smallest and largest of each layer | {sigma} |
| width, heads, channels per head | {width}, {heads}, {head_dim} |
| context, vocabulary | {context:,} tokens, {vocabulary:,} |
| training tokens | {tokens:,} ({step:,} of {steps:,} steps) |
| training text | {source} |
| trained at commit | {commit} |
| exported at commit | {exported_at_commit} |
| sha256 of the weights | `{digest}` |

```python
{forms}from nanochat_gka.generation.engine import Engine
from nanochat_gka.model.checkpoints import load
from nanochat_gka.generation.sampling import Sampling

loaded = load("{folder}")
print(Engine(loaded.model, loaded.tokenizer).complete(["The "], Sampling())[0][0])
```

{transformers}Or `python -m nanochat_gka.generate --run {folder} --prompt "The " --stream{flag}`, and
`python -m nanochat_gka.eval_core --run {folder}{flag}`. The settings of the training run are in `config.json`, with
every head's sigma.
"""

TRANSFORMERS = """In Hugging Face's transformers, with this package and its extra `hf` installed:

```python
{forms}import nanochat_gka.hf  # registers the model; nothing remote is executed
from transformers import pipeline

write = pipeline("text-generation", model="{folder}")
print(write("The ", max_new_tokens=32)[0]["generated_text"])
```

"""


def card(about: dict[str, Any], folder: Path) -> str:
    """The README of the model exported to `folder`; `about` is the content of its config.json."""
    model, training, kinds = about["model"], about["training"], about["attention"]
    ranges = [f"layer {layer}: {min(values):.3g} to {max(values):.3g}" for layer, values in about["sigma"].items()]
    files = training["source"]  # [name, bytes] of each
    megabytes = sum(size for _, size in files) / 1e6
    shape = type(GPTConfig.from_saved(model))
    module = "" if shape is GPTConfig else shape.__module__.rpartition(".")[0]  # that registers the form
    forms = f"import {module}  # the model's form of attention\n" if module else ""
    flag = f" --forms {module}" if module else ""
    return CARD.format(
        name=about["name"],
        layers=model["n_layer"],
        parameters=about["parameters"],
        attention=" and ".join(dict.fromkeys(kinds)),
        layer_kinds=", ".join(kinds),
        mixes=_mixes(model, kinds),
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
        transformers=TRANSFORMERS.format(folder=folder, forms=forms),
        forms=forms,
        flag=flag,
    )


def _mixes(model: dict[str, Any], kinds: list[str]) -> str:
    """The form of the layers in words: of gka layers, and what softmax and vlt layers have beside the paper's."""
    values = {
        "rotated": "the features that are in the kernel, the paper's form",
        "normalised": "normalised features before rotation, not the paper's form",
    }
    of_gka = values.get(model["gka_values"], f"{model['gka_values']} values, not the paper's form")
    words = [of_gka if "gka" in kinds else "no GKA layer"]
    words += [f"head offsets {model['head_offsets']}"] if model["head_offsets"] else []
    words += ["a bandwidth for every channel"] if model.get("channel_bandwidths") else []
    words += ["a gate for every head"] if model.get("head_gates") else []
    words += [f"{name} {value}" for name, value in GPTConfig.from_saved(model).settings_of_form().items()]
    return "; ".join(words)
