"""A vision transformer as ONNX: images in, logits out, with class names and preprocessing in the file's metadata."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from deit_gka.model.plain import plain
from trainkit_gka import onnx
from trainkit_gka.progress import console

MOST_IMAGES = 4096  # of a batch, for the exporter; runtimes do not check it
INPUT, OUTPUT = "images", "logits"


@torch.no_grad()
def write(model: nn.Module, folder: Path, about: dict[str, Any], int8: bool = False) -> list[Path]:
    """Write model.onnx to `folder`, and model-int8.onnx with `int8`; returns the files.

    images (B, 3, height, width) float32, normalised as `about` says, become logits (B, classes) float32, for every B.
    Height and width are free, in whole patches, where the model takes other sizes (timm's dynamic_img_size) and has no
    learned positions to fit to them; else they are the model's. about: see `checkpoints.about_images`.
    Raises UserError for a model that has no plain form (`plain.plain`), if onnx is not installed, or if the file does
    not compute what the model does; it is deleted then.
    """
    onnx.require()
    simple = plain(model.cpu().float())
    images = torch.randn(2, *about["input_size"])
    shapes: dict[int, Any] = {0: Dim("batch", min=1, max=MOST_IMAGES)}
    if takes_any_size(model):
        patch = model.patch_embed.patch_size
        for axis, name in ((2, "rows"), (3, "columns")):
            shapes[axis] = patch[axis - 2] * Dim(name, min=2, max=512)
    path = folder / onnx.MODEL
    onnx.write(simple, (images,), path, ([INPUT], [OUTPUT]), (shapes,), about)
    expected = model(images)
    onnx.check(path, expected, images)
    if not int8:
        return [path]
    rounded = folder / onnx.INT8_MODEL
    onnx.quantise(path, rounded)
    error = onnx.check(rounded, expected, images)
    console.print(f"int8 moves the logits of random images by {error:.1%}", highlight=False)
    return [path, rounded]


def takes_any_size(model: nn.Module) -> bool:
    """Whether no weight of the model belongs to one image size."""
    return model.pos_embed is None and not model.patch_embed.strict_img_size
