"""From an image to pixels: DeiT's augmentation, DeiT III's 3-Augment, and the transform of evaluations.

3-Augment makes every image grey, solarised or blurred, then jitters its colours (Touvron et al. 2022, arXiv 2204.07118,
section 3.2).
"""

import random

from PIL import Image, ImageFilter
from timm.data import create_transform
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop

from deit_gka.recipe import Recipe
from trainkit_gka.cli import UserError

BLUR = (0.1, 2.0)  # radius in pixels (upstream)
MOST_ASPECT = 20  # of an image that is resized without cropping


def middle(image: Image.Image) -> Image.Image:
    """The middle of an image that is very long: resized by its shorter side it might not fit into memory."""
    longest = MOST_ASPECT * min(image.size)
    return center_crop(image, [min(side, longest) for side in (image.height, image.width)])


def blur(image: Image.Image) -> Image.Image:
    """Gaussian blur with a random radius from Python's generator, which is seeded for every image."""
    return image.filter(ImageFilter.GaussianBlur(random.uniform(*BLUR)))


def train_transform(recipe: Recipe) -> transforms.Compose:
    """Crop, flip, RandAugment, normalise, erase (timm's, in DeiT's order), or DeiT III's.

    Raises UserError for a RandAugment that timm does not know.
    """
    if recipe.three_augment:
        return three_augment(recipe)
    arguments = dict(scale=recipe.scale, ratio=recipe.ratio, hflip=recipe.hflip, color_jitter=None)
    arguments |= dict(auto_augment=recipe.aa or None, interpolation="bicubic", mean=recipe.mean, std=recipe.std)
    arguments |= dict(re_prob=recipe.reprob, re_mode="pixel", re_count=1)
    try:
        return create_transform(recipe.input_size, is_training=True, **arguments)
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
        crop = transforms.RandomCrop(size, padding=4, padding_mode="reflect")
        crop = [transforms.Lambda(middle), shorter_side, crop]
    else:
        crop = [RandomResizedCropAndInterpolation(size, recipe.scale, recipe.ratio, interpolation="bicubic")]
    three = [transforms.Grayscale(3), transforms.RandomSolarize(threshold=128, p=1.0), transforms.Lambda(blur)]
    colours = [transforms.ColorJitter(jitter, jitter, jitter)] if jitter else []
    normalised = [transforms.ToTensor(), transforms.Normalize(recipe.mean, recipe.std)]
    flip = transforms.RandomHorizontalFlip(recipe.hflip)
    return transforms.Compose([*crop, flip, transforms.RandomChoice(three), *colours, *normalised])


def eval_transform(
    input_size: int | tuple[int, int], crop_pct: float, interpolation: str = "bicubic", **settings
) -> transforms.Compose:
    """Resize, crop the centre, normalise. settings: crop_mode, mean and std, if not timm's and ImageNet's."""
    arguments = dict(interpolation=interpolation, crop_pct=crop_pct, **settings)
    steps = create_transform(input_size, is_training=False, **arguments).transforms
    only_the_middle_counts = settings.get("crop_mode") in (None, "center")
    return transforms.Compose([transforms.Lambda(middle)] * only_the_middle_counts + steps)


def in_words(transform: transforms.Compose) -> str:
    """How an `eval_transform` resizes and crops, such as "resize 256, centre crop 224, bicubic"."""
    resize, crop = (step for step in transform.transforms if hasattr(step, "size"))
    resized = str(resize.size) if isinstance(resize.size, int) else " x ".join(map(str, resize.size))
    cropped = " x ".join(map(str, sorted(set(crop.size), key=crop.size.index)))
    padded = " or pad" * hasattr(crop, "fill")
    interpolation = getattr(resize.interpolation, "value", resize.interpolation)
    return f"resize {resized}, centre crop{padded} {cropped}, {interpolation}"
