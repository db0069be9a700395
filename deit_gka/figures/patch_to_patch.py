"""What patches look at: the rows of W of four patches, and how far all patches look (paper, supplement)."""

from collections.abc import Sequence
from pathlib import Path

import torch

from deit_gka.figures.groups import by_image, by_model
from deit_gka.figures.measures import Tokens, attended_distance
from deit_gka.figures.sheet import (
    Subject,
    bare,
    cell_size,
    coloured,
    label_layers,
    logarithmic,
    overlay,
    save,
    scale_below,
    sheet,
)
from trainkit.plots import Figure

BOX = "cyan"


def query_maps(weights: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """The mean over heads of the rows of the paper's four patches, over the patches: (H, N, N) -> (4, *grid)."""
    rows = [tokens.token(*query) for query in tokens.queries()]
    return tokens.patches(weights.mean(0)[rows])


def draw_patch_to_patch(subjects: Sequence[Subject], folder: Path) -> list[Figure]:
    """Draw a contact sheet for every image: layers across; down, every query's map and the map over the image."""
    return [_draw_sheet(models[0], models[0].file(folder, "patch_to_patch")) for models in by_image(subjects)]


def _draw_sheet(subject: Subject, path: Path) -> Figure:
    tokens, depth = subject.tokens, len(subject.layers)
    names = ", ".join(f"({row}, {column})" for row, column in tokens.queries())
    caption = subject.caption(
        f"Rows of W of the patches (row, column) {names}, the mean over heads, over all patches; the box is the patch. "
        "The scale is logarithmic and shared by a layer (the bar below it): the patch's weight of itself would "
        "flatten a linear one. Lower picture of a pair: the same over the image."
    )
    title, size = "Patch-to-patch attention", cell_size(subject, 1.25)
    figure, axes = sheet(8, depth, size, title, caption, margins=(0.7, 0.3, 0.75, 0.35))
    bare(axes)
    label_layers(axes, subject)
    rows = []
    for depth, (column, layer) in enumerate(zip(axes.T, subject.layers), start=1):
        maps = query_maps(layer.weights, tokens)
        norm = logarithmic(maps)
        for number, (query, patches) in enumerate(zip(tokens.queries(), maps)):
            rows.append({"layer": depth, "patch": str(query), "self-weight": float(patches[query])})
            raw, over = column[2 * number : 2 * number + 2]
            raw.imshow(coloured(patches, norm), interpolation="none")
            over.imshow(overlay(subject.pixels, patches, norm))
            box(raw, query, (1, 1), shift=0.5)
            box(over, query, tokens.patch, shift=0.5)
        scale_below(figure, norm, column[-1], size[1], gap=0.08)
    for number, (row, column) in enumerate(tokens.queries()):
        axes[2 * number, 0].set_ylabel(f"patch ({row}, {column})", fontsize=9)
        axes[2 * number + 1, 0].set_ylabel("over the image", fontsize=8)
    return Figure(save(figure, path), title, caption, rows)


def box(axis, query: tuple[int, int], side: tuple[int, int], shift: float) -> None:
    """Draw the outline of the patch `query`, (row, column), of `side` = (height, width) in the axis's units."""
    from matplotlib.patches import Rectangle

    (row, column), (height, width) = query, side
    corner = (column * width - shift, row * height - shift)
    axis.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=BOX, linewidth=1.2, clip_on=False, zorder=9))


def draw_distances(subjects: Sequence[Subject], folder: Path) -> list[Figure]:
    """Draw the mean attended distance in pixels over depth, a line for every head. Returns the file."""
    subjects = by_model(subjects)[0]
    first, images = subjects[0], ", ".join(subject.image for subject in subjects)
    each = torch.stack(
        [torch.stack([attended_distance(layer.weights, s.tokens) for layer in s.layers]) for s in subjects]
    )
    distances, uniform = each.mean(0), float(first.tokens.distances().mean())
    caption = (
        f"{first.about}. Mean distance between a patch and the patches it attends to, weighted by W among the patches, "
        f"in pixels of the model's {first.pixels.shape[0]} × {first.pixels.shape[1]}; mean over patches and over "
        f"{images}. Dashed: uniform attention, {uniform:.1f}. Dotted: one patch, {first.tokens.patch[1]}."
    )
    title = "Mean attended distance"
    figure, axes = sheet(1, 1, (7, 3.4), title, caption, margins=(0.8, 1.5, 0.6, 0.6))
    axis, layers = axes[0, 0], range(1, len(first.layers) + 1)
    for head, line in enumerate(distances.T, start=1):
        axis.plot(layers, line, marker="o", markersize=4, label=f"head {head}")
    axis.axhline(uniform, color="black", linestyle="--", linewidth=1, label="uniform")
    axis.axhline(first.tokens.patch[1], color="black", linestyle=":", linewidth=1, label="one patch")
    axis.set(xlabel="layer", ylabel="pixels", xticks=layers, ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    rows = [
        {"layer": layer, "head": head, "pixels": float(value)}
        for layer, heads in enumerate(distances, start=1)
        for head, value in enumerate(heads, start=1)
    ]
    return [Figure(save(figure, folder / "distance.png"), title, caption, rows)]
