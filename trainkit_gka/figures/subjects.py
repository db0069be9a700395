"""One model's attention, as the figures of every trainer take it, and how their commands draw it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trainkit_gka.cli import UserError
from trainkit_gka.figures.measures import by_head, median_distance
from trainkit_gka.plots import Figure


class AttentionSubject:
    """Base of one model's attention on one input."""

    model: str  # the name of its folder of figures
    about: str  # model and weights, in words
    layers: list  # each with `kind`, `weights` (H, N, N), `error`, and `sigma`, (H,), and `features`, or None of both

    @property
    def num_heads(self) -> int:
        return max(len(layer.weights) for layer in self.layers)

    def layers_with(self, tensor: str) -> list[int]:
        """The layers, from 0, that have `tensor`, such as sigma."""
        return [number for number, layer in enumerate(self.layers) if getattr(layer, tensor) is not None]

    @property
    def sigmas(self) -> np.ndarray:
        """The bandwidths, (L, H); NaN in layers without."""
        return by_head([layer.sigma for layer in self.layers], self.num_heads)

    @property
    def median_distances(self) -> np.ndarray:
        """The median distance of two tokens' features, (L, H); NaN in layers without a bandwidth."""
        medians = [None if layer.sigma is None else median_distance(layer.features) for layer in self.layers]
        return by_head(medians, self.num_heads)

    def print_error(self) -> None:
        """Print how well W gives the model's output."""
        error = max(layer.error for layer in self.layers)
        depth = len(self.layers)
        print(f"{self.about}: W of {depth} layers gives the model's output, relative error up to {error:.1e}")


def check_names(abouts: Sequence[str]) -> None:
    """Raises UserError if two models that are drawn together are described alike."""
    for about in abouts:
        if abouts.count(about) > 1:
            raise UserError(f"{about} is given twice: drawn together, models need names of their own")


def draw_families(
    subjects: Sequence[AttentionSubject],
    folder: Path,
    families: dict[str, Callable[[Sequence, Path], list[Figure]]],
    why_not: Callable[[str, Sequence], str],
) -> None:
    """Draw the families that can be drawn of the subjects; print the files, and why others cannot."""
    for name, draw in families.items():
        if reason := why_not(name, subjects):
            print(f"{name}: not drawn, {reason}")
            continue
        for figure in draw(subjects, folder):
            print(f"{figure.path} and .pdf")
