"""A trained model as a folder that stands alone: model.safetensors, config.json, tokenizer.json and a README that says what it is.

    python -m nanochat_gka.export --run out/runs/d20-gka --out d20-gka

then, anywhere with this package:

    from nanochat_gka.model.checkpoints import load
    loaded = load("d20-gka")          # .model, .tokenizer, .training
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat_gka.model.checkpoints import export, load
from trainkit.cli import run
from trainkit.files import atomic

CARD = """---
library_name: gka
pipeline_tag: text-generation
---

# {name}

A {layers}-layer language model of {parameters:,} parameters with {attention} attention, trained by the reference implementation of Gaussian Kernel
Attention (arXiv 2605.02144). It continues text; it was not taught to follow instructions, and nothing was done to keep it from writing what is wrong
or offensive.

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
from nanochat_gka.generation.engine import Engine
from nanochat_gka.model.checkpoints import load
from nanochat_gka.generation.sampling import Sampling

loaded = load("{folder}")
print(Engine(loaded.model, loaded.tokenizer).complete(["The "], Sampling())[0][0])
```

Or `python -m nanochat_gka.generate --run {folder} --prompt "The " --stream`, and `python -m nanochat_gka.eval_core --run {folder}`.
The settings of the training run are in `config.json`, with every head's sigma.
"""


@dataclass
class ExportConfig:
    """Write a trained language model as safetensors, with its configuration, tokenizer and a README."""

    run: Path
    """run folder, or one checkpoint folder in it"""
    out: Path
    """folder to write to"""
    step: int = -1
    """checkpoint to take; -1 = the newest"""


def card(about: dict[str, Any], folder: Path) -> str:
    """The README of an exported model; `about` is what its config.json says."""
    model, training = about["model"], about["training"]
    kinds = about["attention"]
    sigma = "; ".join(
        f"layer {layer}: {min(values):.3g} to {max(values):.3g}" for layer, values in about["sigma"].items()
    )
    return CARD.format(
        name=about["name"], layers=model["n_layer"], parameters=about["parameters"], attention=" and ".join(dict.fromkeys(kinds)),
        layer_kinds=", ".join(kinds), mixes=mixes(model, kinds), sigma=sigma or "none: no GKA layer", width=model["n_embd"], heads=model["n_head"],
        head_dim=model["n_embd"] // model["n_head"], context=model["sequence_len"], vocabulary=model["vocab_size"], tokens=training["tokens"],
        step=about["step"], steps=training["steps"], source=source(training["source"]), commit=training["commit"],
        exported_at_commit=about["exported_at_commit"], digest=about["sha256"]["model.safetensors"], folder=folder,
    )  # fmt: skip


def mixes(model: dict[str, Any], kinds: list[str]) -> str:
    """The form of the gka layers in words."""
    if "gka" not in kinds:
        return "no GKA layer"
    values = {
        "rotated": "the features that are in the kernel, the paper's form",
        "normalised": "normalised features before rotation, not the paper's form",
        "raw": "the block input as it is, not the paper's form",
    }[model["gka_values"]]
    return values + (f"; head offsets {model['head_offsets']}" if model["head_offsets"] else "")


def source(files: list[tuple[str, int]]) -> str:
    """The files that the training text came from, [name, bytes] each, in one line."""
    return (
        f"{len(files)} parquet files, {files[0][0]} to {files[-1][0]}, {sum(size for _, size in files) / 1e6:,.1f} MB"
    )


def main(config: ExportConfig) -> None:
    loaded = load(config.run, config.step)
    about = export(loaded, config.out)
    with atomic(config.out / "README.md") as temporary:
        temporary.write_text(card(about, config.out))
    print(
        f'{config.out}: {about["name"]} at step {about["step"]:,}; nanochat_gka.model.checkpoints.load("{config.out}") reads it'
    )


if __name__ == "__main__":
    run(main, ExportConfig)
