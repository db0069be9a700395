"""A trained model as a folder that stands alone: weights, configuration, tokenizer and a README that says what it is.

    python -m nanochat_gka.export --run out/runs/d20-gka --out d20-gka

then, anywhere with this package:

    from nanochat_gka.model.checkpoints import load
    loaded = load("d20-gka")          # .model, .tokenizer, .training
"""

from dataclasses import dataclass
from pathlib import Path

from nanochat_gka.model import onnx
from nanochat_gka.model.card import card
from nanochat_gka.model.checkpoints import export, load
from trainkit_gka.cli import run
from trainkit_gka.files import atomic
from trainkit_gka.onnx import require, size_mb


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


def main(config: ExportConfig) -> None:
    if config.onnx:
        require()
    loaded = load(config.run, config.step)
    if config.onnx:
        onnx.check_form(loaded.model)
    about = export(loaded, config.out)
    with atomic(config.out / "README.md") as temporary:
        temporary.write_text(card(about, config.out))
    reader = f'nanochat_gka.model.checkpoints.load("{config.out}")'
    print(f"{config.out}: {about['name']} at step {about['step']:,}; {reader} reads it")
    if config.onnx:
        metadata = {key: about[key] for key in ("name", "step", "checkpoint_sha256", "model")}
        print(f"{size_mb([onnx.write(loaded.model, config.out, metadata)])}: docs/hugging-face.md shows how to use it")


if __name__ == "__main__":
    run(main, ExportConfig)
