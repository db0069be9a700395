"""Attention pictures of a vision model, and what the live view of an image needs, from one pass through the model.

The model is the report's first vision run, one with bandwidths if there is one; without any run at all, the paper's
smallest model, which nobody trained.
"""

import functools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image

from deit_gka.figures.families import FAMILIES, why_not
from deit_gka.figures.sheet import Subject
from deit_gka.figures.subjects import (
    NUM_IMAGES,
    Drawn,
    check_repeats,
    images_for,
    of_run,
    of_timm,
    photographs,
    subjects_of,
)
from runs.report.blocks import Picture, image_element, number
from runs.report.trained import TrainedRun, first_that_works
from runs.table import Table
from trainkit_gka.cli import UserError
from trainkit_gka.figures.sheet import DPI, TITLE_INCHES, caption_inches, caption_lines
from trainkit_gka.plots import Figure, in_the_dark

UNTRAINED = "deit_tiny_gka_patch16_224"
NUM_TWINS = 2
# Which families are on the page: of how many images, and whether of softmax and VLT too. `make figures` draws them all.
ON_THE_PAGE = {
    "rollout": (2, True),
    "deletion": (1, True),
    "sigma": (NUM_IMAGES, False),
    "cls_maps": (1, False),
    "patch_to_patch": (1, False),
    "distance": (NUM_IMAGES, True),
    "evolution": (1, False),
    "matrices": (1, False),
    "block": (1, False),
    "operator": (1, False),
}
WITH_SEEDS = ("sigma", "distance")  # families that draw bands over seeds


def subjects(runs: Sequence[TrainedRun], images: Sequence[Path]) -> tuple[list[Subject], str]:
    """What the model does with each image, then its twins, then its other seeds; and why nothing, if a run has no W.

    images: files; without any, held-out ones that the run was trained for, or scikit-learn's photographs. Raises
    UserError for files that are not images.
    """
    given = photographs(images) if images or not runs else {}
    if not runs:
        return subjects_of(of_timm(UNTRAINED), given), ""
    vision = sorted((run for run in runs if run.is_vision), key=lambda run: not run.has_sigma)

    def look(run: TrainedRun) -> tuple[TrainedRun, Drawn, dict[str, Image.Image], list[Subject]]:
        drawn = of_run(run.folder)
        chosen = given or images_for(drawn, run.folder, network=False)
        return run, drawn, chosen, subjects_of(drawn, chosen)

    found, reason = first_that_works(vision, look)
    if found is None:
        return [], reason
    ours, first, chosen, seen = found
    for twin in twins_of(ours, vision):
        with suppress(UserError):  # a convolutional network has no W, a run that just began no checkpoint
            seen += subjects_of(of_run(twin.folder), chosen)
    for run in vision:
        if run.family == ours.family and run is not ours:
            with suppress(UserError):  # of another length, for example
                check_repeats(drawn := of_run(run.folder), first)
                seen += subjects_of(drawn, chosen, first.about)
    return seen, ""


def twins_of(ours: TrainedRun, vision: Sequence[TrainedRun]) -> list[TrainedRun]:
    """The first runs of other models without bandwidths that see images of the same size."""
    families: dict[str, TrainedRun] = {}
    for run in vision:
        if not run.has_sigma and run.config["input_size"] == ours.config["input_size"] and run.family != ours.family:
            families.setdefault(run.family, run)
    return list(families.values())[:NUM_TWINS]


def pictures(seen: Sequence[Subject]) -> list[Picture]:
    """The families of the page that can be drawn of the first model; none without one."""
    if not seen:
        return []
    images, first = list(dict.fromkeys(subject.image for subject in seen)), seen[0].about
    drawn = []
    for name, (count, with_twins) in ON_THE_PAGE.items():
        models = {s.about for s in seen if (name in WITH_SEEDS if s.repeats else with_twins or s.about == first)}
        chosen = [s for s in seen if s.about in models and s.image in images[:count]]
        if not why_not(name, chosen):
            drawn += embedded(functools.partial(FAMILIES[name], chosen))
    return drawn


def embedded(draw: Callable[[Path], list[Figure]]) -> list[Picture]:
    """What `draw` draws into a folder, for a light page and a dark one."""
    with tempfile.TemporaryDirectory() as light, tempfile.TemporaryDirectory() as dark:
        figures = draw(Path(light))
        with in_the_dark():
            draw(Path(dark))
        return [_picture(figure, Path(dark) / figure.path.name) for figure in figures]


def _picture(figure: Figure, dark: Path) -> Picture:
    """A figure's file, and the same `dark`, as a picture of the page, its numbers as a table."""
    with Image.open(figure.path) as one, Image.open(dark) as other:
        both = [without_words(image.convert("RGB"), figure.caption) for image in (one, other)]
    markup = image_element(*both, figure.alt)
    headings = list(figure.rows[0]) if figure.rows else []
    rows = [[number(row[heading]) for heading in headings] for row in figure.rows]
    words = [heading for heading in headings if isinstance(figure.rows[0][heading], str)]
    table = Table.of(headings, rows, title=figure.title, words=max(1, len(words))) if rows else None
    return Picture(figure.title, figure.caption, markup, table, wide=True)


def without_words(image: Image.Image, caption: str) -> Image.Image:
    """A sheet without its title and its caption, which the page has as text."""
    height = round(DPI * caption_inches(caption_lines(caption, image.width / DPI)))
    return image.crop((0, round(DPI * TITLE_INCHES), image.width, image.height - height))
