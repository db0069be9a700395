"""The paper's figures of vision transformers, drawn from a trained run or from a model that is not trained yet.

    python -m deit_gka.draw --run out/runs/deit_tiny_gka_patch16_224 --image cat.jpg
    python -m deit_gka.draw --model deit_tiny_gka_patch16_224

Writes OUT/<model>/<family>.png, or <family>-<image>.png for what is about one image, and a PDF beside each.
"""

import functools
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, resolve_input_data_config
from timm.models import VisionTransformer
from torch import nn

from deit_gka.data.transforms import eval_transform
from deit_gka.figures.bandwidths import draw_bandwidths
from deit_gka.figures.cls_attention import draw_cls_maps
from deit_gka.figures.evolution import draw_evolution
from deit_gka.figures.explanation import draw_block, draw_operator
from deit_gka.figures.maps import extract
from deit_gka.figures.matrices import draw_matrices
from deit_gka.figures.measures import Tokens
from deit_gka.figures.patch_to_patch import draw_distances, draw_patch_to_patch
from deit_gka.figures.rollout import draw_rollout
from deit_gka.figures.sheet import Subject
from deit_gka.model.checkpoints import WEIGHTS, build, find_checkpoint, load_file, load_run, parse_kwargs, timm_weights
from trainkit.cli import CountOrAll, UserError, reason_of, run

FAMILIES = {
    "rollout": draw_rollout,
    "sigma": draw_bandwidths,
    "cls_maps": draw_cls_maps,
    "patch_to_patch": draw_patch_to_patch,
    "distance": draw_distances,
    "evolution": draw_evolution,
    "matrices": draw_matrices,
    "block": draw_block,
    "operator": draw_operator,
}
NEED_SIGMA = ("sigma", "block", "operator")
Family = Literal[
    "rollout", "sigma", "cls_maps", "patch_to_patch", "distance", "evolution", "matrices", "block", "operator"
]
DEFAULT_MODEL = "deit_tiny_gka_patch16_224"


@dataclass
class DrawConfig:
    """Draw the paper's figures of attention: of a run (--run), of a timm model (--model), or else of the demo's."""

    run: Path | None = None
    """The run's folder, or one checkpoint folder in it. Without it and --model: the demo's GKA run on digits, or
    deit_tiny_gka_patch16_224 with random weights if the demo was not run."""
    twin: tuple[Path, ...] = ()
    """Other runs, such as the softmax twin, whose rollout is drawn below the model's."""
    weights: Literal["ema", "model"] = "ema"
    """Of a run: the average, if it has one, or the raw weights."""
    best: bool = False
    """Of a run: the checkpoint with the best accuracy instead of the newest."""
    model: str = ""
    """A timm name, when there is no --run. Its weights are random without --checkpoint or --pretrained."""
    model_kwargs: tuple[str, ...] = ()
    """Arguments for timm, e.g. attention=GGGA reg_tokens=4."""
    checkpoint: Path | None = None
    """Weights for --model: a .safetensors or .pth file, DeiT's own too."""
    pretrained: bool = False
    """Take timm's weights for --model."""
    image: tuple[Path, ...] = ()
    """Image files. Without any: the two photographs that come with scikit-learn."""
    image_size: tuple[int, ...] = ()
    """Height and width in pixels, or one side of a square, if not the model's own: positions are interpolated."""
    family: tuple[Family, ...] = ()
    """Which figures to draw. Without any: all."""
    tokens: CountOrAll = -1
    """Draw matrices of so many tokens, evenly chosen (50 in the paper). -1 = all."""
    out: Path = Path("out/figures")
    """The folder of the figures; every model has its own in it."""
    demo: Path = Path("out/demo")
    """Where the demo's runs are, for the default."""


@dataclass
class Drawn:
    """A model to draw."""

    name: str
    about: str
    model: nn.Module
    settings: dict[str, Any]  # of eval_transform


def check(config: DrawConfig) -> None:
    """Raises UserError for flags that do not go together."""
    if config.run is not None and config.model:
        raise UserError("give either --run (a trained run) or --model (a timm name)")
    if not config.model and (config.checkpoint or config.pretrained or config.model_kwargs):
        raise UserError("--checkpoint, --pretrained and --model-kwargs go with --model")
    if config.checkpoint and config.pretrained:
        raise UserError("give either --checkpoint or --pretrained")
    if len(config.image_size) > 2 or any(side < 1 for side in config.image_size):
        raise UserError("--image-size is one side or height and width, in pixels")


def of_run(path: Path, config: DrawConfig) -> Drawn:
    """The model of a run. Raises UserError if there is none."""
    found = find_checkpoint(path, config.best)
    available = [name for name in WEIGHTS if (found.path / f"{name}.safetensors").exists()]
    weights = config.weights if config.weights in available else available[0]
    state, recipe, folder = found.state, found.state["train_config"], path.resolve()
    name = folder.parents[1].name if (folder / "manifest.json").exists() else folder.name
    data = Path(state["trained_on"]).name if "trained_on" in state else "its images"
    kind = {"ema": "EMA", "model": "raw"}[weights]
    about = f"{name} ({state['model']['name']}), {kind} weights after {state['epoch']:g} epochs of {data}"
    return Drawn(name, about, load_run(found, weights, "cpu"), {"crop_pct": recipe["crop_pct"]})


def of_timm(config: DrawConfig) -> Drawn:
    """A timm model, with weights or without."""
    name, kwargs = config.model or DEFAULT_MODEL, parse_kwargs(config.model_kwargs)
    torch.manual_seed(0)
    if config.pretrained:
        timm_weights(name, "--model")  # says why there are none
    model = build(name, pretrained=config.pretrained, **kwargs).eval()
    if config.checkpoint is not None:
        load_file(config.checkpoint, model)
    source = config.checkpoint.name if config.checkpoint else "timm" if config.pretrained else "random"
    words = "random initialisation (seed 0)" if source == "random" else f"weights: {source}"
    resolved = resolve_input_data_config(model)
    settings = {key: resolved[key] for key in ("crop_pct", "crop_mode", "interpolation", "mean", "std")}
    label = " ".join([name, *config.model_kwargs])
    folder = re.sub(r"[^\w.=-]+", "_", f"{label} {Path(source).stem}")
    return Drawn(folder, f"{label}, {words}", model, settings)


def demo_run(demo: Path) -> Path | None:
    """The demo's first GKA run on digits, if there is one."""
    return next(iter(sorted(demo.glob("runs/digits-gka-*"))), None)


def load(config: DrawConfig) -> list[Drawn]:
    """The model and its twins, at the size to draw them. Raises UserError for models without patches."""
    chosen = config.run or (None if config.model else demo_run(config.demo))
    models = [of_timm(config) if chosen is None else of_run(chosen, config)]
    models += [of_run(twin, config) for twin in config.twin]
    for drawn in models:
        if not isinstance(drawn.model, VisionTransformer):
            raise UserError(f"{drawn.about} is not a vision transformer of timm's: it has no W to draw")
        if config.image_size:
            size = (config.image_size * 2)[:2]
            patch = drawn.model.patch_embed.patch_size
            if size[0] % patch[0] or size[1] % patch[1]:
                raise UserError(f"--image-size must be multiples of the patch, {patch[0]} × {patch[1]}")
            drawn.model.set_input_size(img_size=size)
    return models


def photographs(paths: tuple[Path, ...]) -> dict[str, Image.Image]:
    """Images by name; without paths the two of scikit-learn. Raises UserError for files that are not images."""
    if not paths:
        from sklearn.datasets import load_sample_images

        bundled = load_sample_images()
        return {Path(name).stem: Image.fromarray(image) for name, image in zip(bundled.filenames, bundled.images)}
    images: dict[str, Image.Image] = {}
    for path in paths:
        if path.stem in images:
            raise UserError(f"two images are called {path.stem}: their figures would have the same names")
        try:
            images[path.stem] = Image.open(path).convert("RGB")
        except UnidentifiedImageError as error:
            raise UserError(f"{path} is not an image: {reason_of(error)}") from None
    return images


def subjects_of(drawn: Drawn, images: dict[str, Image.Image]) -> list[Subject]:
    """What the model does with each of the images, from one forward pass of all of them."""
    size = drawn.model.patch_embed.img_size
    transform = eval_transform(size, **drawn.settings)
    batch = torch.stack([transform(image) for image in images.values()])
    mean, std = (torch.tensor(drawn.settings.get(name, default)) for name, default in
                 (("mean", IMAGENET_DEFAULT_MEAN), ("std", IMAGENET_DEFAULT_STD)))  # fmt: skip
    pixels = np.asarray((batch.movedim(1, -1) * std + mean).clamp(0, 1))
    layers, tokens = extract(drawn.model, batch), Tokens.of(drawn.model)
    errors = max(layer.error for layer in layers)
    print(f"{drawn.about}: W of {len(layers)} layers gives the model's output, relative error up to {errors:.1e}")
    return [
        Subject(drawn.name, drawn.about, name, pixels[i], tokens, [layer.of_image(i) for layer in layers])
        for i, name in enumerate(images)
    ]


def main(config: DrawConfig) -> None:
    check(config)
    started = time.perf_counter()
    models, images = load(config), photographs(config.image)
    subjects, *twins = [subjects_of(drawn, images) for drawn in models]
    folder = config.out / models[0].name
    for family in config.family or FAMILIES:
        if family in NEED_SIGMA and not subjects[0].has_sigma:
            print(f"{family}: not drawn, {models[0].name} has no layer with a bandwidth")
            continue
        draw = functools.partial(draw_matrices, tokens=config.tokens) if family == "matrices" else FAMILIES[family]
        together = [subject for row in zip(subjects, *twins) for subject in row] if family == "rollout" else subjects
        for path in draw(together, folder):
            print(f"{path} and .pdf")
    print(f"drawn in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    run(main, DrawConfig)
