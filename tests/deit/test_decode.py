"""Images of every kind become RGB, and broken ones are recognised."""

import pickle
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from deit_gka.data.sources import BrokenImage, decode
from image_files import png
from tiny_vision import encoded


def photo(size=64) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8))


def pixel(data) -> tuple[int, int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = decode(data)
    assert image.mode == "RGB"
    return image.getpixel((1, 1))


def close(one, other, tolerance):
    return all(abs(a - b) <= tolerance for a, b in zip(one, other, strict=True))


def test_eight_bit_images():
    assert pixel(encoded(Image.new("L", (4, 4), 77), "PNG")) == (77, 77, 77)
    assert pixel(encoded(Image.new("1", (4, 4), 1), "PNG")) == (255, 255, 255)
    assert pixel(encoded(Image.new("LA", (4, 4), (77, 0)), "PNG")) == (77, 77, 77)
    assert pixel(encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 0)), "PNG")) == (
        10,
        20,
        30,
    )  # alpha is dropped, not composited
    assert close(pixel(encoded(Image.new("RGB", (16, 16), (10, 200, 30)), "JPEG", quality=95)), (10, 200, 30), 3)
    assert pixel(Image.new("L", (4, 4), 5)) == (5, 5, 5)  # decoded already


@pytest.mark.parametrize("transparency", [None, 1, bytes([255, 0, 128])])
def test_palette(transparency):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([1, 2, 3, 40, 50, 60, 7, 8, 9])
    assert pixel(encoded(image, "PNG", **({} if transparency is None else {"transparency": transparency}))) == (
        40,
        50,
        60,
    )


@pytest.mark.parametrize("value, expected", [(0, 0), (32768, 128), (65535, 255), (257, 1), (300, 1)])
def test_sixteen_bit_gray(value, expected):
    array = np.full((4, 4), value, np.uint16)
    image, big_endian = Image.fromarray(array), array.astype(">u2").tobytes()
    files = encoded(image, "PNG"), encoded(image, "TIFF"), b"P5 4 4 65535\n" + big_endian
    decoded = image, Image.frombytes("I;16B", (4, 4), big_endian), Image.fromarray(array.astype(np.int32))
    for data in (*files, *decoded):
        assert close(pixel(data), (expected,) * 3, 0)


def test_sixteen_bit_colour():

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + struct.pack(">HHH", 65535, 32768, 0) * 4
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(row * 4))
        + chunk(b"IEND", b"")
    )
    assert close(pixel(data), (255, 128, 0), 1)


def test_cmyk_jpeg():
    assert close(pixel(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)), (255, 0, 0), 4)


def test_broken_images(monkeypatch):
    jpeg, progressive, whole = (
        encoded(photo(), "JPEG"),
        encoded(photo(), "JPEG", progressive=True),
        encoded(photo(), "PNG"),
    )
    webp, tiff, bmp = (encoded(photo(), format) for format in ("WEBP", "TIFF", "BMP"))
    for data in (jpeg, progressive, whole, webp, tiff, bmp):
        assert decode(data).size == (64, 64)
        for part in (0.02, 0.3, 0.6, 0.9):
            with pytest.raises(BrokenImage):
                decode(data[: int(len(data) * part)])
    with pytest.raises(BrokenImage, match="truncated"):
        decode(jpeg[: len(jpeg) // 2])
    eps = encoded(photo(8), "EPS")  # Pillow would start Ghostscript on it
    for data in (b"hello", b"<html>404 not found</html>", b"\0" * 5000, eps):
        with pytest.raises(BrokenImage, match="not a JPEG"):
            decode(data)
    with pytest.raises(BrokenImage, match="empty"):
        decode(b"")
    with pytest.raises(BrokenImage, match="floating"):
        decode(encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BrokenImage, match="bomb") as caught:
        decode(whole)
    assert "\n" not in str(caught.value) and str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_pictures_for_people_are_upright():
    """As a phone stores them: red at the left, which is on top. Models see what is stored, as torchvision's do."""
    stored = Image.new("RGB", (32, 24))
    stored.paste((255, 0, 0), (0, 0, 8, 24))
    exif = Image.Exif()
    exif[0x0112] = 6
    for form in ("JPEG", "PNG", "WEBP"):
        data = encoded(stored, form, exif=exif)
        shown, seen = decode(data, upright=True), decode(data)
        assert seen.size == (32, 24) and close(seen.getpixel((2, 20)), (255, 0, 0), 8)
        assert shown.size == (24, 32) and close(shown.getpixel((20, 2)), (255, 0, 0), 8) and shown.mode == "RGB"
    assert decode(encoded(stored, exif=b"Exif\0\0 nonsense"), upright=True).size == (32, 24)


def test_an_image_without_pixels_is_broken():
    with pytest.raises(BrokenImage, match="no pixels"):
        decode(Image.new("RGB", (0, 4)))


def test_out_of_memory_is_not_a_broken_image(monkeypatch):
    def exhausted(*args, **options):
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhausted)
    with pytest.raises(MemoryError):
        decode(png(1))
