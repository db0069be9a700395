"""From an image to pixels: DeiT's augmentation, DeiT III's 3-Augment, and what evaluation does.

3-Augment makes every image grey, solarised or blurred, then jitters its colours (Touvron et al. 2022, arXiv 2204.07118,
section 3.2).
"""

import random

from PIL import Image, ImageFilter
from timm.data import create_transform
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from deit_gka.recipe import Recipe
from trainkit.cli import UserError

BLUR = (0.1, 2.0)  # radius in pixels (upstream)


class Blur:
    """Gaussian blur with a random radius from Python's generator, which is seeded for every image."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(*BLUR)))


def train_transform(recipe: Recipe):
    """Crop, flip, RandAugment, normalise, erase (timm's, in DeiT's order), or DeiT III's.

    Raises UserError for a RandAugment that timm does not know.
    """
    if recipe.three_augment:
        return three_augment(recipe)
    try:
        return create_transform(
            recipe.input_size,
            is_training=True,
            scale=recipe.scale,
            ratio=recipe.ratio,
            hflip=recipe.hflip,
            auto_augment=recipe.aa or None,
            color_jitter=None,
            interpolation="bicubic",
            mean=recipe.mean,
            std=recipe.std,
            re_prob=recipe.reprob,
            re_mode="pixel",
            re_count=1,
        )
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        example = "rand-m9-mstd0.5-inc1"
        raise UserError(f"--aa {recipe.aa!r} is not an augmentation of timm's, such as {example}: {error}") from None


def three_augment(recipe: Recipe) -> transforms.Compose:
    """Crop, flip, one of the three, jitter, normalise.

    The crop is resized; with `src` the shorter side becomes the size, and the crop lies within a reflected border of 4.
    """
    size, jitter = recipe.input_size, recipe.color_jitter
    if recipe.src:
        shorter_side = transforms.Resize(size, InterpolationMode.BICUBIC)
        crop = [shorter_side, transforms.RandomCrop(size, padding=4, padding_mode="reflect")]
    else:
        crop = [RandomResizedCropAndInterpolation(size, recipe.scale, recipe.ratio, interpolation="bicubic")]
    three = [transforms.Grayscale(3), transforms.RandomSolarize(threshold=128, p=1.0), Blur()]
    colours = [transforms.ColorJitter(jitter, jitter, jitter)] if jitter else []
    normalised = [transforms.ToTensor(), transforms.Normalize(recipe.mean, recipe.std)]
    flip = transforms.RandomHorizontalFlip(recipe.hflip)
    return transforms.Compose([*crop, flip, transforms.RandomChoice(three), *colours, *normalised])


def eval_transform(input_size: int | tuple[int, int], crop_pct: float, interpolation: str = "bicubic", **settings):
    """Resize, crop the centre, normalise. settings: crop_mode, mean and std, if not timm's and ImageNet's."""
    return create_transform(input_size, is_training=False, interpolation=interpolation, crop_pct=crop_pct, **settings)
