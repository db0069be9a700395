"""From an encoded image to pixels: images of every kind become RGB, and augmentation is DeiT's, and DeiT III's."""

import math
import pickle
import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from deit_gka.data.seeds import seed_everything
from deit_gka.data.sources import BrokenImage, decode
from deit_gka.data.transforms import eval_transform, train_transform
from deit_gka.recipe import Recipe
from tiny_vision import encoded

# Decoding


def plain(mode, colour, form="PNG", **options):
    return encoded(Image.new(mode, (16, 16), colour), form, **options)


def palette(**transparency):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([1, 2, 3, 40, 50, 60, 7, 8, 9])
    return encoded(image, "PNG", **transparency)


def sixteen_bits(value):
    """Images of a 16-bit grey, with its 8 bits."""
    array, grey = np.full((4, 4), value, np.uint16), ((value + 128) // 257,) * 3
    image = Image.fromarray(array)
    pgm = b"P5 4 4 65535\n" + array.astype(">u2").tobytes()
    return [(data, grey, 0) for data in (encoded(image, "PNG"), encoded(image, "TIFF"), pgm, image)]


@pytest.mark.parametrize("data, colour, tolerance", [
    (plain("L", 77), (77, 77, 77), 0),
    (plain("RGBA", (10, 20, 30, 0)), (10, 20, 30), 0),  # alpha is dropped, not composited
    (plain("RGB", (10, 200, 30), "JPEG", quality=95), (10, 200, 30), 3),
    (plain("CMYK", (0, 255, 255, 0), "JPEG", quality=95), (255, 0, 0), 4),
    (Image.new("L", (4, 4), 5), (5, 5, 5), 0),  # decoded already
    (palette(transparency=bytes([255, 0, 128])), (40, 50, 60), 0),
    *sixteen_bits(32768), *sixteen_bits(65535), *sixteen_bits(300),
])  # fmt: skip
def test_every_mode_becomes_rgb(data, colour, tolerance):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = decode(data)
    assert image.mode == "RGB"
    assert all(abs(a - b) <= tolerance for a, b in zip(image.getpixel((1, 1)), colour, strict=True))


def test_broken_images(monkeypatch):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    forms = [dict(form=form) for form in ("JPEG", "PNG", "WEBP", "TIFF", "BMP")]
    cut = []
    for options in (*forms, dict(form="JPEG", progressive=True)):
        data = encoded(photo, **options)
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
        decode(encoded(photo, "PNG"))


# Augmentation


def test_transforms_are_deits():
    crop, flip, augment, *_, erase = train_transform(Recipe()).transforms
    assert (crop.size, crop.scale, crop.ratio) == ((224, 224), (0.08, 1.0), (3 / 4, 4 / 3)) and flip.p == 0.5
    assert augment.num_layers == 2 and {op.magnitude for op in augment.ops} == {9}
    assert (erase.probability, erase.rand_color, erase.per_pixel, erase.max_count) == (0.25, False, True, 1)


@pytest.mark.parametrize("three_augment", [False, True])
def test_pixels_are_normalised_as_configured(three_augment):
    """Grey 100 stays grey under all that three-augment does to it but solarising, which leaves darker pixels alone."""
    recipe = Recipe(mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 0.25), input_size=16, aa="", reprob=0, color_jitter=0)
    pixels = train_transform(replace(recipe, three_augment=three_augment))(Image.new("RGB", (20, 20), (100, 100, 100)))
    grey = 100 / 255
    expected = torch.tensor([(grey - 0.1) / 0.5, grey - 0.2, (grey - 0.3) / 0.25])
    torch.testing.assert_close(pixels.mean(dim=(1, 2)), expected, rtol=1e-4, atol=1e-4)


def test_three_augment_makes_one_of_three():
    """Of an image in one colour, without jitter: grey has equal channels, solarised has its bright channel turned
    dark, blurred is as it was."""
    transform = train_transform(Recipe(three_augment=True, color_jitter=0, input_size=16))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    colours = Counter()
    for seed in range(60):
        seed_everything(seed)
        pixels = transform(Image.new("RGB", (20, 20), (200, 100, 50))) * std + mean
        colours[tuple((pixels[:, 8, 8] * 255).round().int().tolist())] += 1
    grey = round((200 * 299 + 100 * 587 + 50 * 114) / 1000)
    assert set(colours) == {(grey,) * 3, (55, 100, 50), (200, 100, 50)}
    assert min(colours.values()) > 60 / 3 - 4 * math.sqrt(60 * 2 / 9)


def test_a_very_long_image_is_cut_before_it_is_resized():
    """Resized by its shorter side it would have 256 x 7,680,000 pixels."""
    for transform in (eval_transform(224, 0.875), train_transform(Recipe(three_augment=True, src=True))):
        assert transform.transforms[0](Image.new("RGB", (30_000, 1))).size == (20, 1)
