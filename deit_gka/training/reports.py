"""The lines that a vision run prints."""

from typing import Any

import torch
from torch import nn

from deit_gka.model.accounting import cost_of
from deit_gka.training.config import TrainConfig
from deit_gka.training.images import RunImages
from trainkit_gka.distributed import Runtime
from trainkit_gka.progress import rate

EVAL_KEYS = ("epoch", "images", "broken")  # of the record of a complete evaluation, beside its metric
ACCURACY_KEYS = ("top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss", "images", "broken")


def opening_lines(
    config: TrainConfig, runtime: Runtime, model: nn.Module, images: RunImages, operators: list[str]
) -> list[str]:
    """The lines before the first update: model, images, schedule and operators."""
    parameters, cost = sum(parameter.numel() for parameter in model.parameters()), cost_of(model)
    flops = f", {cost.flops / 1e9:.4g} GFLOPs an image" if cost else ""
    attention = f", attention {config.attention}" if config.attention else ""
    counts = f"{len(images.train_set):,} training and {len(images.val_set):,} validation images"
    order = images.order
    updates = f"{order.steps_per_epoch:,} updates of {config.batch_size:,} images"
    pieces = f"{len(order.pieces)} x {len(order.pieces[0].places)} images each"
    rate = f"peak learning rate {config.scaled_lr:.4g}"
    lines = [
        f"{config.model}{attention}: {parameters:,} parameters{flops}",
        f"{config.data}: {counts} in {len(images.classes)} classes",
        f"{config.epochs} epochs of {updates}: {runtime.world_size} x {runtime.device.type}, {pieces}; {rate}; "
        f"{images.num_workers} loading workers each",
    ]
    if operators:
        lines.append(f"Gaussian kernel attention by {', '.join(operators)}")
    on_gpu = runtime.device.type == "cuda"
    if config.amp in ("auto", "bfloat16") and on_gpu and torch.cuda.get_device_capability(runtime.device) < (8, 0):
        lines.append("note: this GPU has no instructions for bfloat16 (it is older than the A100); try --amp float16")
    if config.repeated_aug > 1:
        versions = f"{config.repeated_aug} versions each of a 1/{config.repeated_aug} of the images"
        lines.append(f"repeated augmentation: an epoch draws {versions}")
    return lines


def accuracy_text(values: dict[str, Any]) -> str:
    """Accuracy and loss of the raw weights and, in the same order, of the average; and how many images are broken."""
    text = f"top-1 {values['top1']:.2f} top-5 {values['top5']:.2f} loss {values['loss']:.3f}"
    if "ema_top1" in values:
        text += f" | EMA {values['ema_top1']:.2f} {values['ema_top5']:.2f} {values['ema_loss']:.3f}"
    return text + (f" | on {values['images']:,} images, {values['broken']} more are broken" if values["broken"] else "")


def epoch_text(values: dict[str, Any], speed: dict[str, float | None], sigma: dict[str, list[float]]) -> str:
    """Accuracy and loss, how far the bandwidths spread, and the speed, in 130 columns; the rest is in log.jsonl."""
    heads = [value for layer in sigma.values() for value in layer]
    text = accuracy_text(values) + (f" | sigma {min(heads):.2f}-{max(heads):.2f}" if heads else "")
    return text + (f" | {rate(speed['images_per_second'], 'img/s')}" if speed["images_per_second"] else "")
