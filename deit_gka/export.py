"""A trained run as model.safetensors and config.json for timm and transformers, and as ONNX.

python -m deit_gka.export --run out/runs/deit_tiny_gka_patch16_224 --out gka-ti --onnx --int8

docs/hugging-face.md has the lines that load each of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.export import Dim

from deit_gka.model.checkpoints import about_images, export, find_checkpoint, load_run
from deit_gka.model.plain import check_blocks, plain
from trainkit_gka import onnx
from trainkit_gka.cli import UserError, run
from trainkit_gka.progress import console

MOST_IMAGES = 4096  # of a batch, for the exporter; runtimes do not check it
INPUT, OUTPUT = "images", "logits"


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


@torch.no_grad()
def write_onnx(model: nn.Module, folder: Path, about: dict[str, Any], int8: bool = False) -> list[Path]:
    """Write model.onnx to `folder`, and model-int8.onnx with `int8`; returns the files.

    images (B, 3, height, width) float32, normalised as `about` says (see `checkpoints.about_images`), become logits
    (B, classes) float32, for every B. Height and width are free, in whole patches, where the model takes other sizes
    (timm's dynamic_img_size) and has no learned positions to fit to them; else they are the model's. Raises UserError
    as `plain.plain`, without onnx, and if the file does not compute what the model does; it is deleted then.
    """
    onnx.require()
    images = torch.randn(2, *about["input_size"])
    shapes: dict[int, Any] = {0: Dim("batch", min=1, max=MOST_IMAGES)}
    if model.pos_embed is None and not model.patch_embed.strict_img_size:
        rows, columns = model.patch_embed.patch_size
        shapes |= {2: rows * Dim("rows", min=2, max=512), 3: columns * Dim("columns", min=2, max=512)}
    files = [folder / onnx.MODEL]
    onnx.write(plain(model.cpu().float()), (images,), files[0], ([INPUT], [OUTPUT]), (shapes,), about)
    expected = model(images)
    onnx.check(files[0], expected, images)
    if int8:
        files.append(folder / onnx.INT8_MODEL)
        onnx.quantise(*files)
        error = onnx.check(files[1], expected, images)
        console.print(f"int8 moves the logits of random images by {error:.1%}", highlight=False)
    return files


def main(config: ExportConfig) -> None:
    if config.int8 and not config.onnx:
        raise UserError("--int8 is for --onnx: give both")
    if config.onnx:
        onnx.require()
    checkpoint = find_checkpoint(config.run, config.best)
    if config.onnx:
        vit = load_run(checkpoint, config.weights)
        check_blocks(vit)
    file = export(checkpoint, config.weights, config.out)
    model = checkpoint.state["model"]
    print(f"{file}: {config.weights} weights at epoch {checkpoint.state['epoch']:g}; after import deit_gka")
    print(f'timm.create_model("local-dir:{config.out}", pretrained=True) loads it, or')
    print(f'create_model("{model["name"]}", checkpoint_path="{file}", num_classes={model["num_classes"]}, ...)')
    if config.onnx:
        about = {"classes": checkpoint.state["classes"], **about_images(checkpoint.state)}
        sizes = onnx.size_mb(write_onnx(vit, config.out, about, config.int8))
        print(f"{sizes}: {INPUT} in, {OUTPUT} out; classes and preprocessing are in the metadata")


if __name__ == "__main__":
    run(main, ExportConfig)
