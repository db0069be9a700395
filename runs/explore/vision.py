"""What the page shows of a vision model: the image, a map beside it, and the prediction, for any scaling of σ."""

import functools
from dataclasses import replace

import numpy as np
import torch

from deit_gka.figures.maps import LayerMaps, attention_layers
from deit_gka.figures.measures import Tokens, effective_tokens
from deit_gka.figures.rollout import rollout
from deit_gka.figures.sheet import Subject, coloured, from_zero, logarithmic, smooth_map
from deit_gka.figures.subjects import Drawn, subjects_of
from runs.explore import markup
from runs.explore.photos import Photo
from runs.explore.scaling import Scaling, before_and_after, scaled, sigma_in_words

CLS, PATCH, ROLLOUT = VIEWS = ("CLS map", "patch to patch", "rollout")
WIDTH = 448  # pixels of a picture on the page, about
FRAME = (0, 255, 255)  # cyan, as in the figures
GAP, GREY = 12, 128  # pixels between the image and its map, and their colour
CLASSES = 5  # that are listed
KEPT = 16  # results that a model remembers, so that another view of the same pass does not run it again


class VisionModel:
    """A model and its last results."""

    def __init__(self, drawn: Drawn):
        self.drawn, self.about = drawn, drawn.about
        self.classes = drawn.classes or [f"class {place}" for place in range(1, drawn.model.num_classes + 1)]
        self.tokens, self.layers = Tokens.of(drawn.model), attention_layers(drawn.model)
        self.times = max(1, round(WIDTH / max(drawn.model.patch_embed.img_size)))  # larger on the page
        self.side = [pixels * self.times for pixels in self.tokens.patch]  # height and width of a patch on the page
        heads = max(layer.num_heads for layer in self.layers)
        self.shape = len(self.layers), heads, self.tokens.grid  # what a twin must share
        self.has_sigma = any(hasattr(layer, "log_sigma") for layer in self.layers)
        self.look = functools.lru_cache(KEPT)(self._look)

    def _look(self, photo: Photo, scaling: Scaling) -> tuple[Subject, torch.Tensor]:
        """What the model does with an image, with scaled bandwidths, and its probabilities, (classes,).

        Cached as `look`.
        """
        drawn = replace(self.drawn, model=scaled(self.drawn.model, self.layers, scaling))
        (subject,) = subjects_of(drawn, {photo.name: photo.image})
        return subject, subject.probabilities(torch.from_numpy(subject.pixels)[None])[0]

    def show(self, photo: Photo, view: str, patch: float, layer: int, head: int | None, scaling: Scaling) -> list:
        """The image and its map, what it is, and the likeliest classes. view: one of VIEWS. patch: from 1."""
        pixels, norm, caption = self.picture(photo, view, int(patch) - 1, layer, head, scaling)
        columns = before_and_after(scaling, lambda scaling: self.look(photo, scaling)[1])
        untrained = "random initialisation" in self.about
        heading = "Prediction" + (" of a random initialisation: it means nothing" if untrained else "")
        table = markup.chances(heading, columns, self.classes.__getitem__, CLASSES)
        return [pixels, markup.scale(norm, caption), table]

    def picture(
        self, photo: Photo, view: str, patch: int, layer: int, head: int | None, scaling: Scaling
    ) -> tuple[np.ndarray, object, str]:
        """An image and a map of it side by side, as bytes (height, width, 3), its scale, and what it is in a sentence.

        The colours are those of the model as it is: they stay while σ moves. patch: from 0.
        """
        subject, as_it_is = (self.look(photo, factors)[0] for factors in (scaling, Scaling()))
        norm = (logarithmic if view == PATCH else from_zero)(self._values(as_it_is, view, patch, layer, head))
        values = self._values(subject, view, patch, layer, head)
        image = np.uint8(np.rint(255 * subject.pixels.repeat(self.times, 0).repeat(self.times, 1)))
        if view == PATCH:
            drawn = coloured(values, norm).repeat(self.side[0], 0).repeat(self.side[1], 1)
            for pixels in (image, drawn):
                self._frame(pixels, patch)
        else:
            drawn = smooth_map(values, norm, image.shape[:2])
        gap = np.full((len(image), GAP, 3), GREY, dtype=np.uint8)
        names = {CLS: f"W, {self.tokens.reader}.", ROLLOUT: f"Rollout, {self.tokens.reader}, × an equal share."}
        names[PATCH] = f"W of the patch in {self.tokens.place(patch)}, logarithmic."
        words = "" if view == ROLLOUT else _words(subject.layers[layer], head)
        return np.concatenate([image, gap, drawn], axis=1), norm, f"{photo.name}. {names[view]}{words}"

    def _values(self, subject: Subject, view: str, patch: int, layer: int, head: int | None) -> torch.Tensor:
        """What a map shows of every patch, (rows, columns)."""
        if view == ROLLOUT:
            row = self.tokens.read(rollout([layer.weights for layer in subject.layers], self.tokens)).float()
            return self.tokens.patches(row * self.tokens.count)
        weights = subject.layers[layer].weights
        weights = weights.mean(0) if head is None else weights[head]
        return self.tokens.patches(weights[self.tokens.prefix + patch] if view == PATCH else self.tokens.read(weights))

    def _frame(self, pixels: np.ndarray, patch: int) -> None:
        """Draw the outline of a patch."""
        (height, width), (row, column) = self.side, divmod(patch, self.tokens.grid[1])
        place = pixels[row * height : (row + 1) * height, column * width : (column + 1) * width]
        place[:3] = place[-3:] = place[:, :3] = place[:, -3:] = FRAME

    def patch_at(self, x: int, y: int) -> int:
        """The patch under a pixel of a picture, of the image or of the map beside it."""
        (rows, columns), (height, width) = self.tokens.grid, self.side
        row, column = min(max(y, 0) // height, rows - 1), x % (columns * width + GAP) // width
        return row * columns + min(column, columns - 1)


def _words(layer: LayerMaps, head: int | None) -> str:
    """σ and effective tokens of a head, or their mean."""
    weights = layer.weights if head is None else layer.weights[head : head + 1]
    count = effective_tokens(weights).mean()
    return f" {sigma_in_words(layer, head)} Effective tokens {count:.1f} of {weights.shape[-1]}."
