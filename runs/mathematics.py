"""Draw the pictures of docs/mathematics.md: the operator itself, in float64, on a few features in the plane.

python -m runs.mathematics

The features are drawn from a seed; everything else is computed by gka. The same version of matplotlib draws the same
bytes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gka import gaussian_attention, gaussian_weights
from runs.frames import RESULTS
from runs.looks import LOOKS, legend, panels, save
from trainkit_gka.cli import run
from trainkit_gka.plots import BLUE, GREY, VERMILION
from trainkit_gka.progress import console

TOKENS, SEED = 24, 2
QUERY = 0  # the token whose row is drawn
SIGMA = 0.8
SHIFT = (3.0, 2.0)
EXTENT = 2.6  # half the width of the plane that is shown
LINE = torch.linspace(-EXTENT, EXTENT, 161, dtype=torch.float64)  # a coordinate of its grid
GKA, SOFTMAX = LOOKS["GKA"].colour, LOOKS["softmax"].colour


@dataclass
class MathematicsConfig:
    """Draw the pictures of docs/mathematics.md."""

    out: Path = RESULTS / "pictures"
    """Folder for the pictures."""


def features() -> torch.Tensor:
    """TOKENS features in the plane, (T, 2), float64; the first, QUERY, lies off the origin."""
    x = torch.randn(TOKENS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    x[QUERY] = torch.tensor([0.9, 0.6])
    return x


def operator(x: torch.Tensor, sigma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """W (T, T) and y (T, 2) of one head with these features, without eps."""
    log_sigma, one = torch.tensor([sigma], dtype=x.dtype).log(), x[None, :, None]
    weights = gaussian_weights(one, log_sigma, eps=0.0)[0, 0]
    return weights, gaussian_attention(one, log_sigma, eps=0.0, impl="reference")[0, :, 0]


def map_axes(axis: Any, x: torch.Tensor, title: str) -> None:
    """The plane with the query marked."""
    axis.plot(*x[QUERY], "o", color="none", markeredgecolor=SOFTMAX, markersize=9, label="query x_i", zorder=4)
    axis.set(aspect="equal", xlim=(-EXTENT, EXTENT), ylim=(-EXTENT, EXTENT), xticks=[], yticks=[])
    axis.set_title(title, fontsize=10)
    axis.grid(False)


def kernel(folder: Path) -> Path:
    """The kernel of one query over the plane, its row of W as sizes of points, and y, at three bandwidths."""
    x, (a, b) = features(), torch.meshgrid(LINE, LINE, indexing="xy")
    figure, axes = panels(1, 3, 3.5)
    distance2 = (a - x[QUERY, 0]) ** 2 + (b - x[QUERY, 1]) ** 2
    for axis, sigma in zip(axes, (SIGMA / 2, SIGMA, SIGMA * 4), strict=True):
        weights, y = operator(x, sigma)
        row = weights[QUERY]
        axis.contourf(a, b, torch.exp(-distance2 / (2 * sigma**2)), levels=[i / 10 for i in range(11)], cmap="Greys",
                      alpha=0.6)  # fmt: skip
        axis.scatter(x[:, 0], x[:, 1], s=6, color=BLUE, label="features x_j", zorder=3)
        axis.scatter(x[:, 0], x[:, 1], s=900 * row, color=VERMILION, alpha=0.45, linewidth=0, zorder=2,
                     label="weights W_ij, as areas")  # fmt: skip
        effective = torch.exp(-torch.special.xlogy(row, row).sum()).item()
        map_axes(axis, x, f"σ = {sigma:g}: W_ii = {row[QUERY]:.2f},\n{effective:.1f} effective tokens")
        axis.plot(*y[QUERY], "*", color=SOFTMAX, markersize=11, label="output y_i = Σ_j W_ij x_j", zorder=4)
    title = "The kernel as a map: what one token reads at three bandwidths"
    legend(figure, axes[:1], 4)
    return save(figure, title, folder / "mathematics-kernel.png")


def softmax(folder: Path) -> Path:
    """The score of a key as a dot product minus half a squared norm, over the plane, and both ways to the weights."""
    x, (a, b) = features(), torch.meshgrid(LINE, LINE, indexing="xy")
    product = (a * x[QUERY, 0] + b * x[QUERY, 1]) / SIGMA**2
    norm = -(a**2 + b**2) / (2 * SIGMA**2)
    figure, axes = panels(1, 3, 3.4)
    names = ("dot product  x_i·x_j / σ²", "norm of the key  −|x_j|² / 2σ²", "sum: the score  s_ij = log K_ij + const")
    for axis, name, score in zip(axes, names, (product, norm, product + norm), strict=True):
        levels = torch.arange(-9.0, 6.1, 1.0).tolist()
        axis.contourf(a, b, score, levels=levels, cmap="viridis", extend="both", alpha=0.75)
        axis.scatter(x[:, 0], x[:, 1], s=6, color=SOFTMAX, label="features x_j", zorder=3)
        axis.plot(0, 0, "+", color=SOFTMAX, markersize=9, label="origin", zorder=4)
        map_axes(axis, x, name)
    title = "It is a softmax: a slope plus a hill at the origin is a hill at the query"
    legend(figure, axes[:1], 3)
    return save(figure, title, folder / "mathematics-softmax.png")


def translation(folder: Path) -> Path:
    """A row of weights before and after all features move: of the Gaussian kernel, and of dot products."""
    x = features()
    moved = x + torch.tensor(SHIFT, dtype=x.dtype)
    figure, axes = panels(1, 3, 3.1)
    for place, name, face in ((x, "as they are", "none"), (moved, "all moved by c", GREY)):
        axes[0].scatter(place[:, 0], place[:, 1], s=14, facecolor=face, edgecolor=GREY, label=f"features {name}")
        axes[0].plot(*place[QUERY], "o", color="none", markeredgecolor=SOFTMAX, markersize=9)
    axes[0].annotate("", moved[QUERY], x[QUERY], arrowprops={"arrowstyle": "->"})
    axes[0].plot(0, 0, "+", color=SOFTMAX, markersize=10)
    axes[0].set(aspect="equal", xticks=[], yticks=[])
    axes[0].set_title("features; + is the origin", fontsize=10)
    order = operator(x, SIGMA)[0][QUERY].argsort(descending=True)
    kinds = {
        "Gaussian kernel": (GKA, lambda features: operator(features, SIGMA)[0]),
        "softmax of dot products": (SOFTMAX, lambda features: torch.softmax(features @ features.T / SIGMA**2, dim=-1)),
    }
    for axis, (name, (colour, weights_of)) in zip(axes[1:], kinds.items(), strict=True):
        before, after = (weights_of(place)[QUERY, order] for place in (x, moved))
        axis.step(range(TOKENS), before, where="mid", color=colour, linewidth=1.3, label="weights before")
        axis.bar(range(TOKENS), after, color=colour, alpha=0.45, label="weights after")
        axis.set_title(f"row of W, {name}", fontsize=10)
        axis.set(xlabel="tokens, nearest first", ylim=(0, None))
    title = "Translation: distances do not see a common shift, dot products do"
    legend(figure, axes[:2], 4)
    return save(figure, title, folder / "mathematics-translation.png")


def main(config: MathematicsConfig) -> None:
    config.out.mkdir(parents=True, exist_ok=True)
    for draw in (kernel, softmax, translation):
        console.print(f"drew {draw(config.out)}", highlight=False, markup=False)


if __name__ == "__main__":
    run(main, MathematicsConfig)
