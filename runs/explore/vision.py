"""What the page shows of a vision model: the image, a map beside it, and the prediction, for any scaling of σ."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from deit_gka.data.transforms import eval_transform
from deit_gka.figures.maps import LayerMaps, attention_layers, attention_maps
from deit_gka.figures.measures import Tokens, effective_tokens
from deit_gka.figures.rollout import rollout
from deit_gka.figures.sheet import coloured, from_zero, logarithmic, smooth_map
from deit_gka.figures.subjects import Drawn
from runs.explore.photos import Photo
from runs.explore.scaling import Scaling, scaled

CLS, PATCH, ROLLOUT = "CLS map", "patch to patch", "rollout"
VIEWS = (CLS, PATCH, ROLLOUT)
WIDTH = 448  # pixels of a picture on the page, about
FRAME = (0, 255, 255)  # cyan, as in the figures
GAP, GREY = 12, 128  # pixels between the image and its map, and their colour
KEPT = 16  # results that a model remembers, so that another view of the same pass does not run it again


@dataclass(frozen=True)
class Seen:
    """What a model did with an image. pixels: (height, width, 3), 0 to 1. probabilities: (classes,)."""

    pixels: np.ndarray
    layers: list[LayerMaps]
    probabilities: torch.Tensor


@dataclass(frozen=True)
class View:
    """Which map to draw. layer, head, patch: from 0; the mean over heads for None."""

    name: str
    layer: int
    head: int | None
    patch: int


@dataclass(frozen=True)
class Picture:
    """An image and a map of it side by side, as bytes (height, width, 3), its scale, and what it is in a sentence."""

    pixels: np.ndarray
    norm: object  # of matplotlib
    caption: str


class VisionModel:
    """A model and its last results."""

    def __init__(self, drawn: Drawn):
        self.about, self.model = drawn.about, drawn.model
        self.classes = drawn.classes or [f"class {place}" for place in range(1, drawn.model.num_classes + 1)]
        self.tokens, self.layers = Tokens.of(drawn.model), attention_layers(drawn.model)
        self.transform = eval_transform(drawn.model.patch_embed.img_size, **drawn.settings)
        self.mean, self.std = (
            torch.tensor(drawn.settings.get(name, default))
            for name, default in (("mean", IMAGENET_DEFAULT_MEAN), ("std", IMAGENET_DEFAULT_STD))
        )
        self.look = functools.lru_cache(KEPT)(self._look)

    @property
    def untrained(self) -> bool:
        return "random initialisation" in self.about

    @property
    def shape(self) -> tuple[int, int, tuple[int, int]]:
        """Layers, heads, grid: what a twin must share."""
        return len(self.layers), max(layer.num_heads for layer in self.layers), self.tokens.grid

    @property
    def has_sigma(self) -> bool:
        return any(hasattr(layer, "log_sigma") for layer in self.layers)

    def _look(self, photo: Photo, scaling: Scaling) -> Seen:
        """Run the model on the image with scaled bandwidths. Cached as `look`."""
        batch, logits = self.transform(photo.image)[None], []
        model = scaled(self.model, attention_layers, scaling)
        model.register_forward_hook(lambda module, inputs, output: logits.append(output))
        layers = [layer.of_image(0) for layer in attention_maps(model, batch)]
        pixels = (batch[0].movedim(0, -1) * self.std + self.mean).clamp(0, 1).numpy()
        return Seen(pixels, layers, logits[0][0].softmax(-1))

    def values(self, seen: Seen, view: View) -> torch.Tensor:
        """What a map shows of every patch, (rows, columns)."""
        if view.name == ROLLOUT:
            row = self.tokens.read(rollout([layer.weights for layer in seen.layers], self.tokens)).float()
            return self.tokens.patches(row * self.tokens.count)
        weights = seen.layers[view.layer].weights
        weights = weights.mean(0) if view.head is None else weights[view.head]
        row = weights[self.tokens.prefix + view.patch] if view.name == PATCH else self.tokens.read(weights)
        return self.tokens.patches(row)

    def picture(self, photo: Photo, view: View, scaling: Scaling) -> Picture:
        """Draw one of VIEWS with scaled bandwidths, in the colours of the model as it is: they stay while σ moves."""
        seen, times = self.look(photo, scaling), _times(self.model.patch_embed.img_size)
        norm = (logarithmic if view.name == PATCH else from_zero)(self.values(self.look(photo, Scaling()), view))
        image = np.uint8(np.rint(255 * seen.pixels.repeat(times, 0).repeat(times, 1)))
        values = self.values(seen, view)
        if view.name == PATCH:
            side = [pixels * times for pixels in self.tokens.patch]
            drawn = coloured(values, norm).repeat(side[0], 0).repeat(side[1], 1)
            for pixels in (image, drawn):
                self._frame(pixels, view.patch, times)
        else:
            drawn = smooth_map(values, norm, image.shape[:2])
        gap = np.full((len(image), GAP, 3), GREY, dtype=np.uint8)
        names = {CLS: f"W, {self.tokens.reader}.", ROLLOUT: f"Rollout, {self.tokens.reader}, × an equal share."}
        names[PATCH] = f"W of the patch in {self.tokens.place(view.patch)}, logarithmic."
        words = "" if view.name == ROLLOUT else _words(seen.layers[view.layer], view.head)
        caption = " ".join(filter(None, [f"{photo.name}. {names[view.name]}", words]))
        return Picture(np.concatenate([image, gap, drawn], axis=1), norm, caption)

    def _frame(self, pixels: np.ndarray, patch: int, times: int) -> None:
        """Draw the outline of a patch."""
        row, column = divmod(patch, self.tokens.grid[1])
        height, width = (side * times for side in self.tokens.patch)
        place = pixels[row * height : (row + 1) * height, column * width : (column + 1) * width]
        place[:3] = place[-3:] = place[:, :3] = place[:, -3:] = FRAME

    def patch_at(self, x: int, y: int) -> int:
        """The patch under a pixel of a picture, of the image or of the map beside it."""
        times = _times(self.model.patch_embed.img_size)
        (rows, columns), (height, width) = self.tokens.grid, self.tokens.patch
        across = x % (columns * width * times + GAP)
        row, column = min(y // (height * times), rows - 1), min(across // (width * times), columns - 1)
        return max(row, 0) * columns + max(column, 0)


def _times(size: tuple[int, ...]) -> int:
    """By how much an image is enlarged for the page."""
    return max(1, round(WIDTH / max(size)))


def _words(layer: LayerMaps, head: int | None) -> str:
    """σ and effective tokens of a head, or their mean."""
    weights = layer.weights if head is None else layer.weights[head : head + 1]
    words = f"Effective tokens {effective_tokens(weights).mean():.1f} of {weights.shape[-1]}."
    if layer.sigma is None:
        return f"This layer has no σ. {words}"
    sigma = layer.sigma.mean() if head is None else layer.sigma[head]
    return f"σ = {sigma:.3g}{' (mean over heads)' if head is None else ''}. {words}"
