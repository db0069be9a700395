"""A trained run as model.safetensors and config.json for timm and transformers, and as ONNX.

    python -m deit_gka.export --run out/runs/deit_tiny_gka_patch16_224 --out gka-ti --onnx --int8

then, anywhere:

    import timm, transformers, deit_gka
    model = timm.create_model("local-dir:gka-ti", pretrained=True)
    model = timm.create_model("deit_tiny_gka_patch16_224", checkpoint_path="gka-ti/model.safetensors")
    classify = transformers.pipeline("image-classification", model="gka-ti")

and without this package: onnxruntime.InferenceSession("gka-ti/model.onnx")
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deit_gka.model import onnx
from deit_gka.model.checkpoints import about_images, export, find_checkpoint, load_run
from deit_gka.model.plain import check_blocks
from trainkit_gka.cli import UserError, run
from trainkit_gka.onnx import require, size_mb


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
    onnx: bool = False
    """Also write model.onnx, for onnxruntime and other programs: images in, logits out, any number of images."""
    int8: bool = False
    """With --onnx: also write model-int8.onnx, a quarter of the size, with matrices in int8."""


def main(config: ExportConfig) -> None:
    if config.int8 and not config.onnx:
        raise UserError("--int8 is for --onnx: give both")
    if config.onnx:
        require()
    checkpoint = find_checkpoint(config.run, config.best)
    if config.onnx:
        vit = load_run(checkpoint, config.weights, "cpu")
        check_blocks(vit)
    file = export(checkpoint, config.weights, config.out)
    model = checkpoint.state["model"]
    print(f"{file}: {config.weights} weights at epoch {checkpoint.state['epoch']:g}; after import deit_gka")
    print(f'timm.create_model("local-dir:{config.out}", pretrained=True) loads it, or')
    print(f'create_model("{model["name"]}", checkpoint_path="{file}", num_classes={model["num_classes"]}, ...)')
    if config.onnx:
        about = {"classes": checkpoint.state["classes"], **about_images(checkpoint.state)}
        files = onnx.write(vit, config.out, about, config.int8)
        print(f"{size_mb(files)}: {onnx.INPUT} in, {onnx.OUTPUT} out; classes and preprocessing are in the metadata")


if __name__ == "__main__":
    run(main, ExportConfig)
