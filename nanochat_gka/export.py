"""A trained model as a folder that stands alone: weights, configuration, tokenizer and a README about it.

    python -m nanochat_gka.export --run out/runs/d20-gka --out d20-gka

then, anywhere with this package:

    from nanochat_gka.model.checkpoints import load
    loaded = load("d20-gka")          # .model, .tokenizer, .training
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gka import KINDS
from nanochat_gka.model import onnx
from nanochat_gka.model.checkpoints import export, load
from nanochat_gka.model.config import GPTConfig
from trainkit_gka.cli import run
from trainkit_gka.files import atomic
from trainkit_gka.onnx import require, size_mb

CARD = """---
library_name: gka
pipeline_tag: text-generation
---

# {name}

A {config.n_layer}-layer language model of {parameters:,} parameters with {kinds} attention, trained by the reference
implementation of Gaussian Kernel Attention (arXiv 2605.02144). It continues text. It was not taught to follow
instructions, and nothing was done to keep it from writing what is wrong or offensive.

| | |
|---|---|
| attention, layer by layer | {layer_kinds} |
| form of the attention | {form} |
| sigma (bandwidth), smallest and largest of each layer | {ranges} |
| width, heads, channels per head | {config.n_embd}, {config.n_head}, {config.head_dim} |
| context, vocabulary | {config.sequence_len:,} tokens, {config.vocab_size:,} |
| training tokens | {training[tokens]:,} ({step:,} of {training[steps]:,} steps) |
| training text | {source} |
| trained at commit | {training[commit]} |
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


@dataclass
class ExportConfig:
    """Write a trained language model as safetensors, with its configuration, tokenizer and a README."""

    run: Path
    """Run folder, or one checkpoint folder in it."""
    out: Path
    """Folder to write to."""
    step: int = -1
    """Checkpoint to take; -1 = the newest."""
    onnx: bool = False
    """Also write model.onnx, for onnxruntime and other programs: tokens and a cache in, logits and the cache out."""


def card(about: dict[str, Any], folder: Path) -> str:
    """The README of the model exported to `folder`; `about` is the content of its config.json."""
    config = GPTConfig(**about["model"])
    training = about["training"]
    ranges = [f"layer {layer}: {min(values):.3g} to {max(values):.3g}" for layer, values in about["sigma"].items()]
    files = training["source"]  # [name, bytes] of each
    megabytes = sum(size for _, size in files) / 1e6
    is_papers = config.form in [kind.label for kind in KINDS.values()]
    words = {
        "kinds": " and ".join(dict.fromkeys(about["attention"])),
        "layer_kinds": ", ".join(about["attention"]),
        "form": config.form + (", as in the paper" if is_papers else " (not the paper's form)"),
        "ranges": "; ".join(ranges) or "none: no GKA layer",
        "source": f"{len(files)} parquet files, {files[0][0]} to {files[-1][0]}, {megabytes:,.1f} MB",
        "digest": about["sha256"]["model.safetensors"],
    }
    return CARD.format(config=config, folder=folder, **about, **words)


def main(config: ExportConfig) -> None:
    if config.onnx:
        require()
    loaded = load(config.run, config.step)
    about = export(loaded, config.out)
    with atomic(config.out / "README.md") as temporary:
        temporary.write_text(card(about, config.out), encoding="utf-8", errors="surrogateescape")
    reader = f'nanochat_gka.model.checkpoints.load("{config.out}")'
    print(f"{config.out}: {about['name']} at step {about['step']:,}; {reader} reads it")
    if config.onnx:
        metadata = {key: about[key] for key in ("name", "step", "checkpoint_sha256", "model")}
        print(f"{size_mb([onnx.write(loaded.model, config.out, metadata)])}: docs/hugging-face.md shows how to use it")


if __name__ == "__main__":
    run(main, ExportConfig)
