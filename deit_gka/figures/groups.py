"""Several models on several images: who is drawn with whom, and a sheet with a block of rows for every model."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deit_gka.figures.sheet import Subject, bare, label_layers, sheet

LAYERS, HEADING = 0.3, 0.28  # inches above a block: for the numbers of the layers, and for the name of the model


def by_image(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """A list for every image: the models on it, in the order that they came, without repetitions."""
    return _grouped([subject for subject in subjects if not subject.repeats], "image")


def by_model(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """A list for every model: what it does with the images, in the order that they came, without repetitions."""
    return _grouped([subject for subject in subjects if not subject.repeats], "about")


def runs_of_recipe(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """The first model and those that repeat it with other seeds: a list for each, of what it does with the images."""
    about = subjects[0].about
    return _grouped([subject for subject in subjects if about in (subject.about, subject.repeats)], "about")


def _grouped(subjects: Sequence[Subject], name: str) -> list[list[Subject]]:
    groups: dict[str, list[Subject]] = {}
    for subject in subjects:
        groups.setdefault(getattr(subject, name), []).append(subject)
    return list(groups.values())


def caption(models: Sequence[Subject], *sentences: str) -> str:
    """What the models, all on one image, are and see; then the sentences."""
    first = models[0]
    if all((each.pixels.shape, each.tokens) == (first.pixels.shape, first.tokens) for each in models):
        return replace(first, about="; ".join(each.about for each in models)).caption(*sentences)
    return " ".join([*(each.caption() for each in models), *sentences])


def blocks(
    models: Sequence[Subject],
    rows: Sequence[int],
    cell: tuple[float, float],
    title: str,
    caption: str,
    margins: tuple[float, float, float, float],
    gaps: tuple[float, float] = (0.06, 0.06),
    fontsize: int = 8,
) -> tuple:
    """A figure, and for every model axes for pictures, (its rows, its layers), one block below the other.

    The arguments are those of `sheet`; the bottom margin is below every block, and the names of the models are above
    their blocks if there are several.
    """
    left, right, top, bottom = margins
    heading = HEADING if len(models) > 1 else 0
    depth, between = max(len(subject.layers) for subject in models), bottom + LAYERS + heading
    margins = (left, right, top + heading, bottom + between * (len(models) - 1))
    figure, axes = sheet(sum(rows), depth, cell, title, caption, margins, gaps)
    bare(axes, fontsize)
    width, height = figure.get_size_inches()
    parts = np.split(axes, np.cumsum(rows)[:-1])
    for number, (subject, part) in enumerate(zip(models, parts)):
        for axis in part.flat:
            box = axis.get_position()
            axis.set_position((box.x0, box.y0 - number * between / height, box.width, box.height))
        for axis in part[:, len(subject.layers) :].flat:
            axis.set_visible(False)
        label_layers(part, subject)
        if heading:
            above = part[0, 0].get_position().y1 + LAYERS / height
            figure.text(0.12 / width, above, subject.about, fontsize=9, fontweight="bold", va="bottom")
    return figure, [part[:, : len(subject.layers)] for subject, part in zip(models, parts)]
