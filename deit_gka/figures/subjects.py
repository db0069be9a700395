"""Subjects of figures: a model from a run or from timm, images, and the model's attention on them.

images = photographs()
subjects = [subject for run in (ours, its_twin) for subject in subjects_of(of_run(run), images)]
figures = FAMILIES["cls_maps"](subjects, folder)  # of families.py
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    ImageNetInfo,
    infer_imagenet_subset,
    resolve_input_data_config,
)
from timm.models import VisionTransformer
from torch import nn

from deit_gka.data.sources import BrokenImage, DataParts, ImageStream, decode, open_source
from deit_gka.data.transforms import eval_transform
from deit_gka.figures.maps import LayerMaps, attention_maps
from deit_gka.figures.measures import Tokens
from deit_gka.model.checkpoints import (
    about_images,
    build,
    eval_settings,
    find_checkpoint,
    load_file,
    load_run,
    parse_kwargs,
    timm_weights,
    weights_in,
)
from gka import KINDS
from trainkit_gka import extras
from trainkit_gka.cli import PassingFault, UserError
from trainkit_gka.figures.measures import by_head
from trainkit_gka.plots import BLUE

NUM_IMAGES, STREAMED = 4, 1000  # images that are drawn; of a stream, how many are looked through for them
SEES_PHOTOGRAPHS = 64  # pixels: a model of smaller images makes nothing of a photograph
HYBRID = BLUE  # the colour of a model whose layers are of several kinds
MOST_PATCHES = 4096  # 1024 × 1024 pixels: W of 12 layers and 12 heads takes 10 GB


@dataclass(frozen=True)
class ImageSubject:
    """One model's attention on one image."""

    model: str  # the name of its folder of figures
    about: str  # model and weights, in words
    image: str
    pixels: np.ndarray  # (height, width, 3), 0 to 1
    tokens: Tokens
    layers: list[LayerMaps]  # without their B
    probabilities: Callable[[torch.Tensor], torch.Tensor]  # pixels (B, height, width, 3) -> (B, classes)
    classes: list[str] = field(default_factory=list)  # their names; empty if nobody knows them
    repeats: str = ""  # `about` of the model of the same recipe and another seed

    @property
    def num_heads(self) -> int:
        return max(len(layer.weights) for layer in self.layers)

    @property
    def has_sigma(self) -> bool:
        return any(layer.sigma is not None for layer in self.layers)

    @property
    def sigmas(self) -> np.ndarray:
        """The bandwidths, (L, H); NaN in layers without."""
        return by_head([layer.sigma for layer in self.layers], self.num_heads)

    @property
    def colour(self) -> str:
        """Of the model's lines among those of other models."""
        kinds = {layer.kind for layer in self.layers}
        return KINDS[kinds.pop()].colour if len(kinds) == 1 else HYBRID

    def file(self, folder: Path, family: str) -> Path:
        """Where a figure of this image goes."""
        return folder / f"{family}-{self.image}.png"

    def caption(self, *sentences: str) -> str:
        """Model, weights, image and tokens, then the sentences."""
        height, width = self.pixels.shape[:2]
        (rows, columns), prefix = self.tokens.grid, self.tokens.prefix
        tokens = f"{self.tokens.count} tokens: {rows} × {columns} patches and {prefix} before them"
        return " ".join([f"{self.about}. Image {self.image}, {height} × {width} pixels; {tokens}.", *sentences])


@dataclass
class DrawnModel:
    """A model to draw."""

    name: str
    about: str
    model: nn.Module
    settings: dict[str, Any]  # of eval_transform
    recipe: dict[str, Any] = field(default_factory=dict)  # of a run: all that it was trained with
    classes: list[str] = field(default_factory=list)  # their names; empty if nobody knows them


def of_run(path: Path, weights: str = "ema", best: bool = False, image_size: Sequence[int] = ()) -> DrawnModel:
    """The model of a run, at its own image size or another.

    path: the run's folder or one checkpoint folder in it. weights: ema, which falls back to the raw ones in a run
    without an average, or model. best: the checkpoint with the best accuracy instead of the newest. Raises UserError.
    """
    checkpoint = find_checkpoint(path, best)
    weights = weights if weights in weights_in(checkpoint) else weights_in(checkpoint)[0]
    state, recipe, folder = checkpoint.state, checkpoint.state["train_config"], path.resolve()
    name = folder.parents[1].name if (folder / "manifest.json").exists() else folder.name
    data = Path(state["trained_on"]).name
    kind = {"ema": "EMA", "model": "raw"}[weights]
    about = f"{name} ({state['model']['name']}), {kind} weights after {state['epoch']:g} epochs of {data}"
    model, settings = load_run(checkpoint, weights, "cpu"), eval_settings(about_images(state))
    return _at_size(DrawnModel(name, about, model, settings, recipe, state["classes"]), image_size)


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
    parsed = parse_kwargs(kwargs)
    torch.manual_seed(0)
    if pretrained:
        timm_weights(name, "--model")  # says why there are none
    model = build(name, pretrained=pretrained, **parsed).eval()
    if checkpoint is not None:
        load_file(checkpoint, model)
    source = checkpoint.name if checkpoint else "timm" if pretrained else "random"
    words = "random initialisation (seed 0)" if source == "random" else f"weights: {source}"
    settings = eval_settings(resolve_input_data_config(model))
    label = " ".join([name, *kwargs])
    folder = re.sub(r"[^\w.=-]+", "_", f"{label} {Path(source).stem}")
    subset = infer_imagenet_subset(model)
    classes = ImageNetInfo(subset).label_descriptions() if subset else []
    return _at_size(DrawnModel(folder, f"{label}, {words}", model, settings, classes=classes), image_size)


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
    names = drawn.recipe.keys() | first.recipe.keys()
    differ = sorted(name for name in names - {"seed"} if drawn.recipe.get(name) != first.recipe.get(name))
    if not first.recipe:
        raise UserError("--seeds goes with --run: a model without a run has no recipe to repeat")
    if differ:
        raise UserError(
            f"--seeds takes runs of one recipe: {drawn.name} and {first.name} differ in {', '.join(differ)}"
        )


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


def images_for(drawn: DrawnModel, run: Path | None, network: bool = True) -> dict[str, Image.Image]:
    """Images to draw a model on: held-out images of the run's data, else photographs.

    run: its folder, None for a timm model. network: see `held_out_images`. Raises UserError for a run whose images are
    not here, or a timm model of small images: photographs are only for a model that can see them.
    """
    why = f"{drawn.name} sees small images"
    if run:
        try:
            if images := held_out_images(run, network):
                return images
            why = f"{drawn.name} has no held-out images"
        except (UserError, PassingFault) as error:
            why = f"the images that {drawn.name} was trained on cannot be read ({error})"
    if min(drawn.model.patch_embed.img_size) >= SEES_PHOTOGRAPHS:
        return photographs()
    raise UserError(f"{why}, and photographs would tell it nothing: give some of its kind with --image")


def held_out_images(run: Path, network: bool = True) -> dict[str, Image.Image]:
    """The first held-out image of each of the first classes that a run was trained on, by data and class.

    network: whether a dataset of the hub may be opened. Raises UserError or PassingFault if these images are not here.
    """
    state = find_checkpoint(run).state
    data = state["trained_on"]
    if data.startswith(("hf:", "hf-stream:")) and not network:
        raise UserError(f"{data} would need the network")
    source = open_source(data, "val", DataParts(**state["parts"]))
    stream = isinstance(source, ImageStream)
    records = islice(source.records(0, 0, 1), STREAMED) if stream else map(source.read, range(len(source)))
    data, images = re.split(r"[/:]", source.name.rstrip("/"))[-1], {}
    for image, label, _ in records:
        name = f"{data} {source.classes[label]}"
        if name not in images:
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
    mean, std = (torch.tensor(drawn.settings.get(name, default)) for name, default in
                 (("mean", IMAGENET_DEFAULT_MEAN), ("std", IMAGENET_DEFAULT_STD)))  # fmt: skip
    pixels = np.asarray((batch.movedim(1, -1) * std + mean).clamp(0, 1))
    layers, tokens = attention_maps(model, batch), Tokens.of(model)

    @torch.inference_mode()
    def probabilities(images: torch.Tensor) -> torch.Tensor:
        return model(((images - mean) / std).movedim(-1, 1)).softmax(-1)

    return [
        ImageSubject(drawn.name, drawn.about, name, pixels[i], tokens, [layer.of_image(i) for layer in layers],
                probabilities, drawn.classes, repeats)
        for i, name in enumerate(images)
    ]  # fmt: skip
