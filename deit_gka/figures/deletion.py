"""The deletion metric of RISE (Petsiuk et al. 2018, arXiv 1806.07421): delete patches in an order of importance, and
measure how soon the model loses its class."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from deit_gka.figures.rollout import rollout
from deit_gka.figures.sheet import by_image
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.sheet import legend_beside, plain, save, sheet
from trainkit_gka.plots import BLUE, GREEN, GREY, ORANGE, SKY, Figure

STEPS = 16
RANDOM_ORDERS = 4
BATCH = 16  # images in a forward pass
MORE = (BLUE, GREEN, ORANGE, SKY, GREY)  # of models of one kind beside each other
STYLES = {"rollout": "-", "CLS": "--", "random": ":"}


def orders(subject: ImageSubject) -> dict[str, torch.Tensor]:
    """Orders of the patches, (K, R * C), by the name of the order; K is 1, or RANDOM_ORDERS for random ones."""
    tokens = subject.tokens
    total = tokens.read(rollout([layer.weights for layer in subject.layers], tokens))
    last = tokens.read(subject.layers[-1].weights.mean(0))
    generator, count = torch.Generator().manual_seed(0), tokens.count - tokens.prefix
    return {
        "rollout": total[None, tokens.prefix :].argsort(descending=True, stable=True),
        "CLS": last[None, tokens.prefix :].argsort(descending=True, stable=True),
        "random": torch.stack([torch.randperm(count, generator=generator) for _ in range(RANDOM_ORDERS)]),
    }


def without(subject: ImageSubject, order: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The image, (S, height, width, 3), without the first patches of `order`, as many as the S `counts` say.

    A deleted patch has the mean colour of the image.
    """
    tokens, pixels = subject.tokens, torch.as_tensor(subject.pixels)
    rank = order.argsort().view(tokens.grid)
    for axis, side in enumerate(tokens.patch):
        rank = rank.repeat_interleave(side, dim=axis)
    gone = rank < torch.as_tensor(counts)[:, None, None]
    return torch.where(gone[..., None], pixels.mean((0, 1)), pixels)


def deletion_curve(subject: ImageSubject, order: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The shares of the patches that are deleted, and the probabilities of the whole image's class then, (S,) each."""
    count = len(order)
    counts = torch.linspace(0, count, min(count, STEPS) + 1).round().long()
    images = without(subject, order, counts)
    probabilities = torch.cat([subject.probabilities(batch) for batch in images.split(BATCH)])
    return (counts / count).numpy(), probabilities[:, probabilities[0].argmax()].numpy()


def class_of(subject: ImageSubject) -> str:
    """The class that the model gives the whole image, in quotes; its number from 1 where the classes have no names."""
    place = int(subject.probabilities(torch.as_tensor(subject.pixels)[None])[0].argmax())
    return f'"{subject.classes[place]}"' if subject.classes else f"class {place + 1}"


def draw_deletion(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw a panel for every image: the probability of the class against the share deleted, by order and model."""
    images = by_image(subjects)
    names = {subject.about: subject.model for models in images for subject in models}
    text = (
        f"{'; '.join(names)}. Images: {', '.join(models[0].image for models in images)}. Patches are deleted (painted "
        "in the image's mean colour) in the order of rollout without discarding, of the last layer's "
        f"{images[0][0].tokens.reader} (the mean over heads), or of {RANDOM_ORDERS} random orders (their mean; their "
        "range is shaded). Drawn is the probability of the class that the model gives the whole image, which is named. "
        "Beside a line: the area under it, which is small where an order names first what the model needs."
    )
    title, columns = "Deletion: does the model need the patches that it attends to?", min(len(images), 3)
    lines, legend = -(-len(images) // columns), 1.3 + (0.07 * max(map(len, names.values())) if len(names) > 1 else 0)
    figure, axes = sheet(lines, columns, (3.6, 2.6), title, text, (0.95, legend, 0.75, 0.6), (legend + 0.75, 0.85))
    for axis in axes.flat[len(images) :]:
        axis.set_visible(False)
    rows = [row for axis, models in zip(axes.flat, images) for row in _draw_panel(axis, models)]
    top = max(axis.get_ylim()[1] for axis in axes.flat[: len(images)])
    for axis in axes.flat:
        axis.set_ylim(0, top)
    return [Figure(save(figure, folder / "deletion.png"), title, text, rows)]


def _draw_panel(axis, models: Sequence[ImageSubject]) -> list[dict]:
    """Draw the curves of the models on one image. Returns their numbers."""
    rows, classes = [], []
    for number, subject in enumerate(models):
        named = class_of(subject)
        classes += [named] if named not in classes else []
        shared = [each.colour for each in models].count(subject.colour) > 1  # a hybrid beside another
        colour = MORE[number % len(MORE)] if shared else subject.colour
        for name, some in orders(subject).items():
            shares, curves = zip(*(deletion_curve(subject, order) for order in some))
            shares, curves = shares[0], np.stack(curves)
            curve, area = curves.mean(0), float(np.trapezoid(curves.mean(0), shares))
            label = name if len(models) == 1 else f"{subject.model}, {name}"
            axis.plot(shares, curve, STYLES[name], color=colour, label=f"{plain(label)}: {area:#.3g}")
            if len(curves) > 1:
                axis.fill_between(shares, curves.min(0), curves.max(0), color=colour, alpha=0.12, linewidth=0)
            place = {"model": subject.model, "image": subject.image, "class": named, "order": name}
            rows.append({**place, "probability of the whole image": float(curve[0]), "area under the curve": area})
    axis.set(xlabel="share of the patches that is deleted", xlim=(0, 1))
    axis.set_ylabel(f"probability of {plain(' or '.join(classes))}", fontsize=8)
    axis.set_title(plain(models[0].image), fontsize=10)
    axis.grid(alpha=0.3)
    legend_beside(axis, title="area")
    return rows
