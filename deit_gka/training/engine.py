"""One update and one evaluation: mix, forward, loss, backward; top-1 and top-5."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup, mixup_target
from torch import nn

from deit_gka.data.batch import ImageBatch
from deit_gka.data.order import BatchPiece
from deit_gka.data.seeds import seed_of
from deit_gka.model.attention import attention_layers
from deit_gka.recipe import Recipe
from deit_gka.training.distillation import Objective
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime, Stop


def autocast(device: torch.device, amp: str):
    """The recipe's arithmetic: bfloat16 or float16 autocast, or float32."""
    amp = ("bfloat16" if device.type == "cuda" else "float32") if amp == "auto" else amp
    return contextlib.nullcontext() if amp == "float32" else torch.autocast(device.type, getattr(torch, amp))


class Mixer:
    """Mixup, CutMix and label smoothing by timm, with one draw for each group of the update, on any processes."""

    def __init__(self, recipe: Recipe, num_classes: int):
        self.recipe, self.num_classes = recipe, num_classes
        mixes = recipe.mixup or recipe.cutmix
        arguments = dict(label_smoothing=recipe.smoothing, num_classes=num_classes)
        self.mixup = Mixup(recipe.mixup, recipe.cutmix, **arguments) if mixes else None

    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor, parts: list[tuple[int, int]], step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """images (n, 3, S, S), changed in place; labels (n,). Returns them with soft targets (n, classes)."""
        if self.mixup is None:
            return images, mixup_target(labels, self.num_classes, smoothing=self.recipe.smoothing)
        targets, begin = [], 0
        for group, length in parts:
            np.random.seed(seed_of(self.recipe.seed, "mix", step, group) % 2**32)
            part = slice(begin, begin + length)
            targets.append(self.mixup(images[part], labels[part])[1])
            begin += length
        return images, torch.cat(targets)


def accumulate_gradients(
    model: nn.Module,
    pieces: list[BatchPiece],
    next_batch: Callable[[int], ImageBatch],
    mixer: Mixer,
    step: int,
    runtime: Runtime,
    scale: Callable[[torch.Tensor], torch.Tensor],
    objective: Objective,
) -> torch.Tensor:
    """Run this process's pieces of update `step` forward and backward. Returns its part of the batch's mean loss.

    If `model` is a DistributedDataParallel, the last backward averages over processes. next_batch: called with a
    piece's number of images. scale: of the loss, for float16. Stochastic depth is seeded by update, piece and process.
    """
    recipe = mixer.recipe
    device = runtime.device
    total = torch.zeros((), device=runtime.device)
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    for number, piece in enumerate(pieces):
        batch = next_batch(len(piece.places))
        images, labels = (tensor.to(device, non_blocking=True) for tensor in (batch.images, batch.labels))
        images, targets = mixer(images, labels, piece.parts, step)
        generator.manual_seed(seed_of(recipe.seed, "model", step, number, runtime.rank))  # of stochastic depth
        no_sync = getattr(model, "no_sync", None) if number < len(pieces) - 1 else None
        with no_sync() if no_sync else contextlib.nullcontext():
            with autocast(device, recipe.amp):
                loss = objective(images, model(images), targets) * (len(images) / recipe.batch_size)
            # DDP takes the mean over processes where the batch's mean needs their sum.
            scale(loss * runtime.world_size).backward()
        total += loss.detach()
    return total


@torch.inference_mode()
def evaluate(
    models: dict[str, nn.Module],
    loader: Iterable[ImageBatch],
    runtime: Runtime,
    amp: str = "auto",
    advance: Callable[[ImageBatch], None] = lambda batch: None,
    stop: Stop | None = None,
    timed: bool = False,
) -> dict[str, dict[str, float | None]]:
    """Accuracy and cross entropy of every model over the images of all processes, each counted once, in one pass.

    models: left in evaluation mode. advance: called after every batch. Returns, by name, top1 and top5 (percent), loss,
    images, broken (left out). timed: also images_per_second of the model's forward passes alone, on all processes, each
    without its first batch (None if there is no other), and loading, the seconds in which workers made the batches.
    Raises UserError if every image is left out, Interrupted if `stop` is set meanwhile.
    """
    # Right at 1, right at 5, loss, images, broken; images and seconds that are timed; seconds of loading
    sums = torch.zeros(len(models), 8, dtype=torch.float64, device=runtime.device)
    warm = False
    for batch in runtime.rounds(loader, stop):
        sums[:, 4] += len(batch.broken)
        sums[:, 7] += batch.seconds
        if len(batch.images):
            images, labels = (tensor.to(runtime.device, non_blocking=True) for tensor in (batch.images, batch.labels))
            for place, model in enumerate(models.values()):
                started = _now(runtime.device) if timed else 0.0
                with autocast(runtime.device, amp):
                    logits = model.eval()(images)
                if timed and warm:
                    sums[place, 5] += len(images)
                    sums[place, 6] += _now(runtime.device) - started
                best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
                loss = F.cross_entropy(logits.float(), labels, reduction="sum")
                count = torch.tensor(len(labels), device=loss.device)
                sums[place, :4] += torch.stack([best[:, 0].sum(), best.sum(), loss, count]).double()
            warm = True
        advance(batch)
    results = {}
    for name, (top1, top5, loss, count, broken, images, seconds, loading) in zip(models, runtime.sum(sums).tolist()):
        if not count:
            raise UserError("there is no readable image to evaluate on")
        accuracy = {"top1": 100 * top1 / count, "top5": 100 * top5 / count, "loss": loss / count}
        results[name] = {**accuracy, "images": int(count), "broken": int(broken)}
        if timed:
            speed = runtime.world_size * images / seconds if seconds else None
            results[name] |= {"images_per_second": speed, "loading": loading}
    return results


def _now(device: torch.device) -> float:
    """The time in seconds at which the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bandwidths(model: nn.Module) -> Iterator[tuple[int, nn.Module, list[float]]]:
    """(number among the attention layers, layer, learned sigma of its heads) for every GKA layer of a timm model."""
    for number, layer in enumerate(attention_layers(model)):
        if (log_sigma := getattr(layer, "log_sigma", None)) is not None:
            yield number, layer, log_sigma.detach().exp().tolist()
