"""Pictures and models small enough to train on in a second; processes.py runs the commands on them."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from processes import call, server

__all__ = ["call", "server"]

SIZE = 16
SHAPE = dict(patch_size=4, embed_dim=16, depth=2, num_heads=2)
MICRO = ["--model-kwargs", *(f"{key}={value}" for key, value in SHAPE.items())]
MICRO += ["--input-size", SIZE, "--device-type", "cpu"]


def photo(seed: int, label: int = 0, size: tuple[int, int] = (28, 24)) -> Image.Image:
    """Noise with stripes whose direction is the label's."""
    noise = np.random.default_rng(seed).integers(0, 60, (size[1], size[0], 3))
    y, x = np.mgrid[: size[1], : size[0]]
    stripes = 150 * ((x, y, x + y)[label % 3] // 4 % 2)
    return Image.fromarray((noise + stripes[..., None]).astype(np.uint8))


def encoded(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def write_pictures(folder: Path, train: int = 26, val: int = 9) -> Path:
    """`folder`/{train,val}/class_K/N.jpg: that many of each of three classes."""
    for split, count in (("train", train), ("val", val)):
        for label in range(3):
            place = folder / split / f"class_{label}"
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                image = photo(1000 * label + number + 500 * (split == "val"), label, (24 + number % 9, 32 - number % 7))
                (place / f"{number:03d}.jpg").write_bytes(encoded(image, quality=90))
    return folder
