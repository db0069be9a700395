"""One update and one evaluation: mix, forward, loss, backward; top-1 and top-5."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup, mixup_target
from torch.nn.parallel import DistributedDataParallel

from deit_gka.data.batch import ImageBatch
from deit_gka.data.order import BatchPiece
from deit_gka.data.seeds import seed_of
from deit_gka.model.attention import attention_layers
from deit_gka.recipe import Recipe
from deit_gka.training.distillation import Objective
from gka import bandwidth_warnings
from trainkit_gka.cli import UserError
from trainkit_gka.compiling import OFF
from trainkit_gka.distributed import Runtime, Stop


def autocast(device: torch.device, amp: str):
    """The recipe's arithmetic: bfloat16 or float16 autocast, or float32."""
    amp = ("bfloat16" if device.type == "cuda" else "float32") if amp == "auto" else amp
    if amp == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, amp))


class Mixer:
    """Mixup, CutMix and label smoothing by timm, with one draw for each group of the update.

    The draw is the same whichever processes the group's images are on.
    """

    def __init__(self, recipe: Recipe, num_classes: int):
        self.recipe, self.num_classes = recipe, num_classes
        self.mixup = None
        if recipe.mixup or recipe.cutmix:
            self.mixup = Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.smoothing, num_classes=num_classes)

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
    model,
    pieces: list[BatchPiece],
    next_batch: Callable[[int], ImageBatch],
    mixer: Mixer,
    step: int,
    runtime: Runtime,
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
    objective: Objective | None = None,
) -> torch.Tensor:
    """Run this process's pieces of update `step` forward and backward. Returns its part of the batch's mean loss.

    If `model` is a DistributedDataParallel, the last backward averages over processes. next_batch: called with a
    piece's number of images. objective: the loss; None = the recipe's without a teacher. Stochastic depth
    is seeded by update, piece and process, so that a resumed run draws the same.
    """
    recipe, total = mixer.recipe, torch.zeros((), device=runtime.device)
    objective = objective or Objective(recipe)
    for number, piece in enumerate(pieces):
        batch = next_batch(len(piece.places))
        images, labels = (tensor.to(runtime.device, non_blocking=True) for tensor in (batch.images, batch.labels))
        images, targets = mixer(images, labels, piece.parts, step)
        seed_device(seed_of(recipe.seed, "model", step, number, runtime.rank), runtime.device)
        no_sync = getattr(model, "no_sync", None) if number < len(pieces) - 1 else None
        with no_sync() if no_sync else contextlib.nullcontext():
            with autocast(runtime.device, recipe.amp):
                loss = objective(images, model(images), targets) * (len(images) / recipe.batch_size)
            # DDP takes the mean over processes where the batch's mean needs their sum.
            scale(loss * runtime.world_size).backward()
        total += loss.detach()
    return total


def compiled_and_joined(model: torch.nn.Module, mode: str, runtime: Runtime) -> torch.nn.Module:
    """`model`, compiled in torch's `mode` or "off", and with its gradients averaged over processes if there are any.

    The weights are the model's own. A collective.
    """
    device = runtime.device
    network = model if mode == OFF else torch.compile(model, mode=mode, dynamic=False)
    if runtime.world_size == 1:
        return network
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(network, device_ids=ids, gradient_as_bucket_view=True)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generator of stochastic depth."""
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(seed)


@torch.inference_mode()
def evaluate(
    models: dict[str, torch.nn.Module],
    loader: Iterable[ImageBatch],
    runtime: Runtime,
    amp: str = "auto",
    advance: Callable[[ImageBatch], None] = lambda batch: None,
    stop: Stop | None = None,
) -> dict[str, dict[str, float]]:
    """Accuracy and cross entropy of every model over the images of all processes, each counted once, in one pass.

    models: left in evaluation mode. advance: called after every batch. Returns, by name, top1 and top5 (percent), loss,
    images, broken (left out). Raises UserError if every image is left out, Interrupted if `stop` is set meanwhile.
    """
    # Right at 1, right at 5, loss, images, broken
    sums = torch.zeros(len(models), 5, dtype=torch.float64, device=runtime.device)
    for batch in runtime.rounds(loader, stop):
        sums[:, 4] += len(batch.broken)
        if len(batch.images):
            images, labels = (tensor.to(runtime.device, non_blocking=True) for tensor in (batch.images, batch.labels))
            for place, model in enumerate(models.values()):
                with autocast(runtime.device, amp):
                    logits = model.eval()(images)
                best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
                loss = F.cross_entropy(logits.float(), labels, reduction="sum")
                count = torch.tensor(len(labels), device=loss.device)
                sums[place, :4] += torch.stack([best[:, 0].sum(), best.sum(), loss, count]).double()
        advance(batch)
    results = {}
    for name, (top1, top5, loss, count, broken) in zip(models, runtime.sum(sums).tolist()):
        if not count:
            raise UserError("there is no readable image to evaluate on")
        accuracy = {"top1": 100 * top1 / count, "top5": 100 * top5 / count, "loss": loss / count}
        results[name] = {**accuracy, "images": int(count), "broken": int(broken)}
    return results


def bandwidths(model) -> Iterator[tuple[int, list[float]]]:
    """(layer, learned sigma of its heads) for every GKA layer of a timm model, numbered among its attention layers."""
    for layer, attention in enumerate(attention_layers(model)):
        log_sigma = getattr(attention, "log_sigma", None)
        if log_sigma is not None:
            yield layer, log_sigma.detach().exp().tolist()


def wrong_bandwidths(model) -> dict[str, str]:
    """`gka.bandwidth_warnings` of all GKA layers of a timm model, numbered as by `bandwidths`."""
    layers, warnings = attention_layers(model), {}
    for layer, sigma in bandwidths(model):
        warnings |= bandwidth_warnings(layer, sigma, layers[layer].head_dim, "--lr")
    return warnings
