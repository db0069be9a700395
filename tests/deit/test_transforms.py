"""Augmentation is DeiT's, and 3-Augment DeiT III's."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from PIL import Image

from deit_gka.data.seeds import seed_everything
from deit_gka.data.transforms import train_transform
from deit_gka.recipe import Recipe


def test_transforms_are_deits():
    crop, flip, augment, *_, erase = train_transform(Recipe()).transforms
    assert (crop.size, crop.scale, crop.ratio) == ((224, 224), (0.08, 1.0), (3 / 4, 4 / 3)) and flip.p == 0.5
    assert augment.num_layers == 2 and {op.magnitude for op in augment.ops} == {9}
    assert (erase.probability, erase.rand_color, erase.per_pixel, erase.max_count) == (0.25, False, True, 1)


@pytest.mark.parametrize("three_augment", [False, True])
def test_pixels_are_normalised_as_asked(three_augment):
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
