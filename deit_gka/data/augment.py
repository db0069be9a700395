"""DeiT III's 3-Augment: every image is made grey, solarised or blurred, then its colours are jittered.

Touvron et al. 2022, arXiv 2204.07118, section 3.2.
"""

import random

from PIL import Image, ImageFilter
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from deit_gka.recipe import Recipe

BLUR = (0.1, 2.0)  # radius in pixels (upstream)


class Blur:
    """Gaussian blur with a random radius. It draws, as torchvision's do, from a generator the loader seeds for every image."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(*BLUR)))


def three_augment(recipe: Recipe) -> transforms.Compose:
    """Crop, flip, one of the three, jitter, normalise.

    The crop is resized; with `src` the shorter side becomes the size, and the crop lies within a reflected border of 4.
    """
    size, jitter = recipe.input_size, recipe.color_jitter
    if recipe.src:
        crop = [
            transforms.Resize(size, InterpolationMode.BICUBIC),
            transforms.RandomCrop(size, padding=4, padding_mode="reflect"),
        ]
    else:
        crop = [RandomResizedCropAndInterpolation(size, recipe.scale, recipe.ratio, interpolation="bicubic")]
    one_of_three = transforms.RandomChoice(
        [transforms.Grayscale(3), transforms.RandomSolarize(threshold=128, p=1.0), Blur()]
    )
    return transforms.Compose([
        *crop, transforms.RandomHorizontalFlip(recipe.hflip), one_of_three, *([transforms.ColorJitter(jitter, jitter, jitter)] if jitter else []),
        transforms.ToTensor(), transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    ])  # fmt: skip
