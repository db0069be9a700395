"""The paper's figures of vision transformers, drawn from a trained run or from a model that is not trained yet.

    python -m deit_gka.draw --run out/runs/deit_tiny_gka_patch16_224 --image cat.jpg
    python -m deit_gka.draw --model deit_tiny_gka_patch16_224

Writes OUT/<model>/<family>.png, or <family>-<image>.png for figures of one image, and a PDF beside each.
"""

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL.Image import Image

from deit_gka.figures.families import FAMILIES, why_not
from deit_gka.figures.matrices import draw_matrices
from deit_gka.figures.subjects import DrawnModel, check_repeats, images_for, of_run, of_timm, photographs, subjects_of
from trainkit_gka.cli import CountOrAll, UserError, run
from trainkit_gka.figures.subjects import check_names, draw_families
from trainkit_gka.files import check_named

DEFAULT_MODEL = "deit_tiny_gka_patch16_224"


@dataclass
class DrawConfig:
    """Draw the paper's figures of attention: of a run (--run), of a timm model (--model), or else of the demo's."""

    run: Path | None = None
    """The run's folder, or one checkpoint folder in it. Without it and --model: the demo's GKA run on digits, or
    deit_tiny_gka_patch16_224 with random weights if the demo was not run."""
    twin: tuple[Path, ...] = ()
    """Other runs, such as the softmax twin, that are drawn below the model or beside it."""
    seeds: tuple[Path, ...] = ()
    """Other runs of the same recipe with other seeds: `sigma` draws the mean and the range over them and the model."""
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
    """Image files. Without any: held-out images of what the run was trained on; of a model that sees larger ones, the
    two photographs that come with scikit-learn."""
    image_size: tuple[int, ...] = ()
    """Height and width in pixels, or one side of a square, if not the model's own: positions are interpolated."""
    family: tuple[Literal[tuple(FAMILIES)], ...] = ()
    """Which figures to draw. Without any: all."""
    tokens: CountOrAll = -1
    """Draw matrices of so many tokens, evenly chosen (50 in the paper). -1 = all."""
    out: Path = Path("out/figures")
    """The folder of the figures; every model has its own in it."""
    demo: Path = Path("out/demo")
    """Where the demo's runs are, for the default."""


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


def load(config: DrawConfig) -> tuple[list[DrawnModel], list[DrawnModel], dict[str, Image]]:
    """The model and its twins, at the size to draw them, the runs that repeat the model, and the images."""
    chosen = config.run
    if not (config.run or config.model):
        check_named(config.demo, DrawConfig.demo, "the demo's runs on digits")
        chosen = next(iter(sorted(config.demo.glob("runs/digits-gka-*"))), None)

    def runs(*paths: Path) -> list[DrawnModel]:
        return [of_run(path, config.weights, config.best, config.image_size) for path in paths]

    if chosen is None:
        name = config.model or DEFAULT_MODEL
        first = of_timm(name, config.model_kwargs, config.checkpoint, config.pretrained, config.image_size)
    else:
        (first,) = runs(chosen)
    models, seeds = [first, *runs(*config.twin)], runs(*config.seeds)
    for drawn in seeds:
        check_repeats(drawn, first)
    check_names([drawn.about for drawn in models + seeds])
    return models, seeds, photographs(config.image) if config.image else images_for(first)


def main(config: DrawConfig) -> None:
    check(config)
    started = time.perf_counter()
    models, seeds, images = load(config)
    subjects = []
    for drawn in models + seeds:
        subjects += subjects_of(drawn, images, models[0].about if drawn in seeds else "")
        subjects[-1].print_error()
    draws = {**FAMILIES, "matrices": functools.partial(draw_matrices, tokens=config.tokens)}
    chosen = {family: draws[family] for family in config.family or FAMILIES}
    draw_families(subjects, config.out / models[0].name, chosen, why_not)
    print(f"drawn in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    run(main, DrawConfig)
