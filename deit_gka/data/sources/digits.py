"""scikit-learn's handwritten digits: 1,797 grey images of 8 x 8 pixels that need no network."""

import numpy as np
from PIL import Image

from deit_gka.data.sources.base import ImageSource, Record
from trainkit_gka import extras
from trainkit_gka.cli import UserError


class Digits(ImageSource):
    """A third of the digits is `val`, every class alike, always the same ones."""

    def __init__(self, split: str):
        if reason := extras.missing("vision", "sklearn"):
            raise UserError(f"digits: {reason}")
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        parts = train_test_split(np.arange(len(digits.target)), test_size=1 / 3, random_state=0, stratify=digits.target)
        super().__init__("digits", split, [str(digit) for digit in range(10)])
        self._places, images = parts[split == "val"], np.rint(digits.images * 255 / 16).astype(np.uint8)
        self._images, self._labels = images[self._places], digits.target[self._places]

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int) -> Record:
        return Image.fromarray(self._images[index]), int(self._labels[index]), f"digits/{self._places[index]}"
