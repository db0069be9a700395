"""The paper's two explanations, drawn from a model: the block (Figure 1), and the operator on a few tokens
(Figure 2)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.patheffects import withStroke

from deit_gka.figures.maps import LayerMaps, place_name
from deit_gka.figures.matrices import matrix_picture, off_diagonal
from deit_gka.figures.sheet import BOX, by_image, caption, frame
from deit_gka.figures.subjects import ImageSubject
from gka import KINDS, attention_cost, gaussian_weights
from trainkit_gka.figures.sheet import bare, coloured, linear, logarithmic, sheet
from trainkit_gka.plots import Figure

FACTORS = (0.5, 1.0, 2.0)  # of the model's own sigma
NAMES = ("i", *"abcde")  # of the few tokens
SHADE = {"learned": "#cfe0f5", "fixed": "#f3f3f3", "kernel": "#fbe3b5"}
# The parts of a block between LayerNorm and output projection, from below: (text, shade).
MIXING = {
    "softmax": [("queries, keys, values: W_Q, W_K, W_V", "learned"), ("softmax(q·k / √d), weighted sum of v", "fixed")],
    "gka": [
        ("split x into heads", "fixed"),
        ("exp(−|x_i − x_j|² / 2σ²), rows ÷ their sum,\nweighted sum of x", "kernel"),
    ],
}


def choose_tokens(features: torch.Tensor, query: int, first: int, count: int = len(NAMES)) -> list[int]:
    """Tokens from the query itself to the one that is farthest from it, evenly spread in the order of distance.

    features: (N, D) of one head. first: the first token that may be chosen.
    """
    distances = (features[first:] - features[query]).norm(dim=-1)
    distances[query - first] = -1  # itself comes first, also where others are equal to it
    order = first + distances.argsort(stable=True)
    return order[torch.linspace(0, len(order) - 1, min(count, len(order))).round().long()].tolist()


def few_weights(features: torch.Tensor, sigma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """K (paper eq. 3) and W (eq. 4) of a few tokens, (T, T) each, float64. features: (T, D) of one head."""
    features = features.double()
    weights = gaussian_weights(features[None, :, None], torch.tensor([sigma]).log().float(), eps=0.0)[0, 0]
    return weights / weights.diagonal()[:, None], weights  # K_ii = 1


def first_layer(subject: ImageSubject) -> tuple[int, LayerMaps]:
    """The first layer with a bandwidth, and its number from 1."""
    return next(pair for pair in enumerate(subject.layers, start=1) if pair[1].sigma is not None)


def draw_operator(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw, for every image, a few tokens of the first GKA layer at three σ: affinities, W, and the weighted sum."""
    return [_draw_operator(models[0], folder / f"operator-{models[0].image}.png") for models in by_image(subjects)]


def _draw_operator(subject: ImageSubject, path: Path) -> Figure:
    (number, layer), tokens, (height, width) = first_layer(subject), subject.tokens, subject.tokens.patch
    features, sigma = layer.features[:, 0], float(layer.sigma[0])
    query = tokens.query_tokens()[1]
    chosen = choose_tokens(features, query, tokens.prefix)
    places = dict(zip(NAMES, (divmod(token - tokens.prefix, tokens.grid[1]) for token in chosen)))
    pieces = [subject.pixels[r * height : (r + 1) * height, c * width : (c + 1) * width] for r, c in places.values()]
    distances = ", ".join(f"{float((features[token] - features[query]).norm()):.1f}" for token in chosen)
    text = caption(
        [subject],
        f"{len(chosen)} patches of layer {number}, head 1, at half, one and two times its σ = {sigma:.2f}: i, the "
        f"central one, and others from near to far in features (|x_i − x_j| = {distances}). Affinities K_ij = "
        "exp(−|x_i − x_j|² / 2σ²); rows divided by their sum are W; the output of i is the weighted sum of row i. The "
        "operator sums features; the sum of the patches' pixels is shown because it can be seen.",
    )
    title, table = "Gaussian kernel attention on a few tokens", []
    save, axes = sheet(3, 5, (1.25, 1.25), title, text, (0.15, 0.2, 0.75, 0.35), (0.45, 0.4))
    _draw_patches(axes[:, 0], subject, places, pieces)
    for row, factor in zip(axes, FACTORS):
        affinities, weights = few_weights(features[chosen], factor * sigma)
        for (name, place), weight in zip(places.items(), weights[0].tolist()):
            numbers = {"patch": place_name(*place), "weight in row i": weight}
            table.append({"sigma": factor * sigma, "token": name, **numbers})
        for axis, matrix in zip(row[1:], (affinities, weights)):
            _draw_matrix(axis, matrix)
        row[1].set_ylabel(f"σ = {factor * sigma:.2f}", fontsize=9, fontweight="bold")
        bars = row[3].bar(range(len(chosen)), weights[0], color="#4878a8")
        row[3].bar_label(bars, [in_cell(weight) for weight in weights[0].tolist()], fontsize=7, padding=1)
        row[3].set(ylim=(0, 1.12), yticks=[0, 0.5, 1])
        row[3].tick_params(labelsize=7)
        row[3].set_xticks(range(len(chosen)), labels=places, fontsize=8)
        row[4].imshow(np.einsum("t,thwc->hwc", weights[0].numpy(), pieces), interpolation="none")
        bare(row[4])
    titles = ("tokens", "1. affinities K", "2. rows ÷ their sum: W", "3. row i of W", "4. output: Σ_j W_ij x_j")
    for axis, words in zip(axes[0], titles):
        axis.set_title(words, fontsize=8)
    return save(path, table)


def _draw_patches(axes, subject: ImageSubject, places: dict[str, tuple], pieces: Sequence[np.ndarray]) -> None:
    """The image with the chosen patches outlined, and below it the patches, in two rows."""
    bare(axes)
    axes[0].imshow(subject.pixels)
    (height, width), half = subject.tokens.patch, (len(places) + 1) // 2
    for name, (row, column) in places.items():
        frame(axes[0], (row, column), (height, width))
        centre = (column + 0.5) * width - 0.5, (row + 0.5) * height - 0.5
        word = axes[0].text(*centre, name, color=BOX, fontsize=9, ha="center", va="center_baseline", zorder=10)
        word.set(fontweight="bold", path_effects=[withStroke(linewidth=2.5, foreground="black")])
    gap = max(1, width // 8)
    for axis, part in zip(axes[1:], (slice(0, half), slice(half, None))):
        strip = [np.pad(piece, ((0, 0), (0, gap), (0, 0)), constant_values=1) for piece in pieces[part]]
        if strip:
            axis.imshow(np.concatenate(strip, axis=1)[:, :-gap])
        for number, name in enumerate(NAMES[: len(places)][part]):
            axis.text(number * (width + gap) + width / 2 - 0.5, -0.8, name, ha="center", va="bottom", fontsize=9)


def in_cell(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")[:3]


def _draw_matrix(axis, matrix: torch.Tensor) -> None:
    """A small matrix with its values; row i, the first, is framed."""
    axis.imshow(coloured(matrix, linear(torch.tensor([0.0, 1.0]))), interpolation="none")
    for (row, column), value in np.ndenumerate(matrix.numpy()):
        colour = "black" if value > 0.6 else "white"
        axis.text(column, row, in_cell(value), ha="center", va="center", fontsize=7, color=colour)
    for set_ticks in (axis.set_xticks, axis.set_yticks):
        set_ticks(range(len(matrix)), labels=NAMES[: len(matrix)], fontsize=8)
    frame(axis, (0, 0), (1, len(matrix)))
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def draw_block(subjects: Sequence[ImageSubject], folder: Path) -> list[Figure]:
    """Draw the block with projections and the block with the kernel side by side, with the numbers of parameters."""
    subject, (number, layer) = subjects[0], first_layer(subjects[0])
    heads, head_dim = layer.features.shape[1:]
    costs = {kind: attention_cost(kind, heads * head_dim, heads, subject.tokens.count).parameters for kind in MIXING}
    text = (
        f"{subject.about}. Blue: learned. The kernel replaces the three input projections; it learns one σ for each of "
        f"{heads} heads. Parameters of attention with width {heads * head_dim}: {costs['softmax']:,} with projections, "
        f"{costs['gka']:,} with the kernel ({1 - costs['gka'] / costs['softmax']:.0%} fewer). Right of the kernel: W "
        f"of layer {number}, head 1, on the image {subject.image}, its diagonal grey."
    )
    title = "The block: projections, or the kernel"
    save, axes = sheet(1, 2, (4.0, 5.2), title, text, (0.2, 0.2, 0.75, 0.1))
    for axis, kind in zip(axes[0], MIXING):
        axis.set_title(f"{KINDS[kind].label}: {costs[kind]:,} parameters in attention", fontsize=9)
        _draw_column(axis, MIXING[kind])
    weights = layer.weights[0]
    inset = axes[0, 1].inset_axes((0.79, 0.319, 0.2, 0.2 * 4.0 / 5.2))
    picture = matrix_picture(weights, logarithmic(off_diagonal(weights), decades=3), subject.tokens.prefix)
    inset.imshow(picture, interpolation="none")
    inset.set_xlabel("W", labelpad=2)
    bare(inset)
    rows = [{"attention": KINDS[kind].label, "parameters of attention": count} for kind, count in costs.items()]
    return [save(folder / "block.png", rows)]


def _draw_column(axis, mixing: list[tuple[str, str]]) -> None:
    """The boxes of a block from below, arrows between them, and the two residual connections."""
    bare(axis)
    axis.set(xlim=(0, 10), ylim=(0, 13))
    norm, middle, height = ("LayerNorm", "learned"), 4.3, 1.1
    parts = [norm, *mixing, ("output projection W_O", "learned"), norm, ("MLP", "learned")]
    bottoms = [1.0, 2.8, 4.6, 6.4, 8.75, 10.55]
    tops = [bottom + height for bottom in bottoms]
    style = dict(left=0.8, align="edge", color=[SHADE[shade] for _, shade in parts], edgecolor="black", linewidth=0.7)
    boxes = axis.barh(bottoms, 2 * (middle - 0.8), height, **style)
    axis.bar_label(boxes, [text for text, _ in parts], label_type="center", fontsize=8)
    for start, end in zip((0.3, *tops), (*bottoms, 12.6)):
        arrow = dict(arrowstyle="->", linewidth=0.9, shrinkA=0, shrinkB=0)
        axis.annotate("", (middle, end), (middle, start), arrowprops=arrow)
    for start, end in ((0.6, tops[3] + 0.45), (tops[3] + 0.75, tops[5] + 0.45)):
        axis.plot([middle, 0.3, 0.3, middle], [start, start, end, end], color="grey", linewidth=0.9)
        circle = dict(boxstyle="circle,pad=0.1", facecolor="white", edgecolor="black", linewidth=0.7)
        axis.text(middle, end, "+", ha="center", va="center", fontsize=8, bbox=circle)
