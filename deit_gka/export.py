"""A trained run as model.safetensors and config.json for timm.

    python -m deit_gka.export --run out/runs/deit_tiny_gka_patch16_224 --out gka-ti

then, anywhere:

    import timm, deit_gka
    model = timm.create_model("local-dir:gka-ti", pretrained=True)
    model = timm.create_model("deit_tiny_gka_patch16_224", checkpoint_path="gka-ti/model.safetensors")
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deit_gka.model.checkpoints import export, find_checkpoint
from trainkit.cli import run


@dataclass
class ExportConfig:
    """Write a run's weights as one safetensors file with timm's configuration beside it."""

    run: Path
    """The run's folder, or one checkpoint folder in it."""
    out: Path
    """The folder to write to."""
    weights: Literal["ema", "model"] = "ema"
    """The average or the raw weights."""
    best: bool = False
    """Take the checkpoint with the best accuracy instead of the newest."""


def main(config: ExportConfig) -> None:
    checkpoint = find_checkpoint(config.run, config.best)
    file = export(checkpoint, config.weights, config.out)
    model = checkpoint.state["model"]
    print(f"{file}: {config.weights} weights at epoch {checkpoint.state['epoch']:g}; after import deit_gka")
    print(f'timm.create_model("local-dir:{config.out}", pretrained=True) loads it, or')
    print(f'create_model("{model["name"]}", checkpoint_path="{file}", num_classes={model["num_classes"]}, ...)')


if __name__ == "__main__":
    run(main, ExportConfig)
