"""Images of every kind become RGB, and broken ones are recognised."""

import pickle
import warnings

import numpy as np
import pytest
from PIL import Image

from deit_gka.data.sources import BrokenImage, decode
from tiny_vision import encoded


def pixel(data) -> tuple[int, int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = decode(data)
    assert image.mode == "RGB"
    return image.getpixel((1, 1))


def plain(mode, colour, form="PNG", **options):
    return encoded(Image.new(mode, (16, 16), colour), form, **options)


def palette(**transparency):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([1, 2, 3, 40, 50, 60, 7, 8, 9])
    return encoded(image, "PNG", **transparency)


MODES = {  # a file or an image, its colour, by how much a channel may differ
    "grey": (plain("L", 77), (77, 77, 77), 0),
    "alpha is dropped, not composited": (plain("RGBA", (10, 20, 30, 0)), (10, 20, 30), 0),
    "JPEG": (plain("RGB", (10, 200, 30), "JPEG", quality=95), (10, 200, 30), 3),
    "CMYK JPEG": (plain("CMYK", (0, 255, 255, 0), "JPEG", quality=95), (255, 0, 0), 4),
    "decoded already": (Image.new("L", (4, 4), 5), (5, 5, 5), 0),
    "palette with alpha": (palette(transparency=bytes([255, 0, 128])), (40, 50, 60), 0),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb(mode):
    data, colour, tolerance = MODES[mode]
    assert all(abs(a - b) <= tolerance for a, b in zip(pixel(data), colour, strict=True))


@pytest.mark.parametrize("value, expected", [(32768, 128), (65535, 255), (300, 1)])
def test_sixteen_bit_gray(value, expected):
    array = np.full((4, 4), value, np.uint16)
    image, big_endian = Image.fromarray(array), array.astype(">u2").tobytes()
    for data in (encoded(image, "PNG"), encoded(image, "TIFF"), b"P5 4 4 65535\n" + big_endian, image):
        assert pixel(data) == (expected,) * 3


def test_broken_images(monkeypatch):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    jpeg, png = encoded(photo, "JPEG"), encoded(photo, "PNG")
    more = [encoded(photo, form) for form in ("WEBP", "TIFF", "BMP")]
    cut = []
    for data in (jpeg, encoded(photo, "JPEG", progressive=True), png, *more):
        assert decode(data).size == (64, 64)
        cut += [data[: int(len(data) * part)] for part in (0.02, 0.3, 0.6, 0.9)]
    eps = encoded(photo, "EPS")  # Pillow would start Ghostscript on it
    floats = encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF")
    for data in (*cut, b"<html>404 not found</html>", eps, b"", floats, Image.new("RGB", (0, 4))):
        with pytest.raises(BrokenImage) as caught:
            decode(data)
        # It comes from a worker process, and becomes a line of a list.
        assert "\n" not in str(caught.value) and str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BrokenImage, match="bomb"):
        decode(png)
