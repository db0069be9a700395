"""Attention rollout: how much of every patch reaches the CLS token through all layers (paper, supplement; Abnar and
Zuidema 2020, arXiv 2005.00928). The deletion metric of RISE (Petsiuk et al. 2018, arXiv 1806.07421) tests it: delete
patches in an order of importance, and measure how soon the model loses its class."""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from deit_gka.figures.maps import Tokens
from deit_gka.figures.sheet import by_image, cell_size, smooth_map
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.figures.sheet import bare, from_zero, legend_beside, name_above, plain, scale, sheet
from trainkit_gka.plots import BLUE, GREEN, GREY, ORANGE, SKY, Figure

DISCARD_RATIOS = (0.0, 0.5, 0.9)
LEAST_SHARE = 0.01  # of the row on patches; less would be drawn black
STEPS = 16
RANDOM_ORDERS = 4
BATCH = 16  # images in a forward pass
MORE = (BLUE, GREEN, ORANGE, SKY, GREY)  # of models of one kind beside each other
STYLES = {"rollout": "-", "CLS": "--", "random": ":"}


def rollout(weights: Sequence[torch.Tensor], tokens: Tokens, discard: float = 0.0) -> torch.Tensor:
    """R = Â_L ... Â_1, (N, N), whose rows sum to 1. weights: W of every layer, (H, N, N).

    Â is the mean over heads, without what is below its `discard` quantile, plus I, normalised by rows. The last layer
    comes first in the product: its CLS row leaves the network. Weights to the class token are never discarded. A token
    that loses its whole row keeps itself, by I.
    """
    total = torch.eye(tokens.count, dtype=torch.float64)
    for layer in weights:
        mean = layer.double().mean(0)
        if discard:
            low = mean < float(np.quantile(mean.numpy(), discard))
            if tokens.has_class:
                low[:, 0] = False
            mean = mean.masked_fill(low, 0)
        augmented = 0.5 * mean + 0.5 * torch.eye(len(mean), dtype=mean.dtype)
        total = augmented / augmented.sum(-1, keepdim=True) @ total
    return total


def on_patches(weights: Sequence[torch.Tensor], tokens: Tokens, ratio: float) -> tuple[torch.Tensor, float]:
    """The row of the rollout that stands for the image, (N,), in float64, and its share on patches."""
    row = tokens.read(rollout(weights, tokens, ratio))
    return row, float(row[tokens.prefix :].sum())


def largest_ratio(weights: Sequence[torch.Tensor], tokens: Tokens, ratio: float) -> float:
    """The largest hundredth, at most `ratio`, at which more than LEAST_SHARE of the row is on patches; at least 0.

    The share falls as the ratio rises.
    """

    def empty(hundredths: int) -> bool:
        return on_patches(weights, tokens, hundredths / 100)[1] <= LEAST_SHARE

    most = round(100 * ratio)
    return ratio if not empty(most) else max(0, bisect_left(range(most), True, key=empty) - 1) / 100


def draw_rollout(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw a row for every model on every image: the image, and beside it the rollout at the discard ratios."""
    subjects = [subject for models in by_image(subjects) for subject in models]
    heading = "Attention rollout: what reaches the " + ("CLS token" if subjects[0].tokens.has_class else "mean patch")
    text = (
        f"{'; '.join(dict.fromkeys(subject.about for subject in subjects))}. R = Â_L ⋯ Â_1 with Â = ½ mean over heads "
        f"+ ½ I, rows normalised; {subjects[0].tokens.reader} of R over the patches, in multiples of an equal share (1 "
        "/ tokens), on one scale for a row. Weights below the quantile are zeroed before I is added; those to the "
        "class token are kept. Below a map: the part of that row that is on patches, the rest is on the tokens before "
        f"them. Where a ratio leaves less than {LEAST_SHARE:.0%} on patches, the largest one that leaves more is drawn "
        "and named."
    )
    size = cell_size(subjects[0], 2.3)
    margins = (0.3, 0.75, 0.9, 0.32)
    save, axes = sheet(len(subjects), 1 + len(DISCARD_RATIOS), size, heading, text, margins, (0.06, 0.75))
    bare(axes)
    for axis, ratio in zip(axes[0, 1:], DISCARD_RATIOS):
        axis.set_title(f"discard ratio {ratio:g}", fontsize=9)
    table = []
    for row, subject in zip(axes, subjects):
        layers, tokens = [layer.weights for layer in subject.layers], subject.tokens
        ratios = [largest_ratio(layers, tokens, ratio) for ratio in DISCARD_RATIOS]
        rows, shares = zip(*(on_patches(layers, tokens, ratio) for ratio in ratios))
        maps = [tokens.patches(values * tokens.count).float() for values in rows]
        norm = from_zero(torch.stack(maps))
        row[0].imshow(subject.pixels, interpolation="none")
        name_above(row[0], subject.model)
        row[0].set_xlabel(plain(subject.image))
        for axis, wanted, ratio, share, patches in zip(row[1:], DISCARD_RATIOS, ratios, shares, maps):
            axis.imshow(smooth_map(patches, norm, subject.pixels.shape[:2]), interpolation="none")
            instead = f"{wanted:g} is empty, {ratio:g}: " if ratio < wanted else ""
            axis.set_xlabel(f"{instead}{share:.1%} on patches")
            table.append({"model": subject.model, "image": subject.image, "discard ratio": ratio, "on patches": share})
        scale(norm, row[-1], (1.04, 0, 0.06, 1), "× equal share")
    return [save(folder / "rollout.png", table)]


# Deletion


def orders(subject: ImageSubject) -> dict[str, torch.Tensor]:
    """Orders of the patches, (K, R * C), by the name of the order; K is 1, or RANDOM_ORDERS for random ones."""
    tokens = subject.tokens
    layers = [layer.weights for layer in subject.layers]
    generator = torch.Generator().manual_seed(0)
    count = tokens.count - tokens.prefix
    ranked = {
        name: tokens.read(weights)[None, tokens.prefix :].argsort(descending=True, stable=True)
        for name, weights in (("rollout", rollout(layers, tokens)), ("CLS", layers[-1].mean(0)))
    }
    return {**ranked, "random": torch.stack([torch.randperm(count, generator=generator) for _ in range(RANDOM_ORDERS)])}


def without(subject: ImageSubject, order: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The image, (S, height, width, 3), without the first patches of `order`, as many as the S `counts` say.

    A deleted patch has the mean colour of the image.
    """
    tokens = subject.tokens
    pixels = torch.as_tensor(subject.pixels)
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
    """The class that the model gives the image, in quotes; its number from 1 where the classes have no names."""
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
        "range is shaded). Drawn is the probability of the class that the model gives the whole image, which is "
        "named. Beside a line: the area under it, which is small where an order names first what the model needs."
    )
    title = "Deletion: does the model need the patches that it attends to?"
    across = min(len(images), 3)
    legend = 1.3 + (0.07 * max(map(len, names.values())) if len(names) > 1 else 0)
    margins = (0.95, legend, 0.75, 0.6)
    gaps = (legend + 0.75, 0.85)
    save, axes = sheet(-(-len(images) // across), across, (3.6, 2.6), title, text, margins, gaps)
    for axis in axes.flat[len(images) :]:
        axis.set_visible(False)
    rows = [row for axis, models in zip(axes.flat, images) for row in _draw_panel(axis, models)]
    top = max(axis.get_ylim()[1] for axis in axes.flat[: len(images)])
    for axis in axes.flat:
        axis.set_ylim(0, top)
    return [save(folder / "deletion.png", rows)]


def _draw_panel(axis, models: Sequence[ImageSubject]) -> list[dict]:
    """Draw the curves of the models on one image. Returns their numbers."""
    rows, colours = [], [subject.colour for subject in models]
    for number, (subject, colour) in enumerate(zip(models, colours)):
        if colours.count(colour) > 1:  # a hybrid beside another
            colour = MORE[number % len(MORE)]
        place = {"model": subject.model, "image": subject.image, "class": class_of(subject)}
        for name, some in orders(subject).items():
            (shares, *_), curves = zip(*(deletion_curve(subject, order) for order in some))
            curve = np.mean(curves, axis=0)
            area = float(np.trapezoid(curve, shares))
            label = name if len(models) == 1 else f"{subject.model}, {name}"
            axis.plot(shares, curve, STYLES[name], color=colour, label=f"{plain(label)}: {area:#.3g}")
            if len(curves) > 1:
                edges = np.min(curves, axis=0), np.max(curves, axis=0)
                axis.fill_between(shares, *edges, color=colour, alpha=0.12, linewidth=0)
            numbers = {"probability of the whole image": float(curve[0]), "area under the curve": area}
            rows.append({**place, "order": name, **numbers})
    axis.set(xlabel="share of the patches that is deleted", xlim=(0, 1))
    classes = dict.fromkeys(row["class"] for row in rows)
    axis.set_ylabel(f"probability of {plain(' or '.join(classes))}", fontsize=8)
    axis.set_title(plain(models[0].image), fontsize=10)
    axis.grid(alpha=0.3)
    legend_beside(axis, title="area")
    return rows
