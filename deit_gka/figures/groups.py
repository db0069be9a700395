"""Several models on several images: who is drawn with whom, and a sheet with a block of rows for every model."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deit_gka.figures.sheet import Subject, bare, label_layers, sheet
from trainkit_gka.figures.sheet import name_above

LAYERS, HEADING = 0.3, 0.28  # inches above a block: for the numbers of the layers, and for the name of the model
MOST_COLUMNS = 18  # of a sheet that has models side by side


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
    image: int | None = None,
) -> tuple:
    """A figure, and for every model axes for pictures, (its rows, its layers).

    The arguments are those of `sheet`; the margins are around every block. Blocks of few layers are side by side,
    others one below the other. The names of the models are above them if there are several. image: the row, from 0, in
    front of whose maps the image stands, in a column of its own that the returned axes leave out.
    """
    left, right, top, bottom = margins
    lead = int(image is not None)
    columns, heading = [lead + len(subject.layers) for subject in models], HEADING if len(models) > 1 else 0
    beside = sum(columns) <= MOST_COLUMNS
    count, step = len(models) - 1, (left + right - gaps[0], 0) if beside else (0, bottom + LAYERS + heading - gaps[1])
    margins = (left, right + count * step[0], top + heading, bottom + count * step[1])
    shape = (max(rows), sum(columns)) if beside else (sum(rows), max(columns))
    figure, axes = sheet(*shape, cell, title, caption, margins, gaps)
    bare(axes, fontsize)
    size, parts = figure.get_size_inches(), []
    for number, part in enumerate(np.split(axes, np.cumsum(columns if beside else rows)[:-1], axis=int(beside))):
        for axis in part.flat:
            box = axis.get_position()
            place = (box.x0 + number * step[0] / size[0], box.y0 - number * step[1] / size[1])
            axis.set_position((*place, box.width, box.height))
        part, hidden = part[: rows[number], : columns[number]], (part[rows[number] :], part[:, columns[number] :])
        for axis in [axis for some in hidden for axis in some.flat]:
            axis.set_visible(False)
        before, part = np.split(part, [lead], axis=1)
        for row, axis in enumerate(before.flat):
            axis.set_visible(row == image)
            axis.imshow(models[number].pixels, interpolation="none")
            axis.set_title("image", fontsize=9)
        label_layers(part, models[number])
        if heading:
            name_above(part[0, 0], models[number].model)
        parts.append(part)
    return figure, parts
