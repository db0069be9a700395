"""Subjects of figures: a model from a run or from timm, images, and the model's attention on them.

images = photographs()
subjects = [subject for run in (ours, its_twin) for subject in subjects_of(of_run(run), images)]
figures = FAMILIES["cls_maps"](subjects, folder)  # of families.py
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import resolve_input_data_config
from timm.models import VisionTransformer
from torch import nn

from deit_gka.data.sources import CIFAR10, BrokenImage, DataParts, ImageStream, decode, open_source
from deit_gka.data.transforms import eval_transform
from deit_gka.figures.maps import LayerMaps, Tokens, attention_maps
from deit_gka.model import checkpoints
from trainkit_gka import extras
from trainkit_gka.checkpoint import run_folder
from trainkit_gka.cli import PassingFault, UserError
from trainkit_gka.figures.subjects import AttentionSubject

NUM_IMAGES, STREAMED = 4, 1000  # images that are drawn; of a stream, how many are looked through for them
SEES_PHOTOGRAPHS = 64  # pixels: a model of smaller images makes nothing of a photograph
MOST_PATCHES = 4096  # 1024 × 1024 pixels: W of 12 layers and 12 heads takes 10 GB


@dataclass(frozen=True)
class ImageSubject(AttentionSubject):
    """One model's attention on one image."""

    model: str  # the name of its folder of figures
    about: str  # model and weights, in words
    image: str
    pixels: np.ndarray  # (height, width, 3), 0 to 1
    tokens: Tokens
    layers: list[LayerMaps]  # without their B
    repeats: str = ""  # `about` of the model of the same recipe and another seed


@dataclass
class DrawnModel:
    """A model to draw."""

    name: str
    about: str
    model: nn.Module
    settings: dict[str, Any]  # of eval_transform
    state: dict[str, Any] = field(default_factory=dict)  # of a run: its checkpoint's


def of_run(path: Path, weights: str = "ema", best: bool = False, image_size: Sequence[int] = ()) -> DrawnModel:
    """The model of a run, at its own image size or another.

    path: the run's folder or one checkpoint folder in it. weights: ema, which falls back to the raw ones in a run
    without an average, or model. best: the checkpoint with the best accuracy instead of the newest. Raises UserError.
    """
    checkpoint = checkpoints.find_checkpoint(path, best)
    available = checkpoints.weights_in(checkpoint)
    state = checkpoint.state
    weights = weights if weights in available else available[0]
    name = run_folder(path).name
    trained = f"{'EMA' if weights == 'ema' else 'raw'} weights after {state['epoch']:g} epochs"
    about = f"{name} ({state['model']['name']}), {trained} of {Path(state['trained_on']).name}"
    settings = checkpoints.eval_settings(checkpoints.about_images(state))
    model = checkpoints.load_run(checkpoint, weights)
    return _at_size(DrawnModel(name, about, model, settings, state), image_size)


def of_timm(
    name: str,
    kwargs: Sequence[str] = (),
    checkpoint: Path | None = None,
    pretrained: bool = False,
    image_size: Sequence[int] = (),
) -> DrawnModel:
    """A timm model with the weights of a file, with timm's own, or with random ones. kwargs: KEY=VALUE each.

    Raises UserError.
    """
    torch.manual_seed(0)
    model = checkpoints.timm_model(name, kwargs, checkpoint, pretrained)
    source = checkpoint.name if checkpoint else "timm" if pretrained else "random"
    words = "random initialisation (seed 0)" if source == "random" else f"weights: {source}"
    label = " ".join([name, *kwargs])
    folder = re.sub(r"[^\w.=-]+", "_", f"{label} {Path(source).stem}")
    settings = checkpoints.eval_settings(resolve_input_data_config(model))
    return _at_size(DrawnModel(folder, f"{label}, {words}", model, settings), image_size)


def _at_size(drawn: DrawnModel, image_size: Sequence[int]) -> DrawnModel:
    """The model, changed to take images of `image_size` if there is one: a side, or height and width."""
    if not isinstance(drawn.model, VisionTransformer):
        raise UserError(f"{drawn.about} is not a vision transformer of timm's: it has no W to draw")
    if image_size:
        size = (tuple(image_size) * 2)[:2]
        patch = drawn.model.patch_embed.patch_size
        if size[0] % patch[0] or size[1] % patch[1]:
            raise UserError(f"--image-size must be multiples of the patch, {patch[0]} × {patch[1]}")
        if size[0] // patch[0] * (size[1] // patch[1]) > MOST_PATCHES:
            raise UserError(f"--image-size gives more than {MOST_PATCHES:,} patches: W would not fit into memory")
        drawn.model.set_input_size(img_size=size)
    return drawn


def check_repeats(drawn: DrawnModel, first: DrawnModel) -> None:
    """Raises UserError unless the runs differ in their seeds alone."""
    if not first.state:
        raise UserError("--seeds goes with --run: a model without a run has no recipe to repeat")
    recipe, wanted = drawn.state["train_config"], first.state["train_config"]
    differ = [name for name in sorted(recipe.keys() | wanted.keys()) if recipe.get(name) != wanted.get(name)]
    if names := ", ".join(name for name in differ if name != "seed"):
        raise UserError(f"--seeds takes runs of one recipe: {drawn.name} and {first.name} differ in {names}")


def photographs(paths: Sequence[Path] = ()) -> dict[str, Image.Image]:
    """Images by name, upright; without paths the two of scikit-learn. Raises UserError for files that are broken."""
    if not paths:
        if reason := extras.missing("vision", "sklearn"):
            raise UserError(f"scikit-learn's photographs, drawn without --image: {reason}")
        from sklearn.datasets import load_sample_images

        bundled = load_sample_images()
        return {Path(name).stem: Image.fromarray(image) for name, image in zip(bundled.filenames, bundled.images)}
    images: dict[str, Image.Image] = {}
    for path in paths:
        if path.stem in images:
            raise UserError(f"two images are called {path.stem}: their figures would have the same names")
        try:
            images[path.stem] = decode(path.read_bytes(), upright=True)
        except BrokenImage as error:
            raise UserError(f"{path} cannot be drawn: {error}") from None
    return images


def images_for(drawn: DrawnModel, network: bool = True) -> dict[str, Image.Image]:
    """Images to draw a model on: held-out images of its run's data, else photographs.

    network: whether a dataset of the hub may be opened. Raises UserError for a run whose images are not here, or a timm
    model of small images: photographs are only for a model that can see them.
    """
    why = f"{drawn.name} sees small images"
    if drawn.state:
        try:
            if images := _held_out_images(drawn.state, network):
                return images
            why = f"{drawn.name} has no held-out images"
        except (UserError, PassingFault) as error:
            why = f"the images that {drawn.name} was trained on cannot be read ({error})"
    if min(drawn.model.patch_embed.img_size) >= SEES_PHOTOGRAPHS:
        return photographs()
    raise UserError(f"{why}, and photographs would tell it nothing: give some of its kind with --image")


def _held_out_images(state: dict[str, Any], network: bool) -> dict[str, Image.Image]:
    """The first held-out image of each of the first classes that a run was trained on, by data and class.

    Raises UserError or PassingFault if these images are not here.
    """
    data = state["trained_on"]
    if (data == CIFAR10 or data.startswith(("hf:", "hf-stream:"))) and not network:
        raise UserError(f"{data} would need the network")
    source = open_source(data, "val", DataParts(**state["parts"]))
    stream = isinstance(source, ImageStream)
    records = islice(source.records(0, 0, 1), STREAMED) if stream else map(source.read, range(len(source)))
    data, images = re.split(r"[/:]", source.name.rstrip("/"))[-1], {}
    for image, label, _ in records:
        name = f"{data} {source.classes[label]}"
        if name not in images:
            with contextlib.suppress(BrokenImage):  # the next of its class is drawn
                images[name] = decode(image, upright=True)
        if len(images) == min(NUM_IMAGES, len(source.classes)):
            break
    return images


def subjects_of(drawn: DrawnModel, images: dict[str, Image.Image], repeats: str = "") -> list[ImageSubject]:
    """The model's attention on each of the images, from one forward pass of all of them.

    repeats: `about` of another model of which this is another seed. It then counts in that model's mean and range and
    is not drawn by itself. Raises UserError for attention whose W cannot be computed again.
    """
    model = drawn.model
    transform = eval_transform(model.patch_embed.img_size, **drawn.settings)
    batch = torch.stack([transform(image) for image in images.values()])
    mean, std = (torch.tensor(drawn.settings[name]) for name in ("mean", "std"))
    pixels = np.asarray((batch.movedim(1, -1) * std + mean).clamp(0, 1))
    maps = attention_maps(model, batch)
    tokens = Tokens.of(model)

    about = dict(model=drawn.name, about=drawn.about, tokens=tokens, repeats=repeats)
    return [
        ImageSubject(image=name, pixels=pixels[i], layers=[layer.of_image(i) for layer in maps], **about)
        for i, name in enumerate(images)
    ]
